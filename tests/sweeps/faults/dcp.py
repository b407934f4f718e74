"""Torch's own distributed checkpoints under the same faults, for comparison; nothing here is ours."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.sweeps.faults.saves import NEW, OLD, which, whole
from tests.sweeps.faults.trial import Found, Scenario


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns and prints about what these trials are about."""
    logging.disable(logging.CRITICAL)
    try:
        out = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def save(path: str, step: int, *, many_files: bool = False) -> None:
    """Write the tensors of a step as DCP does by default, or each to a file of its own, as several ranks do."""
    writer = FileSystemWriter(path, single_file_per_rank=not many_files)
    with quiet():
        dcp_save(whole(step)["state_dict"], storage_writer=writer, no_dist=True)


def load(path: str) -> dict[str, torch.Tensor]:
    """Read them."""
    found = {name: torch.zeros_like(tensor) for name, tensor in whole(OLD)["state_dict"].items()}
    with quiet():
        dcp_load(found, storage_reader=FileSystemReader(path), no_dist=True)
    return found


def _found(path: str) -> Found:
    try:
        found = load(path)
    except BaseException:  # torch's CheckpointException is no Exception
        return "lost"
    return which(found, "state_dict")


def _same(root: str) -> Found:
    return _found(os.path.join(root, "last"))


def _newest(root: str) -> Found:
    """The newest directory that loads."""
    found = _found(os.path.join(root, "step-2"))
    return _found(os.path.join(root, "step-1")) if found == "lost" else found


def _scenario(name: str, old: str, new: str, found: Callable[[str], Found], many_files: bool = False) -> Scenario:
    def saves(step: int, name: str) -> Callable[..., None]:
        return lambda root, *_: save(os.path.join(root, name), step, many_files=many_files)

    return Scenario(f"DCP, {name}", 1, saves(OLD, old), saves(NEW, new), found, saves(NEW, new), named=False)


SCENARIOS = (
    _scenario("same directory, one file", "last", "last", _same),
    _scenario("same directory, several files", "last", "last", _same, many_files=True),
    _scenario("new directory", "step-1", "step-2", _newest),
)
"""Saves into the directory of the last one, as ``last`` checkpoints are saved, and into a new one."""
