"""Modules over a device mesh: which are sharded and how, and the gradients, random streams and clipping of that.

In come modules and plans. Nothing here knows pipelines or checkpoints.

A step, by the files that it runs through:

1. `shard_model.ShardedModule.run` enters the root of ``fully_shard`` (``carriers.Engine.run``).
2. Each module that was made a unit (``units.UnitForward``) has its parameters gathered by its carriers
   (``carriers.Carrier.run``), puts them in the places of the sharded ones, runs, and puts these back. A parameter that
   no carrier has is gathered by itself (``tensors.values.whole``) if the forward needs a plain tensor; else the sharded
   one acts as the whole one.
3. In the backward, torch gathers when it reaches an output of a carrier, or ``tensors.saved_parameters`` asks for a
   parameter. ``fully_shard`` reduces what a carrier has, ``tensors.gather`` what was gathered by itself,
   ``replicated_gradients`` what is not sharded.
4. After it, the ranks compare what they did (``carriers.Engine``), and ``gradient_sync`` does what is left.
5. Optimizers step on sharded tensors, by this rank's rows (``tensors.operations``); ``clip_grad`` clips before.
"""
