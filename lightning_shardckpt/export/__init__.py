"""Exports of whole tensors to files for other programs: torch files, safetensors, Hugging Face, PEFT.

The input is open checkpoints of any format. Nothing here knows about live objects or process groups.
"""
