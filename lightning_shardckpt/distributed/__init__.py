"""Ranks that agree, fail together, tell each other numbers and notice each other's end.

In come process groups and stores of torch. Nothing here knows models or files.
"""
