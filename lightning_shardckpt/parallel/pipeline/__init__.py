"""Pipeline parallelism for unchanged steps: stages, schedules, microbatches, messages and checks.

Runs a step, given as a function, on sharded modules. Must not know checkpoints or the Trainer.
"""
