"""Sweeps that run for as long as they are told to, each by a command of its own; the suite runs a part of each."""
