"""Save and load, in call order: the page that tells how a checkpoint comes to be and how it comes back.

``save``: prepare → agree → (table → join →) write → commit. ``save_async`` copies before it writes, and leaves that to
a thread. ``load``: open → compare → judge → plan → verify → (measure →) fill → (exchange →) apply. Each
line of them is a ``Ranks.step``: a failure on one rank reaches all of them before the next step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_shardckpt.background import Background
from lightning_shardckpt.collector import resting
from lightning_shardckpt.loading import Live, Load
from lightning_shardckpt.mirroring import Also
from lightning_shardckpt.opening import assemble, opened
from lightning_shardckpt.planning import Plans
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import About, Replicas, Save
from lightning_shardckpt.sharing import Sharing, is_faster
from lightning_shardckpt.sources import Target
from lightning_shardckpt.staging import TORCH_DTYPES
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.storage.places import Places
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.threads import uninterrupted

_PLACES = Places()


def save(
    path: str,
    describe: Callable[[], Snapshot],
    *,
    ranks: Ranks,
    about: About,
    size_per_shard: float,
    storage: Storage = _PLACES,
    plans: Plans | None = None,
    also: Also | None = None,
    replicas: Replicas = "same",
) -> list[str]:
    """Write a checkpoint at ``path``; it is complete when this returns, and durable if ``storage`` syncs.

    Collective: every rank of ``ranks`` must call it, with the same path. A checkpoint that is at the path already
    stays loadable until the new one replaces it.

    Args:
        path: a directory that does not exist yet, is empty, or is a checkpoint.
        describe: gives this rank's state; called once, its errors reach all ranks.
        ranks: who saves together.
        about: for the root index.
        size_per_shard: limit of a shard file in MB (2^20 bytes).
        storage: where ``path`` is; by default what it says, a path of the file system or a URL.
        plans: of earlier saves by the same caller; what still holds of them is not planned again.
        also: a format in which the model is written a second time, into the same directory, by the same ranks.
        replicas: whether tensors that several ranks hold must be the same, or the first rank's are stored.

    Returns:
        On rank 0, sentences for the user about what earlier saves left there; see ``Draft.notes``.

    Raises:
        FileExistsError: if another process is saving to the path, or what is there is no checkpoint.
        MismatchError: if replicas differ, naming tensors and ranks.
        Exception: the first failure of any rank, on every rank, naming it; see ``Ranks.step``.
    """
    job = Save(path, ranks, about, size_per_shard, storage, plans or Plans(), also, replicas)
    with resting(), job:
        agreed = _agreed(job, describe, ranks)
        return _written(job, agreed, ranks)


def save_async(
    path: str,
    describe: Callable[[], Snapshot],
    *,
    ranks: Ranks,
    about: About,
    size_per_shard: float,
    background: Background,
    storage: Storage = _PLACES,
    plans: Plans | None = None,
    also: Also | None = None,
    replicas: Replicas = "same",
    overlap_copy: bool = False,
) -> Future[list[str]]:
    """Like ``save``, but return when everything is copied to host memory; ``background`` writes and commits it.

    Collective: every rank of ``ranks`` must call it, with the same path. What is saved are the values at the call.
    Waits while ``background`` has no room, or still writes to this path.

    Args:
        path: as in ``save``, as are the others.
        describe: see ``save``.
        ranks: of the thread that calls; ``background`` has its own.
        about: see ``save``.
        size_per_shard: see ``save``.
        background: of this rank; it writes what it was given earlier first.
        storage: see ``save``.
        plans: see ``save``.
        also: see ``save``.
        replicas: see ``save``.
        overlap_copy: return before parameters and optimizer state are copied. Nobody may change them before
            ``background.wait_for_copies``; if somebody does, the save fails.

    Returns:
        What ``save`` would return, when the checkpoint is complete and durable on all ranks. Who doesn't look gets its
        error from the next ``save_async`` or ``Background.settle``.

    Raises:
        Exception: what a save in the background failed with, on every rank, each failure once; this one is not begun
            then. Else as ``save`` does.
    """
    background.settle(ranks, room_for=path)
    job = Save(path, ranks, about, size_per_shard, storage, plans or Plans(), also, replicas)
    with resting(), ExitStack() as unfinished:
        unfinished.enter_context(job)
        agreed = _agreed(job, describe, ranks)
        memory = background.memory()
        stage = partial(job.stage, agreed, memory, behind=overlap_copy)
        ranks.step(f"copying what to save to {path!r}", stage, _nothing)
        with uninterrupted():  # so that either the background has the draft, or this thread
            if job.copies is not None:
                job.copies.start()  # no sooner: its thread would compete with what ranks wait for
            saved = background.save(path, partial(_finished, job, agreed), memory, job.copies)
            unfinished.pop_all()
        return saved


def _agreed(job: Save, describe: Callable[[], Snapshot], ranks: Ranks) -> dict[str, Any]:
    agreed = ranks.step(f"preparing to save {job.path!r}", lambda: job.prepare(describe), job.agree)
    if "differ" in agreed:
        ranks.step(f"comparing replicas to save {job.path!r}", job.digests, job.blame)
    if len(agreed["groups"]) > 1:  # pipeline stages: one rank of each kind tells what it holds
        agreed["tables"] = ranks.step(f"planning to save {job.path!r}", lambda: job.table(agreed), job.join)
    return agreed


def _written(job: Save, agreed: dict[str, Any], ranks: Ranks) -> list[str]:
    ranks.step(f"saving {job.path!r}", lambda: job.write(agreed), job.commit)
    return job.notes


def _finished(job: Save, agreed: dict[str, Any], ranks: Ranks) -> list[str]:
    with job:
        return _written(job, agreed, ranks)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brings back besides the tensors: the trainer's state dict, non-tensor module state, and notes.

    ``notes`` are of what nobody asked for; ``skipped`` are of what was to be skipped.
    """

    trainer: dict[str, Any]
    extra_state: dict[str, Any]
    notes: list[str]
    skipped: list[str]


