"""Initial weights of models of which no rank holds more than its own part.

In come constructors and `init` functions, recorded. Nothing here knows how modules are sharded or trained.
"""
