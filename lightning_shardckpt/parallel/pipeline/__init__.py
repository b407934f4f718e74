"""Pipeline parallelism for steps that know nothing of it: stages, microbatches, placeholders, one agreement.

In come sharded modules and a step as a function. Nothing here knows checkpoints or the Trainer.
"""
