"""The on-disk format as pure values: boxes, layouts, plans, indexes and headers. FORMAT.md is its specification.

The input is names, shapes and JSON. Nothing here does I/O or imports torch.
"""
