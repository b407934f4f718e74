"""Threads, page memory, checksums, garbage collection, random generators and text, for everybody.

In come plain values and functions. Nothing here knows checkpoints or Lightning; only `random_generators` and
`tensor_digest` know torch.
"""
