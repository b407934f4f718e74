"""Checkpoints in object stores through fsspec: retries, multipart uploads, a root object that is put last.

The input is names and bytes. Nothing here knows about tensors or renames.
"""
