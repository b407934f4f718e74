"""The actions that must survive every fault: kinds of save, deletion and consolidation, by worlds of several sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local_storage import LocalStorage
from tests.sweeps.faults.trial import Found, Scenario

OLD, NEW = 1, 2
SIZE_PER_SHARD = 0.0002  # MB: two files of each rank's tensors


def whole(step: int) -> dict[str, Any]:
    """A checkpoint in which no element is equal to one of another step, nor to its neighbours."""
    return {
        "state_dict": {
            "w": torch.arange(48.0).reshape(8, 6) + 1000 * step,
            "v": torch.arange(40, dtype=torch.int16).reshape(20, 2) + 1000 * step,
            "n": torch.tensor(float(step)),
        },
        "epoch": step,
        "global_step": step,
        "callbacks": {"Best": {"score": step / 7, "path": f"step-{step}.ckpt"}},
    }


def of_rank(step: int, ranks: Ranks) -> dict[str, Any]:
    """What a rank has of it: a shard of each matrix. The mesh needs no process group, since nothing communicates."""
    found = whole(step)
    if ranks.world > 1:
        mesh = DeviceMesh("cpu", torch.arange(ranks.world), _init_backend=False, _rank=ranks.rank)
        for name, tensor in found["state_dict"].items():
            if tensor.ndim:
                part = tensor.chunk(ranks.world)[ranks.rank].contiguous()
                found["state_dict"][name] = DTensor.from_local(
                    part, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
    return found


def save_step(path: str, step: int, ranks: Ranks, *, sync_files: bool = True) -> None:
    """Collective: every rank of ``ranks`` must call it."""
    state, storage = of_rank(step, ranks), LocalStorage(sync_files=sync_files)
    options = SaveOptions(SIZE_PER_SHARD)
    save(path, lambda: snapshot(state), SaveGroup(ranks), run=RunInfo(step), options=options, storage=storage)


def equal(a: Any, b: Any) -> bool:
    """Whether two checkpoints are the same, bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def loads(path: str) -> Literal["old", "new", "mixed", "nothing", "broken"]:
    """What is at a path."""
    try:
        found = load_full(path)
    except CheckpointNotFoundError:
        return "nothing"
    except Exception:
        return "broken"
    return which(found)


def which(found: Any, part: str | None = None) -> Literal["old", "new", "mixed"]:
    """Of which step a checkpoint is, or a part of it."""
    is_of = [equal(found, whole(step) if part is None else whole(step)[part]) for step in (OLD, NEW)]
    return "old" if is_of[0] else "new" if is_of[1] else "mixed"


def _one(root: str) -> str:
    return os.path.join(root, "last.ckpt")


def _step(root: str, step: int) -> str:
    return os.path.join(root, f"step-{step}.ckpt")


def _nothing(root: str, ranks: Ranks) -> None:
    """The root is empty."""


def _save_one(root: str, ranks: Ranks, step: int, sync_files: bool = True) -> None:
    save_step(_one(root), step, ranks, sync_files=sync_files)


def _save_again(root: str, sync_files: bool = True) -> None:
    _save_one(root, Ranks.alone(), NEW, sync_files)


def _prepare_in_place(root: str, ranks: Ranks) -> None:
    os.makedirs(_one(root), exist_ok=True)  # an empty directory is filled in place


def _save_over_in_place(root: str, ranks: Ranks) -> None:
    _prepare_in_place(root, ranks)
    _save_one(root, ranks, OLD)


def _found(root: str, nothing: Found, *, gone: bool = False) -> Found:
    """What is at ``last``: ``nothing`` if that is no checkpoint; with ``gone``, nothing else may be there then."""
    found = loads(_one(root))
    if found == "nothing":
        return "lost" if gone and os.path.lexists(_one(root)) else nothing
    return "lost" if found == "broken" else found


_first, _filled = partial(_found, nothing="old", gone=True), partial(_found, nothing="old")
_replaced, _deleted = partial(_found, nothing="lost"), partial(_found, nothing="new", gone=True)


def _rotate(root: str, ranks: Ranks) -> None:
    save_step(_step(root, NEW), NEW, ranks)
    if ranks.rank == 0:
        LocalStorage().remove(_step(root, OLD))


def _rotate_again(root: str) -> None:
    save_step(_step(root, NEW), NEW, Ranks.alone())
    if loads(_step(root, OLD)) == "old":
        LocalStorage().remove(_step(root, OLD))


def _newest(root: str) -> Found:
    old, new = loads(_step(root, OLD)), loads(_step(root, NEW))
    if old not in ("old", "nothing") or new not in ("new", "nothing"):
        return "mixed" if "mixed" in (old, new) else "lost"
    return "new" if new == "new" else "old" if old == "old" else "lost"


def _link(root: str, step: int) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None))
    ModelCheckpoint._link_checkpoint(trainer, _step(root, step), _one(root))


def _save_and_link(root: str, ranks: Ranks) -> None:
    save_step(_step(root, OLD), OLD, ranks)
    if ranks.rank == 0:
        _link(root, OLD)


