"""Save and load live state, in call order: `checkpoint.py` is the page that everybody reads.

In come live objects and a place to keep them. Nothing here knows Lightning, or how a model came to be sharded.
"""
