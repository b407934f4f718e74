"""The format on disk, pure: boxes, layouts, plans, indexes and headers as values. FORMAT.md says it in words.

In come names, shapes and JSON. Nothing here does I/O or imports torch.
"""
