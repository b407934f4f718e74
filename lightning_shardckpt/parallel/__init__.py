"""Models made parallel: sharded tensors, sharded modules, pipelines that run an unchanged step.

In come modules and device meshes. Nothing here knows checkpoints; `shard_model.py` tells it in call order.
"""
