"""The private names of torch and Lightning that this package uses, and its changes of their behavior at run time.

Nothing here knows checkpoints. A new version of torch or Lightning is one room to look at.
"""
