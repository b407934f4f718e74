"""Threads, memory and processes of the host, digests, random generators and text, shared by all folders.

Takes plain values and functions. Nothing here knows checkpoints or Lightning; only `random_generators` and
`tensor_digest` know torch.
"""
