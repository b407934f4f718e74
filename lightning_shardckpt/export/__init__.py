"""How does a checkpoint become files for other programs? What ``consolidate`` is made of."""
