"""The steps that both strategies take around Lightning's hooks: resume, `ckpt_path="last"`, preemption, disk space.

In come a Trainer or a Fabric. Nothing below the entry points imports this.
"""
