"""Training begins with weights of another program: which stored tensor is which of the model, and how it gets there."""
