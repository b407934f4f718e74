"""Whole tensors as files for other programs: torch files, safetensors, Hugging Face, PEFT.

In come opened checkpoints of any format. Nothing here knows live objects or process groups.
"""
