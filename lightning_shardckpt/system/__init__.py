"""Threads, page memory, checksums, garbage collection and text: what the operating system and Python lack.

Nothing here knows checkpoints, torch or Lightning.
"""
