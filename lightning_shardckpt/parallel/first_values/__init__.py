"""First values of modules, equal on every topology: built by rank 0 and sent, or made by the modules' own methods.

The input is a module with tensors that have no memory; sharding comes between. Nothing here knows meshes.
"""