def load(
    path: str,
    live: Live,
    *,
    ranks: Ranks,
    strict: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    pick_rank: Callable[[Any], int] | None = None,
    share_reads: bool | None = None,
    storage: Storage = _PLACES,
) -> Loaded:
    """Bring live tensors and optimizers to the state at ``path``: a checkpoint, or what ``opening`` reads.

    Collective: every rank of ``ranks`` must call it. Each rank reads what it holds of each tensor, into the tensor's
    own memory. All differences are found, and with ``verify`` all bytes checked on all ranks, before anything changes:
    so live tensors are read twice, the second time from the page cache where that is large enough; optimizer state that
    is allocated for the load, since there was none, and small tensors once.

    Args:
        path: what to load.
        live: what to load into.
        ranks: who loads together.
        strict: whether a difference between checkpoint and live objects is an error; else the rest is loaded.
        verify: whether to compare checksums.
        weights_only: passed to ``torch.load`` for a file of ``torch.save``.
        pick_rank: from the stored state of rank 0, whose rank state this rank takes; its own by default.
        share_reads: whether ranks that hold the same of a DTensor each read a share of it and exchange the shares over
            the mesh's process groups; by default where that is measured to be faster.
        storage: where ``path`` is; by default what it says, a path of the file system or a URL.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: listing all differences.
        CorruptionError: naming file, tensor and rank; nothing has changed then.
    """
    where = f"checkpoint {path!r}"
    source_of = opened(path, ranks=ranks, storage=storage, verify=verify, weights_only=weights_only)
    with resting(), source_of as source:
        job = Load(source, live, strict, pick_rank or (lambda _: ranks.rank))
        judged = ranks.step(f"comparing {where} with the model", job.compare, job.judge)
        sharing = Sharing(job.source, share_reads if ranks.world > 1 else False)
        share = ranks.step(f"planning to load {where}", lambda: sharing.plan(job.plan(judged)), sharing.choose)
        ranks.step(f"verifying {where}", lambda: sharing.verify(share), _nothing)
        if share is None:
            share = ranks.step(f"measuring how fast {where} is read", sharing.measure, is_faster)
            if not share:
                ranks.step(f"verifying {where}", sharing.verify_rest, _nothing)
        ranks.step(f"reading {where}", sharing.fill, _nothing)
        if share:
            ranks.step(f"exchanging {where}", sharing.exchange, _nothing)
        job.apply()
        return Loaded(job.trainer, job.extra_state, job.notes, job.skipped)


def load_full(
    path: str,
    *,
    optimizers: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    storage: Storage = _PLACES,
) -> dict[str, Any]:
    """Lightning's checkpoint dict with whole tensors on the CPU, read by this process alone.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        CorruptionError: naming file, tensor and rank.
    """
    ranks = Ranks.alone()
    with opened(path, ranks=ranks, storage=storage, verify=verify, weights_only=weights_only) as source:

        def whole(component: str, key: str) -> torch.Tensor:
            spec = source.components()[component].tensors[key]
            shape = source.backed(component, key)
            target = Target(component, key, torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype]), fresh=True)
            source.verify([target])
            source.fill([target])
            return target.tensor

        return assemble(source, whole, optimizers=optimizers)


def _nothing(reports: list[None]) -> None:
    """Rank 0 has nothing to add."""
