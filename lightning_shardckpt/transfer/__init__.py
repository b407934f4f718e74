"""Execution of plans: bytes are written to files and read from them. No torch.

The input is plans and an open storage. Nothing here knows the purpose of a tensor.
"""
