"""Sizes and times that depend on the machine, in one frozen value.

Functions that need one take ``tuning: Tuning = TUNING``; so do ``LoadOptions``, storages and ``Ranks``, and a strategy
has it as an attribute. There is no global state, and nothing is read from the environment. None of these values changes
what is stored: a checkpoint that was written with one ``Tuning`` is read with any other. Limits of the format, of S3 or
of another program are no tuning and stay where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes in bytes, times in seconds and numbers of threads; the defaults were measured or are explained here."""

    # ── reading tensors from shards ──
    read_window_bytes: int = 1 << 20  # of one read with checksums: still in the core's own cache when they are computed
    high_latency_window_bytes: int = 8 << 20  # the same where a read takes a round trip over a network
    read_part_bytes: int = 16 << 20  # of one read without checksums
    verified_part_bytes: int = 4 << 20  # of what one task reads into its place, window after window, with checksums
    direct_read_bytes: int = 64 << 10  # so much is read into its place, less goes through a window
    high_latency_direct_bytes: int = 4 << 20  # where every request is waited for and billed: neighbours together
    row_gap_bytes: int = 16 << 10  # between two rows: reading so much is no slower than another call
    unread_row_gap_bytes: int = 512  # the same in files that are not in the page cache yet
    threaded_read_bytes: int = 32 << 20  # a second thread is not worth it for less
    high_latency_threads: int = 16  # where the network is what is waited for
    held_bytes: int = 24 << 20  # how much a load may hold between verifying it and putting it into its place
    held_tensor_bytes: int = 64 << 10  # the largest tensor that is held: a larger one is sooner read a second time

    # ── filling large files: exports and consolidation ──
    fill_window_bytes: int = 4 << 20  # of each thread, twice; less stays in a cache, more takes fewer calls
    fill_threads: int = 4  # one at a time can write to a file, and that is about half of the work

    # ── writing files ──
    device_window_bytes: int = 64 << 20  # of a GPU's memory that is copied at a time; torch pins powers of two
    writeback_bytes: int = 8 << 20  # from 1 to 32 MiB it makes no difference

    # ── object stores ──
    upload_part_bytes: int = 8 << 20  # S3's least is 5 MiB
    upload_max_parts: int = 9_900  # of an object, of which parts grow to stay below it; S3 takes 10,000
    upload_threads: int = 4  # each with a part in memory
    stream_block_bytes: int = 16 << 20  # of a file that is written through fsspec, other than to S3
    download_window_bytes: int = 8 << 20
    download_threads: int = 8

    # ── ranks and other processes ──
    lock_wait_s: float = 5.0  # for a lock that is held for moments only
    turn_wait_s: float = 3600.0  # for another process of this machine that uploads, or downloads the same file
    leftover_quiet_s: float = 3600.0  # what a machine that locks don't reach left untouched so long is of a dead save
    host_look_s: float = 1.0  # between two looks of a waiting rank at the processes of its host
    look_again_s: float = 0.1  # ranks that see different checkpoints at a path look again so soon
    roll_call_s: float = 10.0  # a collective of training that failed on one rank fails on the others within this time
    rank_grace_s: float = 2.0  # a rank waits this much longer for rank 0 than rank 0 waits for the others
    rank_poll_s: float = 0.0005  # between the first looks of a rank into the store; more if there are many ranks
    rank_longest_poll_s: float = 0.003  # between later ones; more if there are many ranks
    heartbeat_s: float = 5.0  # between two beats of a rank in the store, of which each takes three to five requests
    silent_s: float = 300.0  # a rank without a beat for so long is lost; C code that keeps the GIL stops beats
    agreement_s: float = 0.25  # ranks of a training ask one another so often whether to end: for a batch it is 1 ms
    agreement_batches: int = 16  # ... and after so many batches, should these take longer than those before
    exception_meeting_s: float = 10.0  # ranks that got the same exception come to save within this time of each other
    farewell_s: float = 2.0  # rank 0 waits so long for the others to hear of an error

    # ── values that all ranks must have alike ──
    compared_bytes: int = 256 << 10  # before each batch, of parameters that are not sharded and of buffers, in turn
    compared_tensors: int = 16  # at most; each takes about 10 µs

    # ── deferred init ──
    replay_cache_bytes: int = 64 << 20  # real memory that is kept while ops are replayed, unless one op needs more
    replay_cache_operands: int = 3  # ... then so many times the largest storage used lately, as trunc_normal_ needs


TUNING = Tuning()
"""The default everywhere."""
