"""Save and load, in call order.

``save``: prepare → agree → (table → join →) write → commit. ``save_async`` copies before it writes, and leaves that to
a thread. ``load``: open → compare → judge → plan → verify → fill → apply. Each line of them is a
``Ranks.step``: a failure on one rank reaches all of them before the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint_options import LoadOptions, SaveOptions
from lightning_shardckpt.checkpoint.finished_saves import Completed
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.load_job import LoadJob
from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_agreement import Agreement
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveJob
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.sources.assemble import assemble
from lightning_shardckpt.sources.open_source import opened
from lightning_shardckpt.sources.source import ReadTarget
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.module_io import ForCode
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.system.memory import gc_paused
from lightning_shardckpt.system.threads import signals_deferred

_STORAGE = StorageRouter()
_SAVE_DEFAULTS, _LOAD_DEFAULTS = SaveOptions(), LoadOptions()


def save(
    path: str,
    describe: Callable[[], Snapshot],
    *,
    ranks: Ranks,
    about: RunInfo,
    options: SaveOptions = _SAVE_DEFAULTS,
    storage: Storage = _STORAGE,
    plans: PlanCache | None = None,
    history: SaveHistory | None = None,
    on_complete: Callable[[Completed], None] | None = None,
) -> list[str]:
    """Write a checkpoint at ``path``; it is complete when this returns, and durable if ``storage`` syncs.

    Collective: every rank of ``ranks`` must call it, with the same path. A checkpoint that is at the path already
    stays loadable until the new one replaces it.

    Args:
        path: a directory that does not exist yet, is empty, or is a checkpoint.
        describe: gives this rank's state; called once, its errors reach all ranks.
        ranks: who saves together.
        about: for the root index.
        options: what the caller chose.
        storage: where ``path`` is; by default what it says, a path of the file system or a URL.
        plans: of earlier saves by the same caller; what still holds of them is not planned again.
        history: of earlier saves and loads by the same caller, whose files may be linked; used after ``agree``.
        on_complete: called on every rank when the checkpoint is complete.

    Returns:
        On rank 0, sentences for the user about what earlier saves left there; see ``Draft.notes``.

    Raises:
        FileExistsError: if another process is saving to the path, or what is there is no checkpoint.
        MismatchError: if replicas differ, naming tensors and ranks.
        Exception: the first failure of any rank, on every rank, naming it; see ``Ranks.step``.
    """
    job = SaveJob(path, ranks, about, options, storage, plans or PlanCache(), history or SaveHistory())
    with gc_paused(), job:
        agreed = _agree(job, describe, ranks)
        return _write_and_commit(job, agreed, on_complete, ranks)


def save_async(
    path: str,
    describe: Callable[[], Snapshot],
    *,
    ranks: Ranks,
    about: RunInfo,
    options: SaveOptions = _SAVE_DEFAULTS,
    background: Background,
    storage: Storage = _STORAGE,
    plans: PlanCache | None = None,
    history: SaveHistory | None = None,
    on_complete: Callable[[Completed], None] | None = None,
) -> Future[list[str]]:
    """Save as ``save`` does, but return when everything is copied to host memory; ``background`` writes and commits it.

    Collective: every rank of ``ranks`` must call it, with the same path. What is saved are the values at the call.
    Waits while ``background`` has no room, or still writes to this path.

    Args:
        path: as in ``save``, as are the others.
        describe: see ``save``.
        ranks: of the thread that calls; ``background`` has its own.
        about: see ``save``.
        options: see ``save``.
        background: of this rank; it writes what it was given earlier first.
        storage: see ``save``.
        plans: see ``save``.
        history: see ``save``; used by the thread that writes.
        on_complete: see ``save``; called in the thread that writes.

    Returns:
        What ``save`` would return, when the checkpoint is complete and durable on all ranks. Who doesn't look gets its
        error from the next ``save_async`` or ``Background.settle``.

    Raises:
        Exception: what a save in the background failed with, on every rank, each failure once; this one is not begun
            then. Else as ``save`` does.
    """
    background.settle(ranks, room_for=path)
    job = SaveJob(path, ranks, about, options, storage, plans or PlanCache(), history or SaveHistory())
    with gc_paused(), ExitStack() as unfinished:
        unfinished.enter_context(job)
        agreed = _agree(job, describe, ranks)
        memory = background.memory()
        ranks.step(f"copying what to save to {path!r}", lambda: job.stage(agreed, memory), _nothing)
        with signals_deferred():  # so that either the background has the draft, or this thread
            saved = background.save(path, partial(_finish, job, agreed, on_complete), memory)
            unfinished.pop_all()
        return saved


def _agree(job: SaveJob, describe: Callable[[], Snapshot], ranks: Ranks) -> Agreement:
    agreed = ranks.step(f"preparing to save {job.path!r}", lambda: job.prepare(describe), job.agree)
    if agreed is None:
        ranks.step(f"comparing replicas to save {job.path!r}", job.digests, job.blame)
        raise AssertionError("unreachable: blame raises")
    if len(agreed["groups"]) > 1:  # pipeline stages: one rank of each kind tells what it holds
        agreed["tables"] = ranks.step(f"planning to save {job.path!r}", lambda: job.table(agreed), job.join)
    return agreed


def _write_and_commit(
    job: SaveJob, agreed: Agreement, on_complete: Callable[[Completed], None] | None, ranks: Ranks
) -> list[str]:
    nbytes, linked = ranks.step(f"saving {job.path!r}", lambda: job.write(agreed), job.commit)
    job.completed()
    if on_complete is not None:
        on_complete(Completed(nbytes, linked))
    return job.notes


def _finish(
    job: SaveJob, agreed: Agreement, on_complete: Callable[[Completed], None] | None, ranks: Ranks
) -> list[str]:
    with job:
        return _write_and_commit(job, agreed, on_complete, ranks)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load besides the tensors: the trainer's state dict, non-tensor module state, and notes.

    ``notes`` are of what nobody asked for; ``skipped`` are of what was to be skipped. ``for_code`` is of the model's
    tensors, too: what its modules' own code is to load.
    """

    trainer: dict[str, Any]
    extra_state: dict[str, Any]
    notes: list[str]
    skipped: list[str]
    for_code: ForCode


