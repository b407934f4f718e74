"""Checkpoints in object stores, through fsspec: retries, uploads in parts, a root object that is put last.

In come names and bytes. Nothing here knows tensors or renames.
"""
