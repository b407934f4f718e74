"""Initial weights of models that are larger than a rank's memory.

Records constructors and ``init`` functions, and replays them per parameter. Must not know how modules are sharded.
"""
