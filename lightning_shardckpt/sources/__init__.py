"""Sources of stored state: checkpoints of this package, DCP, Lightning, Hugging Face, torch files.

Turns paths into boxes of bytes by name. Nothing here runs code from a checkpoint, or knows the Trainer.
"""
