"""Weights of other programs as a start: which stored tensor is which of the model, and what converts it.

In come opened sources and a model's names. Nothing here knows optimizers or the Trainer's state.
"""
