"""Files of ``torch.save`` as a source, such as Lightning's checkpoints and Hugging Face's older files.

torch maps such a file into memory. The offset of a tensor in the file follows from its address, so that it is read like
tensors of other formats: a rank reads its slices, and a truncated file is an error, not a SIGBUS. Tensors that are not
contiguous are copied out of the mapping.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_shardckpt.compat.torch_tensors import byte_order
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignSource, ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.source import ReadTarget
from lightning_shardckpt.state.documents import FROZEN, check_frozen
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.module_versions import versions_of
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.state.state_dicts import KEYS, checkpoint_of_states, is_lightning_dict, is_weights
from lightning_shardckpt.state.tensor_bytes import dtype_name
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.whole_tensors import StoredTensors

CheckpointAndWeights: TypeAlias = tuple[dict[str, Any], dict[str, Any] | None]
"""Lightning's checkpoint dict without ``state_dict``, and the state dict; None if there is no model."""


class TorchFileSource:
    """A file of ``torch.save`` with a checkpoint of Lightning, a dict of state dicts, or a state dict.

    Of several modules, it reads the one under "model" if there is one; ``with_all_modules`` reads all.

    Args:
        path: of the file; with ``files``, of their directory.
        weights_only: as in ``torch.load``.
        files: names of several files, each with a part of a state dict.
    """

    def __init__(self, path: str, weights_only: bool = True, files: Sequence[str] | None = None) -> None:
        self.path = path
        folder, name = os.path.split(os.path.abspath(path))
        self._folder, names = (path, list(files)) if files is not None else (folder, [name])
        self._names = names
        self._contents = [map_file(os.path.join(self._folder, name), weights_only) for name in names]
        self._describe("model")

    def _describe(self, only: str | None) -> None:
        self._checkpoint, state_dict = _split(self._contents[0], self.path, only)
        for other in self._contents[1:]:
            state_dict = {**(state_dict or {}), **(_split(other, self.path, only)[1] or {})}
        self._leaves: dict[str, Leaves] = {}
        self._documents: dict[str, Any] = {}
        if state_dict is not None:
            self._leaves["model"], self._documents["model"] = model_leaves(state_dict)
            self._documents["versions"] = versions_of(state_dict, encode_small)
        if "optimizer_states" in self._checkpoint:
            states = self._checkpoint.pop("optimizer_states")
            self._leaves["optimizer"], self._documents["optimizer"] = optimizer_leaves(states)
        if FROZEN in self._checkpoint:
            check_frozen(self._checkpoint[FROZEN])
            self._documents["frozen"] = self._checkpoint[FROZEN]
        specs = {n: specs_of(n, leaves, ((0, 1),)) for n, leaves in self._leaves.items()}
        self._components = {n: Component(own, self._leaves[n].aliases) for n, own in specs.items()}
        self._in_files = ForeignSource(self._locate())

    def with_all_modules(self) -> TorchFileSource:
        """Read all modules of the file, the names of several prefixed by their keys; return this source."""
        whole = _split(self._contents[0], self.path, None)[0].get(KEYS)
        if whole is not None and whole != self._checkpoint.get(KEYS):
            self.close()
            self._describe(None)
        return self

    def _locate(self) -> ForeignTensors:
        """Return the tensors that are contiguous in the files."""
        maps = [mapping for name in self._names for mapping in mappings(self._folder, name)]
        tensors = {
            component: {
                key: ForeignTensor(dtype_name(tensor, key), tuple(tensor.shape), boxes)
                for key, tensor in leaves.tensors.items()
                if (boxes := boxes_in(tensor, maps)) is not None
            }
            for component, leaves in self._leaves.items()
        }
        aliases = {
            component: {a: of for a, of in leaves.aliases.items() if of in tensors[component]}
            for component, leaves in self._leaves.items()
        }
        return ForeignTensors(self.path, LocalReader(self._folder, follow_links=True), tensors, aliases)

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in the files.

        Raises:
            FormatError: naming tensors that are not contiguous in the files.
        """
        located = self._in_files.tensors
        parts = located.components
        lost = [key for n, leaves in self._leaves.items() for key in leaves.tensors if key not in parts[n].tensors]
        if lost:
            raise FormatError(
                f"{self.path!r}: {list_some([*map(repr, lost)], 5)} are not contiguous in the file; load it "
                "with torch.load and save contiguous tensors"
            )
        return located

    def close(self) -> None:
        """Close the files; the mapping lives as long as the tensors."""
        self._in_files.close()

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return the JSON of "model", "optimizer", "frozen" or "versions"."""
        return self._documents.get(role)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Return all state but model and optimizers, as it was pickled."""
        return {key: value for key, value in self._checkpoint.items() if key != FROZEN}

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape; torch has mapped the tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

    def read(self, targets: list[ReadTarget]) -> None:
        """Fill the targets; there are no checksums to verify."""
        located = self._in_files.components()
        in_files = [target for target in targets if target.key in located[target.component].tensors]
        self._in_files.read(in_files)
        for target in targets:
            if target.key not in located[target.component].tensors:
                target.copy_from(self._leaves[target.component].tensors[target.key])


def map_file(path: str, weights_only: bool = True) -> Any:
    """Return the content of a file of ``torch.save``, with mapped tensors."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        if "mmap can only be used" in str(error):
            raise FormatError(
                f"{path!r} is not a file that torch can map into memory: it is from torch before 1.6, or not a file of "
                f"torch.save. If it is old, save it again: torch.save(torch.load(path, weights_only=True), path)"
            ) from None
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {str(error).partition(chr(10))[0]}") from error
    except (LookupError, TypeError, ValueError, EOFError, OverflowError, AttributeError, AssertionError) as error:
        if not weights_only:  # may come from executed code
            raise
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {shown(str(error))}") from error


