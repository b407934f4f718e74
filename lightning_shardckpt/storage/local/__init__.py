"""Checkpoints as directories of a file system: durable writes, atomic renames, locks, leftovers.

In come names and bytes. Nothing here knows tensors or the network.
"""
