"""Save and load live state, in call order: `checkpoint.py` is the page that everybody reads.

In come live objects, or the dict that Lightning makes of them, and a place to keep them. Nothing here imports
Lightning, or knows how a model came to be sharded.
"""
