"""Checkpoints in object stores: obstore for S3, GCS and Azure, fsspec for memory and reading from the web.

The input is names and bytes; the root index is put last. Nothing here knows about tensors or renames.
"""
