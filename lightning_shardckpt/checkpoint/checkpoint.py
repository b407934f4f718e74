"""Save and load, in call order.

``save``: prepare → agree → (group_table → join_tables →) write → commit. In the background, it copies first, and lets a
thread write and commit. ``load``: open → match → read; its callers add a last step, finish, for what modules' own code
loads. Each is a ``Ranks.step``: a failure on one rank reaches all ranks before the next step begins.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.serialization import MAP_LOCATION
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.load_job import LoadJob, LoadTargets, RankComparison, Sources, start_load
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveJob, SaveOptions, refuse_differences
from lightning_shardckpt.compat.torch_tensors import map_tensors
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CorruptionError, MismatchError, ShardCkptError, StateError
from lightning_shardckpt.sources.hugging_face import is_safetensors
from lightning_shardckpt.sources.open_source import open_on_ranks
from lightning_shardckpt.sources.reading import ReadTarget, plan_reads
from lightning_shardckpt.sources.source import assemble
from lightning_shardckpt.state.json_tree import decode
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES
from lightning_shardckpt.state.state_dicts import METADATA
from lightning_shardckpt.state.trainer import Snapshot
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.system.host import gc_paused, signals_deferred
from lightning_shardckpt.system.text import count_text, list_some

_LISTED = 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of reading a checkpoint."""

    strict: bool = True  # raise an error for differences to live objects instead of loading the rest
    verify: bool = True  # compare checksums
    weights_only: bool = True  # passed to ``torch.load`` for a file of ``torch.save``


_STORAGE = StorageRouter()
_SAVE_DEFAULTS, _LOAD_DEFAULTS = SaveOptions(), LoadOptions()


def save(
    path: str,
    describe: Callable[[], Snapshot],
    group: SaveGroup,
    *,
    run: RunInfo,
    options: SaveOptions = _SAVE_DEFAULTS,
    storage: Storage = _STORAGE,
    in_background: bool = False,
) -> Future[None] | None:
    """Write a checkpoint at ``path``; it is complete when this returns, and durable if ``storage`` syncs.

    Collective: every rank of ``group`` must call it, with the same path: of a directory that does not exist yet, is
    empty, or is a checkpoint, which stays loadable until the new one replaces it. ``describe`` returns this rank's
    state; it is called once, and its errors reach all ranks. Sentences for the user are added to
    ``group.background.notes``.

    With ``in_background``, it waits until the save before is written, and returns a future when the state is copied to
    host memory. The thread of ``group.background`` writes and commits it. Its error is raised by ``Background.settle``,
    which the next such save calls.

    Raises:
        FileExistsError: if another process is saving to the path, or something other than a checkpoint is there.
        MismatchError: if replicas differ, naming tensors and ranks.
        Exception: the first failure of any rank, on every rank, naming it; see ``Ranks.step``. With ``in_background``
            also the failure of an earlier save, each failure once; then this save does not begin.
    """
    ranks, background = group.ranks, group.background
    if in_background:
        background.settle(ranks, before=path)
    job = SaveJob(path, group, run, options, storage)
    with gc_paused(), ExitStack() as unfinished:
        unfinished.callback(job.discard)
        agreed = ranks.step(f"preparing to save {path!r}", lambda: job.prepare(describe), job.agree)
        if agreed is None:
            refuse = partial(refuse_differences, path)
            ranks.step(f"comparing replicas to save {path!r}", lambda: job.replicas, refuse)
            raise AssertionError("unreachable: refuse_differences raises")
        job.accept(*agreed)
        if len(agreed[1]) > 1:  # pipeline stages: the first rank of each reports its tables
            job.joined = ranks.step(f"planning to save {path!r}", job.group_table, job.join_tables)
        if not in_background:
            _write_and_commit(job, ranks)
            return None
        memory = background.memory()
        ranks.step(f"copying what to save to {path!r}", lambda: job.plan(memory), lambda _: None)
        with signals_deferred():  # so that exactly one thread owns the draft
            saved = background.save(path, partial(_write_and_commit, job), memory)
            unfinished.pop_all()
        return saved


def _write_and_commit(job: SaveJob, ranks: Ranks) -> None:
    try:
        ranks.step(f"saving {job.path!r}", job.write, job.commit)
    finally:
        job.discard()


