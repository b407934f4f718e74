"""Storage of checkpoint files: a small protocol and its backends. No torch.

The input is names and bytes. Nothing here interprets the bytes, except to recognize other programs' files by name.
"""
