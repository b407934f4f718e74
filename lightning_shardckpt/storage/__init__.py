"""Storage of checkpoint files: a small protocol, directories of a file system, and object stores. No torch.

The input is names and bytes. Nothing here knows what the bytes mean, except the prefix of names in a root index.
"""
