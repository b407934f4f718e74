"""Where the bytes of a checkpoint are kept: a small protocol and its backends. No torch."""
