"""Tests of whole runs: Trainer, Fabric, commands, examples, the documentation."""
