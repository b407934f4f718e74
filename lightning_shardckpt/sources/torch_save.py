"""Files of ``torch.save``, such as Lightning's checkpoints and Hugging Face's older ones, as a source.

torch maps such a file. Where a tensor lies in it follows from where it lies in memory, so that it is read like those of
other formats: a rank reads its slices, and a file that became shorter is an error and no SIGBUS. Tensors that are not
in one piece are copied out of the mapping.
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
from lightning_shardckpt.state.state_dicts import KEYS, checkpoint_of_states, is_lightnings, is_weights
from lightning_shardckpt.state.tensor_bytes import dtype_name
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.transfer.whole_tensors import StoredTensors

_LISTED = 5

CheckpointAndWeights: TypeAlias = tuple[dict[str, Any], dict[str, Any] | None]
"""Everything else by Lightning's keys, and the state dict; None if there is no model."""


class TorchFileSource:
    """A file of ``torch.save`` with Lightning's keys, with state dicts of objects by key, or that is a state dict.

    Of several modules, that under "model" is read, where there is one; ``with_all_modules`` reads all.

    Args:
        path: of the file; with ``files``, of their directory.
        weights_only: as in ``torch.load``.
        files: names of several, each with a part of a state dict.
    """

    def __init__(self, path: str, weights_only: bool = True, files: Sequence[str] | None = None) -> None:
        self.path = path
        folder, name = os.path.split(os.path.abspath(path))
        self._folder, names = (path, list(files)) if files is not None else (folder, [name])
        self._names = names
        self._found = [map_file(os.path.join(self._folder, name), weights_only) for name in names]
        self._describe("model")

    def _describe(self, only: str | None) -> None:
        self._checkpoint, state_dict = _split_all(self._found, self.path, only)
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
        self._components = {n: Component(found, self._leaves[n].aliases) for n, found in specs.items()}
        self._read = ForeignSource(self._in_files(self._names))

    def with_all_modules(self) -> TorchFileSource:
        """Itself, from now on with all modules that the file has, the names of several prefixed by their keys."""
        if self._is_part:
            self.close()
            self._describe(None)
        return self

    @property
    def _is_part(self) -> bool:
        """True if the file has modules that are not read."""
        whole = _split(self._found[0], self.path, None)[0].get(KEYS)
        return whole is not None and whole != self._checkpoint.get(KEYS)

    def _in_files(self, names: Sequence[str]) -> ForeignTensors:
        """The tensors that lie in the files in one piece."""
        maps = [found for name in names for found in mappings(self._folder, name)]
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
            FormatError: naming tensors that are not there in one piece.
        """
        found = self._read.tensors
        lost = [k for n, leaves in self._leaves.items() for k in leaves.tensors if k not in found.components[n].tensors]
        if lost:
            more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
            raise FormatError(
                f"{self.path!r}: {', '.join(map(repr, lost[:_LISTED]))}{more} are not in the file in one piece; load "
                "it with torch.load and save contiguous tensors"
            )
        return found

    def close(self) -> None:
        """Release the files; the mapping ends with the tensors."""
        self._read.close()

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, each whole."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of "model", "optimizer", "frozen" or "versions"."""
        return self._documents.get(role)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Everything but model and optimizers, as it was pickled."""
        return {key: value for key, value in self._checkpoint.items() if key != FROZEN}

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape: torch has mapped the tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Return what reads the slices, and copies those of tensors that are not in one piece.

        Nothing is compared first: such a file has no checksums that torch would verify.
        """
        known = self._read.components()
        in_files = [target for target in targets if target.key in known[target.component].tensors]

        def fill() -> None:
            self._read.read(in_files)()
            for target in targets:
                if target.key not in known[target.component].tensors:
                    target.copy_from(self._leaves[target.component].tensors[target.key])

        return fill


def map_file(path: str, weights_only: bool = True) -> Any:
    """Return what is in a file of ``torch.save``, its tensors mapped.

    Raises:
        FormatError: if it is none that torch maps.
        CorruptionError: if torch cannot read it.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        if "mmap can only be used" in str(error):
            raise FormatError(
                f"{path!r} is no file that torch maps into memory: it is of torch before 1.6, or no file of torch.save "
                f"at all. If it is old, write it anew: torch.save(torch.load(path, weights_only=True), path)"
            ) from None
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {str(error).partition(chr(10))[0]}") from error
    except (LookupError, TypeError, ValueError, EOFError, OverflowError, AttributeError, AssertionError) as error:
        if not weights_only:  # it may be of what was executed
            raise
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {shown(str(error))}") from error


def _split_all(found: list[Any], path: str, only: str | None) -> CheckpointAndWeights:
    """Return the parts of a file that holds all, or of several that hold a state dict together."""
    first, state_dict = _split(found[0], path, only)
    for other in found[1:]:
        state_dict = {**(state_dict or {}), **(_split(other, path, only)[1] or {})}
    return first, state_dict


def _split(found: Any, path: str, only: str | None) -> CheckpointAndWeights:
    """Everything else, and the state dict; None where there are optimizers alone.

    Raises:
        CheckpointNotFoundError: if there is neither.
    """
    if isinstance(found, dict) and isinstance(found.get("state"), dict) and isinstance(found.get("param_groups"), list):
        return {"optimizer_states": [found]}, None
    if isinstance(found, Mapping) and not is_weights(found):
        checkpoint = dict(found) if is_lightnings(found) else checkpoint_of_states(found, nested=True, only=only)
        state_dict = None if checkpoint is None else checkpoint.pop("state_dict", None)
        if checkpoint is not None and (isinstance(state_dict, Mapping) or "optimizer_states" in checkpoint):
            return checkpoint, state_dict
    if is_weights(found):
        return {}, found
    raise CheckpointNotFoundError(
        f"{path!r} is a file, but no checkpoint: it has no state_dict, nor the state of a module or an optimizer under "
        "another key, nor is it a dict of tensors"
    )


class Mapped(NamedTuple):
    """Addresses at which the bytes of a file from ``offset`` on are."""

    first: int
    last: int
    offset: int
    name: str


def mappings(folder: str, name: str) -> Iterator[Mapped]:
    """Yield the file as this process has it in memory; nothing if its byte order differs: torch changed the copy."""
    path = os.path.join(folder, name)
    if byte_order(path) not in (None, sys.byteorder):
        return
    inode = os.stat(path).st_ino
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, offset, _, number, *_ = line.split(None, 5)
            if int(number) == inode:
                first, last = (int(address, 16) for address in addresses.split("-"))
                yield Mapped(first, last, int(offset, 16), name)


def boxes_in(tensor: torch.Tensor, maps: Sequence[Mapped]) -> tuple[ForeignBox, ...] | None:
    """Return where a tensor lies in a file; None if it does not lie there in one piece, as it is."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel():
        return ()
    first = tensor.data_ptr()
    for found in maps:
        if found.first <= first and first + tensor.nbytes <= found.last:
            begin = first - found.first + found.offset
            return (ForeignBox(Box.whole(tuple(tensor.shape)), found.name, begin),)
    return None
