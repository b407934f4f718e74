"""Parallel models: sharded tensors, sharded modules, and pipelines that run an unchanged step.

The input is a module and device meshes; `shard_model.py` has the steps in call order. Nothing here knows checkpoints.
"""
