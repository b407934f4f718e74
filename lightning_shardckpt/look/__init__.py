"""What is in a checkpoint? Tools that read its indexes, and compare tensors. No torch."""