def load(
    path: str,
    live: LoadTargets,
    *,
    ranks: Ranks,
    options: LoadOptions = _LOAD_DEFAULTS,
    filling: Callable[[], AbstractContextManager[None]] = nullcontext,
    pick_rank: Callable[[Any], int] | None = None,
    storage: Storage = _STORAGE,
) -> Loaded:
    """Bring live tensors and optimizers to the state at ``path``: a checkpoint, or a file of another program.

    Collective: every rank of ``ranks`` must call it. Each rank reads what it holds of each tensor, into the tensor's
    own memory. All differences are found before anything changes. With ``options.verify_first``, all bytes are checked
    on all ranks before that, too: so live tensors are read twice, the second time from the page cache where that is
    large enough; optimizer state that is allocated for the load, since there was none, and small tensors once.

    Args:
        path: what to load.
        live: what to load into.
        ranks: who loads together.
        options: what the caller chose.
        filling: is entered before anything in memory changes, and left when the load is done; it sees the error of one
            that leaves a mix behind.
        pick_rank: from the stored state of rank 0, whose rank state this rank takes; its own by default.
        storage: where ``path`` is; by default what it says, a path of the file system or a URL.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: listing all differences.
        CorruptionError: naming file, tensor and rank; with ``options.verify_first`` nothing has changed then.
    """
    where = f"checkpoint {path!r}"
    verify, safe, tuning = options.verify, options.weights_only, options.tuning
    source_of = opened(path, ranks=ranks, storage=storage, verify=verify, weights_only=safe, tuning=tuning)
    with gc_paused(), source_of as source:
        job = LoadJob(source, live, options.strict, pick_rank or (lambda _: ranks.rank))
        judged = ranks.step(f"comparing {where} with the model", job.compare, job.judge)
        targets, fill = list[ReadTarget](), list[Callable[[], None]]()

        def plan() -> None:
            targets.extend(job.plan(judged, keep_live=options.verify_first))

        def read() -> None:
            fill.append(job.read(targets))

        def apply() -> None:
            if not options.verify_first:
                read()
            fill[0]()
            job.apply()

        ranks.step(f"planning to load {where}", plan, _nothing)
        if options.verify_first:
            ranks.step(f"verifying {where}", read, _nothing)
        with filling():
            ranks.step(f"reading {where}", apply, _nothing)
        return Loaded(job.trainer, job.extra_state, job.notes, job.skipped, job.for_code)


def load_full(
    path: str,
    *,
    optimizers: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    storage: Storage = _STORAGE,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with whole tensors on the CPU, read by this process alone.

    Args:
        path: of a checkpoint of this package or of another program, or a URL.
        optimizers: whether optimizer state is in the dict.
        verify: whether to compare checksums, where the format has some.
        weights_only: for a file of ``torch.save``, as in ``torch.load``.
        storage: what opens checkpoints of this package.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        CorruptionError: naming file, tensor and rank.
    """
    ranks = Ranks.alone()
    with opened(path, ranks=ranks, storage=storage, verify=verify, weights_only=weights_only) as source:

        def whole(component: str, key: str) -> torch.Tensor:
            spec = source.components()[component].tensors[key]
            shape = source.backed(component, key)
            target = ReadTarget(component, key, torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype]), fresh=True)
            source.read([target])()
            return target.tensor

        return assemble(source, whole, decode_small, optimizers=optimizers)


def _nothing(reports: list[None]) -> None:
    """Rank 0 has nothing to add."""
