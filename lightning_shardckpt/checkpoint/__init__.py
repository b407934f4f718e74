"""Save and load live state; `checkpoint.py` shows both in call order.

Takes live objects, or Lightning's checkpoint dict of them, and a storage. Nothing here imports Lightning, or knows how
a model was sharded.
"""
