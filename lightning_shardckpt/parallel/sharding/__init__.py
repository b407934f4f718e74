"""Modules sharded over a device mesh: FSDP units, tensor-parallel plans, gradients, random streams, clipping.

The input is a module and a plan. Nothing here knows pipelines or checkpoints.

A step runs through these files:

1. ``shard_model.ShardedModule.run`` enters the root module of ``fully_shard`` (``fsdp.Engine.run``).
2. The forward of a unit (``units.UnitForward``) gathers parameters through proxies (``fsdp_proxies.FSDPProxy.run``),
   replaces the sharded ones, runs the original forward, and puts the sharded ones back. A parameter that code uses
   elsewhere, or in another dtype, is gathered by itself (``tensors.values.gather_whole``).
3. In the backward, torch gathers again when it reaches an output of a proxy, or when ``tensors.gathered_weights``
   unpacks a parameter. ``fully_shard`` reduces the gradients of proxies, ``tensors.values`` those of uses elsewhere.
4. After the backward, the ranks compare the units that they ran, and hooks of parameters get the reduced gradients
   (``backward_pass``); ``gradient_sync`` reduces the gradients of plain parameters.
5. ``clip_grad`` clips; optimizers step on this rank's rows of sharded tensors (``tensors.operations``).
"""
