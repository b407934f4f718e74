"""Observe a training run: weights, optimizer state, random streams, batches and logged values of every step, per rank.

In come a live Trainer and a plan of ``tools.run_records``; out go files of records, which ``tools`` compares. It steers
a run that it did not start, and knows neither how runs are started nor what is compared.
"""
