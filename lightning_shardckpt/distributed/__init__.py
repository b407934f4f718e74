"""Agreement, joint failure, exchange of host numbers and liveness of ranks.

Takes process groups and stores of torch. Nothing here knows models or files.
"""
