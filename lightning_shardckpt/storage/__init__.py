"""Storage for the bytes of a checkpoint: a small protocol and its backends. No torch.

In come names and bytes. Nothing here knows what the bytes mean.
"""