class LoadState(Protocol):
    """Live state that becomes targets when the ranks have agreed on it."""

    def look(self) -> Any:
        """Return this rank's view of the state, as JSON."""

    def agree(self, views: list[Any], ranks: Ranks) -> None:
        """Take the different views of all ranks. Collective: every rank must call it."""

    def targets(self) -> LoadTargets:
        """Return the objects to fill."""


def load(
    path: str,
    live: LoadTargets | LoadState,
    *,
    ranks: Ranks,
    options: LoadOptions = _LOAD_DEFAULTS,
    pick_rank: Callable[[Any], int] | None = None,
    storage: Storage = _STORAGE,
) -> LoadJob:
    """Load live tensors and optimizers from ``path``: a checkpoint, or a file of another program, or the URL of one.

    Collective: every rank of ``ranks`` must call it. Each rank reads its shard of each tensor into the tensor's own
    memory, and verifies it on the way. All differences are collected before any live object changes. If files are gone,
    since another save has replaced the checkpoint, all ranks start again on the new one, once.

    Args:
        path: of the checkpoint.
        live: the live objects to fill; a ``LoadState`` if the ranks must agree on them first.
        ranks: the ranks that load together.
        options: the options of the load.
        pick_rank: returns the rank whose stored rank state this rank takes, given that of rank 0.
        storage: of ``path``; by default the file system, or an object store for a URL.

    Returns:
        The rest of the state, and notes for the user, as attributes of the load.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: listing all differences.
        CorruptionError: naming file, tensor and rank; some live tensors have changed.
        OSError: with ``errno.ESTALE``, if the checkpoint was replaced twice, or during a load of a part of the state.
    """
    name, pick = f"checkpoint {path!r}", pick_rank or (lambda _: ranks.rank)
    look: Callable[[], Any] = (lambda: None) if isinstance(live, LoadTargets) else live.look
    opened: dict[str, Any] = {"verify": options.verify, "weights_only": options.weights_only, "report": look}

    def load_once() -> LoadJob:
        with gc_paused(), open_on_ranks(path, ranks=ranks, storage=storage, **opened) as (source, views):
            if not isinstance(live, LoadTargets):
                live.agree(views, ranks)
            jobs = list[LoadJob]()

            def compare() -> RankComparison:
                targets = live if isinstance(live, LoadTargets) else live.targets()
                jobs.append(start_load(source, targets, strict=options.strict, pick_rank=pick))
                return jobs[0].comparison

            def decide(reports: Sequence[RankComparison]) -> RankComparison:
                return _decide(source.path, jobs[0].targets.remedy, options.strict, reports)

            decision: RankComparison = ranks.step(f"comparing {name} with the model", compare, decide)
            (job,) = jobs
            job.notes.extend(decision["differences"])
            with mark_partly_loaded(job.targets.objects, path, decision["is_full"]):
                try:
                    ranks.step(f"reading {name}", lambda: job.fill(decision["sources"]), lambda _: None)
                except OSError as error:
                    if error.errno == errno.ESTALE and not decision["is_full"]:  # a new start may mix two saves
                        raise CorruptionError(f"{name}, after some tensors were filled: {error.strerror}") from error
                    raise
            return job

    return _restarted_if_replaced(load_once)


def _restarted_if_replaced(read: Callable[[], _T]) -> _T:
    """Return the result of ``read``, which runs again, once, if the checkpoint was replaced while it ran."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE or isinstance(error, ShardCkptError):
            raise
        return read()


def _decide(path: str, remedy: str, strict: bool, reports: Sequence[RankComparison]) -> RankComparison:
    """Merge the comparisons of all ranks, on rank 0; raise a MismatchError for differences, if ``strict``."""
    problems = list(dict.fromkeys(line for report in reports for line in report["differences"]))
    notes = list[str]()
    if problems:
        counted, listed = count_text(len(problems), "difference"), list_some(problems, _LISTED, "\n  ")
        if strict:
            raise MismatchError(
                f"cannot load {path!r} into this model: {counted}\n  {listed}\n"
                f"{remedy} to load the rest, or look with `python -m lightning_shardckpt inspect PATH`."
            )
        notes.append(f"left as they are: {counted} between {path!r} and this model\n  {listed}")
    sources: Sources = {}
    for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
        known = sources.get(group)
        sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
    is_full = not problems and all(report["is_full"] for report in reports)
    return {"differences": notes, "sources": sources, "is_full": is_full}


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Return True if ``path`` is a file for ``torch.load``."""
    return os.path.isfile(path) and not is_safetensors(os.fspath(path))