def _split(content: Any, path: str, only: str | None) -> CheckpointAndWeights:
    """Split the content of a file into Lightning's other keys and the state dict; None if it has only optimizers."""
    is_dict = isinstance(content, dict)
    if is_dict and isinstance(content.get("state"), dict) and isinstance(content.get("param_groups"), list):
        return {"optimizer_states": [content]}, None
    if isinstance(content, Mapping) and not is_weights(content):
        is_lightnings = is_lightning_dict(content)
        checkpoint = dict(content) if is_lightnings else checkpoint_of_states(content, nested=True, only=only)
        state_dict = None if checkpoint is None else checkpoint.pop("state_dict", None)
        if checkpoint is not None and (isinstance(state_dict, Mapping) or "optimizer_states" in checkpoint):
            return checkpoint, state_dict
    if is_weights(content):
        return {}, content
    raise CheckpointNotFoundError(
        f"{path!r} is a file, but no checkpoint: it has no state_dict, nor the state of a module or an optimizer under "
        "another key, nor is it a dict of tensors"
    )


class MappedRange(NamedTuple):
    """The addresses of a file's bytes from ``offset`` on."""

    first: int
    last: int
    offset: int
    name: str


def mappings(folder: str, name: str) -> Iterator[MappedRange]:
    """Yield the ranges of memory that map a file; none if its byte order differs, since torch converted the memory."""
    path = os.path.join(folder, name)
    if byte_order(path) not in (None, sys.byteorder):
        return
    inode = os.stat(path).st_ino
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, offset, _, number, *_ = line.split(None, 5)
            if int(number) == inode:
                first, last = (int(address, 16) for address in addresses.split("-"))
                yield MappedRange(first, last, int(offset, 16), name)


def boxes_in(tensor: torch.Tensor, maps: Sequence[MappedRange]) -> tuple[ForeignBox, ...] | None:
    """Return the box of a tensor in a file; None if its memory is not mapped, or not contiguous."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel():
        return ()
    first = tensor.data_ptr()
    for one in maps:
        if one.first <= first and first + tensor.nbytes <= one.last:
            return (ForeignBox(Box.whole(tuple(tensor.shape)), one.name, first - one.first + one.offset),)
    return None
