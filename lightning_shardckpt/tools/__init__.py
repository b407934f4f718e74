"""Answers about checkpoints and runs: inspect, verify, diff, map, digest, prove-resume, follow. No torch.

Takes paths of checkpoints, or the command that starts a run. Nothing here changes a checkpoint, or knows live objects.
"""
