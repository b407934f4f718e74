"""Sources of stored state: checkpoints of this package, DCP, Lightning, Hugging Face, torch files.

In come paths; out come boxes of bytes by name. Nothing here runs code that it reads, or knows the Trainer.
"""
