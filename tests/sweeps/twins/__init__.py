"""Training code as people write it, to be run on one process under plain Lightning, and sharded."""
