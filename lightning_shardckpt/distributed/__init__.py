"""Ranks that agree, fail together and notice each other's end.

In come process groups and stores of torch. Nothing here knows tensors or files.
"""
