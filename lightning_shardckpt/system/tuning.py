"""Sizes and times that depend on the machine, in one frozen value.

Functions that need one take ``tuning: Tuning = TUNING``; so do storages and ``Ranks``, and a strategy
has one as an attribute. There is no global state, and nothing is read from the environment. No value changes the stored
bytes: a checkpoint written with one ``Tuning`` is read with any other. Limits of the format, of S3 or of another
program are not tuning and stay where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes in bytes, times in seconds and numbers of threads; the defaults were measured or are explained here."""

    # ── filling large files: exports and consolidation ──
    fill_window_bytes: int = 8 << 20  # one per thread; larger than blocks, of which two windows may share one
    fill_threads: int = 4  # only one at a time can write to a file, which is about half of the work

    # ── object stores ──
    upload_part_bytes: int = 8 << 20  # S3's minimum is 5 MiB

    # ── ranks and other processes ──
    retry_attempts: int = 6  # of a request to an object store
    retry_pause_s: float = 0.2  # before the second one; later pauses double
    retry_longest_pause_s: float = 10.0
    retry_total_s: float = 120.0
    host_look_s: float = 1.0  # between two checks of a waiting rank that the processes of its host live
    look_again_s: float = 0.1  # before ranks that see different checkpoints at a path look again
    rank_grace_s: float = 2.0  # a rank waits this much longer for rank 0 than rank 0 waits for the others
    rank_poll_s: float = 0.0005  # between a rank's first polls of the store; more with many ranks
    rank_longest_poll_s: float = 0.003  # between later polls; more with many ranks
    watch_s: float = 5.0  # between two looks of a rank for others that are lost; each takes about five requests
    agreement_s: float = 0.25  # between two agreements of training ranks whether to end; each takes 1 ms
    agreement_batches: int = 16  # ... at most, in case later batches take longer
    exception_agreement_s: float = 10.0  # within which all ranks that got the same exception start to save
    error_delivery_s: float = 2.0  # that rank 0 waits for the others to read an error


TUNING = Tuning()
"""The default of every ``tuning`` argument."""
