"""Live objects as leaves by FQN and JSON documents, and back: model, optimizer, trainer, data position.

Takes modules, optimizers and dicts. Nothing here knows paths or storage, or communicates.
"""