def load_full(
    path: str,
    map_location: MAP_LOCATION = None,
    *,
    optimizers: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    storage: Storage = _STORAGE,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with whole tensors on one device, read by this process alone.

    Args:
        path: a checkpoint of this package or of another program, or a URL.
        map_location: the device, or a dict or function as in ``torch.load``; the CPU by default.
        optimizers: include optimizer state.
        verify: compare checksums, if the format has them.
        weights_only: for a file of ``torch.save``, as in ``torch.load``.
        storage: opens checkpoints of this package.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        CorruptionError: naming file, tensor and rank.
    """
    device = torch.device("cpu")
    if map_location is not None:  # where torch.load puts tensors of the CPU: a sharded checkpoint records no devices
        file = io.BytesIO()
        torch.save(torch.empty(0), file)
        file.seek(0)
        device = torch.load(file, map_location=map_location, weights_only=True).device

    def read() -> dict[str, Any]:
        alone = Ranks.alone()
        with open_on_ranks(path, ranks=alone, storage=storage, verify=verify, weights_only=weights_only) as (source, _):

            def whole(component: str, key: str) -> torch.Tensor:
                shape, dtype = source.checked_shape(component, key), source.table[component][key].spec.dtype
                target = ReadTarget(component, key, torch.empty(shape, dtype=TORCH_DTYPES[dtype]))
                plan_reads(source, [target])()
                return target.tensor

            return assemble(source, whole, decode, optimizers=optimizers)

    checkpoint = _restarted_if_replaced(read)
    if device.type == "cpu":
        return checkpoint
    moved: dict[int, torch.Tensor] = {}  # shared tensors stay shared
    result = map_tensors(lambda tensor: moved.setdefault(id(tensor), tensor.to(device)), checkpoint)
    if (versions := getattr(checkpoint.get("state_dict"), METADATA, None)) is not None:
        vars(result["state_dict"])[METADATA] = versions
    return result


# ── partly loaded objects ─────────────────────────────────────────────────────────────────────────────────────────────

# A load fills live tensors while it verifies them, so a corrupted file leaves a mix of two states. Such modules and
# optimizers carry a mark, which saves and training runs refuse until a full load, and hooks that refuse their use.

_MARK = "_shardckpt_partly_loaded"  # the path of the failed load, and the hooks


@contextmanager
def mark_partly_loaded(objects: Collection[nn.Module | Optimizer], path: str, is_full: bool = False) -> Iterator[None]:
    """Mark objects as partly loaded while the block changes them; if it raises, the marks stay.

    Then hooks refuse the forward of marked modules and the step of marked optimizers. ``is_full`` tells that the block
    gives a value to every tensor, which also removes the marks of earlier failures.
    """
    new = [item for item in objects if _MARK not in vars(item)]
    for item in new:
        object.__setattr__(item, _MARK, (path, list[RemovableHandle]()))
    try:
        yield
    except BaseException:
        for item in new:
            hooks, refuse = vars(item)[_MARK][1], partial(_refuse_use, item)
            if isinstance(item, Optimizer):
                hooks.append(item.register_step_pre_hook(refuse))
            else:
                hooks += [part.register_forward_pre_hook(refuse) for part in item.modules()]
        raise
    for item in objects if is_full else new:
        for hook in vars(item)[_MARK][1]:
            hook.remove()
        object.__delattr__(item, _MARK)


def check_loaded(objects: Iterable[nn.Module | Optimizer]) -> None:
    """Raise a StateError for objects that are partly loaded, naming the path of the failed load."""
    for item in objects:
        if _MARK in vars(item):
            raise StateError(
                f"loading {vars(item)[_MARK][0]!r} failed after some tensors of {type(item).__name__} were filled. "
                "They are a mix of two states, which cannot be used or saved. Load another checkpoint that has all its "
                "tensors, or create a new object."
            )


def _refuse_use(item: nn.Module | Optimizer, *_: Any) -> None:
    check_loaded([item])
