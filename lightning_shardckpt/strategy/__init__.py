"""The part of the strategies around Lightning's hooks: resume, ``ckpt_path="last"``, steps, preemption.

Works on a Trainer or a Fabric. Only the entry points import this folder.
"""
