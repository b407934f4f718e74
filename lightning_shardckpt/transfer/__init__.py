"""Plans become bytes in files, and back. No torch.

In come plans and an open storage. Nothing here knows what a tensor is for.
"""
