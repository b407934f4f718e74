"""Read what a load needs of a checkpoint into memory: plan the reads, and do them with a few threads.

Tasks are taken in the order of the files, so that the system reads ahead; where a process has two cores, by two
threads, of which one reads while the other computes checksums. Where every call takes long, there are more. Extra
memory is a window for each of them. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from lightning_shardckpt.distributed.liveness import own_cores
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks
from lightning_shardckpt.transfer.read_plan import ReadPlan, Request, Task
from lightning_shardckpt.transfer.shard_reader import ShardReader, cloned
from lightning_shardckpt.transfer.verified_reads import Files


def fetch(
    files: Files,
    requests: Iterable[Request],
    *,
    verify: bool,
    tuning: Tuning = TUNING,
    threads: int | None = None,
) -> None:
    """Read what the requests need; compare it with the checksums, put it into their targets, or both in one pass.

    Args:
        files: an opened checkpoint, whose files were checked by ``Checkpoint.check_file``.
        requests: in any order; those without a target are only verified.
        verify: read every block that a request touches whole, and compare it, where there are checksums.
        tuning: sizes.
        threads: how many, the calling one included; by default as many as the work is worth.

    Raises:
        CorruptionError: naming the file, the tensor and the rank that wrote it. Targets may be filled in part.
    """
    plan = ReadPlan(verify, files.reader.high_latency, tuning)
    wanted = plan.in_order(requests)
    count = threads or _thread_count(plan, wanted)

    @contextmanager
    def open_worker() -> Iterator[Callable[[Task], None]]:
        with cloned(files.path, files.reader) if count > 1 else nullcontext(files.reader) as reader:
            yield ShardReader(files.path, reader, verify=verify, tuning=tuning).do

    run_tasks(plan.tasks(wanted), open_worker, threads=count, name="shardckpt-reader")


def planned_reads(
    files: Files, requests: Iterable[Request], *, verify: bool, tuning: Tuning = TUNING
) -> Iterator[tuple[str, int, int]]:
    """The ranged reads that ``fetch`` would make: file, offset, length. Nothing is read, and no target is touched."""
    plan = ReadPlan(verify, files.reader.high_latency, tuning)
    return plan.reads(plan.in_order(requests))


def _thread_count(plan: ReadPlan, requests: list[Request]) -> int:
    if not plan.high_latency and own_cores() == 1:
        return 1
    nbytes = sum(request.nbytes for request in requests)
    if plan.high_latency:
        tasks = max(len(requests), nbytes // plan.window_bytes)  # or fewer
        return max(min(plan.tuning.high_latency_threads, tasks), 1)
    return 2 if nbytes >= plan.tuning.threaded_read_bytes else 1
