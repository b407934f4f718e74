"""Checkpoints of other formats as sources of tensors. None runs code of theirs."""
