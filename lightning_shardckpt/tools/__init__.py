"""Answers about a checkpoint: inspect, verify, diff, explain, map. No torch.

In come opened checkpoints. Nothing here changes one, or knows live objects.
"""