def _relink(root: str, ranks: Ranks) -> None:
    """In the order of ModelCheckpoint(save_top_k=1, save_last="link")."""
    _rotate(root, ranks)
    if ranks.rank == 0:
        _link(root, NEW)


def _relink_again(root: str) -> None:
    _rotate_again(root)
    _link(root, NEW)


def _linked(root: str) -> Found:
    """The newest. The link names it, or the one before or nothing: Lightning replaces it after the rotation."""
    newest, linked = _newest(root), loads(_one(root))
    if linked in ("mixed", "broken"):
        return "mixed" if linked == "mixed" else "lost"
    return newest


def _over_link(root: str) -> Found:
    return _replaced(root) if loads(_step(root, OLD)) == "old" else "lost"


def _delete(root: str, ranks: Ranks) -> None:
    LocalStorage().remove(_one(root))


def _save_and_delete(root: str) -> None:
    save_step(_one(root), OLD, Ranks.alone())
    LocalStorage().remove(_one(root))


def _consolidate(root: str, ranks: Ranks) -> None:
    consolidate(_one(root), os.path.join(root, "whole.ckpt"))


def _consolidate_again(root: str) -> None:
    output = os.path.join(root, "whole.ckpt")
    if os.path.lexists(output):
        os.unlink(output)
    consolidate(_one(root), output)
    save_step(_one(root), NEW, Ranks.alone())


def _consolidated(root: str) -> Found:
    if loads(_one(root)) in ("mixed", "broken", "nothing"):
        return "lost"
    output = os.path.join(root, "whole.ckpt")
    if not os.path.lexists(output):
        return "old"
    try:
        return "new" if which(torch.load(output)) == "new" else "mixed"
    except Exception:
        return "lost"


def _export(root: str) -> None:
    options: Any = {"format": "safetensors", "split": "chunks", "size_per_shard": 0.0002, "overwrite": True}
    consolidate(_one(root), os.path.join(root, "chunks"), **options)


def _save_and_export(root: str, ranks: Ranks) -> None:
    """An export of the old checkpoint, and the new one."""
    save_step(_one(root), OLD, ranks)
    if ranks.rank == 0:
        _export(root)
    save_step(_one(root), NEW, ranks)


def _exported(root: str) -> Found:
    if loads(_one(root)) != "new":
        return "lost"
    try:
        with open(os.path.join(root, "chunks", "model.safetensors.index.json"), encoding="utf-8") as file:
            names = json.load(file)["weight_map"]
        files = {name: load_file(os.path.join(root, "chunks", name)) for name in set(names.values())}
    except Exception:
        return "lost"
    state = {tensor: files[name][tensor] for tensor, name in names.items()}
    return which(state, "state_dict")


def _export_again(root: str) -> None:
    _export(root)
    save_step(_one(root), NEW, Ranks.alone())


_old, _new = partial(_save_one, step=OLD), partial(_save_one, step=NEW)
_FIRST = Scenario("first save", 1, _nothing, _new, _first, _save_again)
_REPLACE = Scenario("save over an older one", 1, _old, _new, _replaced, _save_again)
_FILL = Scenario("save in place", 1, _prepare_in_place, _new, _filled, _save_again)
_REFILL = Scenario("save in place over an older one", 1, _save_over_in_place, _new, _replaced, _save_again)
_unsynced, _unsynced_again = partial(_new, sync_files=False), partial(_save_again, sync_files=False)
_UNSYNCED = Scenario(
    "save without syncs over an older one", 1, _old, _unsynced, _replaced, _unsynced_again, durable=False
)
_ROTATE = Scenario("rotation", 1, lambda r, k: save_step(_step(r, OLD), OLD, k), _rotate, _newest, _rotate_again)
# Not named, since the errors are Lightning's in part.
_LINK = Scenario("rotation with a link", 1, _save_and_link, _relink, _linked, _relink_again, named=False)
_OVER_LINK = Scenario("save over a link", 1, _save_and_link, _new, _over_link, _save_again)
_DELETE = Scenario("deletion", 1, _old, _delete, _deleted, _save_and_delete)
_CONSOLIDATE = Scenario("consolidation", 1, _new, _consolidate, _consolidated, _consolidate_again)
_EXPORT = Scenario("export over an older one", 1, _save_and_export, lambda r, k: _export(r), _exported, _export_again)


def scenarios(*worlds: int) -> Iterator[Scenario]:
    """Every kind of action, of checkpoints by worlds of these sizes."""
    for world in worlds:
        by = f", {world} rank{'s' * (world > 1)}"
        for kind in (_FIRST, _REPLACE, _FILL, _REFILL, _UNSYNCED, _ROTATE, _LINK, _OVER_LINK):
            yield replace(kind, name=kind.name + by, world=world)
        yield replace(_REPLACE, name=f"{_REPLACE.name} without an exchange of names{by}", world=world, exchange=False)
        for kind in (_DELETE, _CONSOLIDATE, _EXPORT):
            yield replace(kind, name=kind.name + by, prepared_by=world)


def scenario(name: str) -> Scenario:
    """The one of that name."""
    return next(found for found in scenarios(1, 2, 4) if found.name == name)
