"""What tests stand on: the pool of ranks, small models and their twins, stores, hosts, worlds."""
