"""Modules over a device mesh: which are sharded and how, and the gradients, random streams and clipping of that.

In come modules and plans. Nothing here knows pipelines or checkpoints.
"""
