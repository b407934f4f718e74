"""A log of the operations that made deferred tensors, from which their bytes are recomputed.

It refers to storages, not to tensors. ``recorder.py`` intercepts operations and fills the log.

- An operation lists the storages that it reads and writes (``touched``), and the storages that it creates.
- A storage lists its writers, so its bytes are recomputed by the relevant operations alone, in order.
- The real memory of mirrors is cached; evicted memory is recomputed when an operation reads it.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_shardckpt.compat.pytree import TreeSpec, tree_flatten, tree_unflatten
from lightning_shardckpt.compat.torch_tensors import Overload, alive, dispatches, storage_id
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.system.tuning import Tuning

_CACHE_RECENT = 8  # storages: the cache has room for a few of the largest of these
_COPY_BYTES = 1 << 20  # a foreign input up to this size is copied into the log, a larger one referenced and checked

aten = torch.ops.aten
UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_UNINITIALISED_TYPES = (UninitializedBuffer, UninitializedParameter)
ALTERNATIVE = "build this part outside of configure_model, in __init__; in Fabric, without empty_init"


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """A tracked storage, with the logged operations that wrote it, its real memory and its mirror."""

    nbytes: int
    writers: list[int]  # positions in the log, ascending; the first one created it
    weak: StorageWeakRef | None = None
    meta: torch.UntypedStorage | None = None


@dataclass(frozen=True, slots=True)
class TrackedView:
    """The geometry of a tensor over a tracked storage."""

    storage: TrackedStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: TrackedStorage) -> TrackedView:
        if tensor.is_conj() or tensor.is_neg():
            raise StateError(f"cannot defer a lazily conjugated or negated tensor: {ALTERNATIVE}")
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Constant:
    """The value of a foreign input when it was read: a copy, or a reference with a checksum."""

    tensor: torch.Tensor
    crc: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if plain and tensor.numel() * tensor.element_size() > _COPY_BYTES:
            return cls(tensor.detach(), _crc(tensor))
        return cls(tensor.detach().clone(), None)

    def value(self, operation: str) -> torch.Tensor:
        if self.crc is not None and _crc(self.tensor) != self.crc:
            raise StateError(
                f"cannot replay {operation}: its input of shape {tuple(self.tensor.shape)}, made outside the deferred "
                f"context, changed after it was read. Leave it unchanged until the parameters are filled, or "
                f"{ALTERNATIVE}."
            )
        return self.tensor


def _crc(tensor: torch.Tensor) -> int:
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(flat)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator, with all that is needed to repeat it."""

    func: Overload
    inputs: list[object]  # flattened; tensors as TrackedView or Constant
    spec: TreeSpec
    touched: frozenset[TrackedStorage]
    overwritten: TrackedStorage | None  # the operation does not depend on its earlier bytes
    created: tuple[tuple[int, TrackedStorage], ...]  # (position in the flattened outputs, storage)
    random: tuple[torch.Generator, torch.Tensor] | None
    default_dtype: torch.dtype

    def run(self, memory: dict[TrackedStorage, torch.UntypedStorage]) -> None:
        """Repeat the call on ``memory``, and add created storages; uninitialized bytes become zeros."""

        def resolve(x: object) -> object:
            if isinstance(x, TrackedView):
                return x.on(memory[x.storage])
            return x.value(str(self.func)) if isinstance(x, Constant) else x

        args, kwargs = tree_unflatten([resolve(x) for x in self.inputs], self.spec)
        with ExitStack() as undo:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            if self.random:
                generator, state = self.random
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            outputs = tree_flatten(self.func(*args, **kwargs))[0]
        for position, storage in self.created:
            if self.func.overloadpacket in UNINITIALISED:
                outputs[position].untyped_storage().fill_(0)  # equal on all ranks
            memory[storage] = outputs[position].untyped_storage()


@dataclass(slots=True)
class Log:
    """The logged operations, and a bounded cache of the real memory of mirrors."""

    tuning: Tuning
    operations: list[Operation] = field(default_factory=list)
    by_id: dict[int, TrackedStorage] = field(default_factory=dict)
    cache: OrderedDict[TrackedStorage, torch.UntypedStorage] = field(default_factory=OrderedDict)
    freed_bytes: int = 0  # evicted since memory was returned to the system

    def find(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the tracked storage of ``tensor``, or None. Ids are never reused, since weak references pin them."""
        if dispatches(type(tensor)) or isinstance(tensor, _UNINITIALISED_TYPES) or tensor.layout is not torch.strided:
            return None
        return self.by_id.get(storage_id(tensor.untyped_storage()))

    def is_mirror(self, tensor: object) -> bool:
        """Return True if ``tensor`` is a meta tensor that stands for a tracked storage."""
        return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and self.find(tensor) is not None

    def track(self, storage: TrackedStorage, memory: torch.UntypedStorage) -> None:
        """Set the real memory of ``storage``."""
        if storage.weak is not None:
            del self.by_id[storage.weak.cdata]  # no longer pinned, so it may be reused
        storage.weak = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        self.by_id[storage_id(memory)] = storage

    def append(self, operation: Operation, writes: set[TrackedStorage]) -> None:
        """Log an operation that wrote to the storages in ``writes``, besides the storages that it created."""
        for storage in writes.union(storage for _, storage in operation.created):
            storage.writers.append(len(self.operations))
        self.operations.append(operation)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Log the value of ``tensor``, which owns its memory, as an operation that creates it; return it."""
        storage = TrackedStorage(tensor.untyped_storage().nbytes(), [])
        inputs, spec = tree_flatten(((Constant(tensor.detach().clone(), None),), {}))
        created = ((0, storage),)
        dtype = torch.get_default_dtype()
        self.append(Operation(aten.clone.default, inputs, spec, frozenset(), None, created, None, dtype), set())
        self.track(storage, tensor.untyped_storage())
        return tensor

    def escape(self, tensor: torch.Tensor, operation: str) -> None:
        """Make the storage of a real tensor foreign, since an operation that is not logged may write to it."""
        storage = self.find(tensor)
        if storage is not None:
            if storage.meta is not None:
                raise StateError(f"cannot log the effect of {operation} on the memory of a parameter: {ALTERNATIVE}")
            del self.by_id[storage_id(tensor.untyped_storage())]

    def mirror(self, tensor: torch.Tensor, storage: TrackedStorage) -> torch.Tensor:
        """Return a meta tensor with the geometry of ``tensor``, over the meta storage that stands for ``storage``."""
        nbytes = tensor.untyped_storage().nbytes()
        if storage.meta is None:
            storage.meta = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
            self.by_id[storage_id(storage.meta)] = storage
        elif storage.meta.nbytes() < nbytes:
            storage.meta.resize_(nbytes)
        return TrackedView.of(tensor, storage).on(storage.meta)

    def real(self, tensor: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        """Return the real tensor of a mirror; its bytes are undefined if ``overwritten``."""
        storage = self.find(tensor)
        assert storage is not None and storage.weak is not None
        # A user may still hold a real alias. It must share this memory, so that writes are visible to both.
        memory = alive(storage.weak)
        if memory is None:
            memory = self.run(storage, storage.writers[0] + 1 if overwritten else len(self.operations))
            self.track(storage, memory)
        self.keep(storage, memory)
        return TrackedView.of(tensor, storage).on(memory)

    def keep(self, storage: TrackedStorage, memory: torch.UntypedStorage) -> None:
        """Cache ``memory``, and evict the least recently used memory."""
        self.cache[storage] = memory
        self.cache.move_to_end(storage)
        sizes = [memory.nbytes() for memory in self.cache.values()]
        tuning = self.tuning
        budget_bytes = max(tuning.replay_cache_bytes, tuning.replay_cache_operands * max(sizes[-_CACHE_RECENT:]))
        excess = sum(sizes) - budget_bytes
        while excess > 0 and self.cache:
            freed = self.cache.popitem(last=False)[1].nbytes()
            excess -= freed
            self.freed_bytes += freed
        if self.freed_bytes > tuning.replay_cache_bytes:
            _return_freed_memory()
            self.freed_bytes = 0

    def run(self, wanted: TrackedStorage, until: int) -> torch.UntypedStorage:
        """Return the bytes of ``wanted`` before operation ``until``; other storages are freed after their last use."""
        positions = self._slice(wanted, until)
        last_use = {storage: i for i in positions for storage in self._uses(i)}
        memory: dict[TrackedStorage, torch.UntypedStorage] = {}
        for i in positions:
            self.operations[i].run(memory)
            for storage in self._uses(i):
                if last_use[storage] == i and storage is not wanted:
                    memory.pop(storage, None)
        return memory[wanted]

    def _uses(self, position: int) -> set[TrackedStorage]:
        operation = self.operations[position]
        return set(operation.touched).union(storage for _, storage in operation.created)

    def _slice(self, wanted: TrackedStorage, until: int) -> list[int]:
        """Return the ascending positions of the operations on which ``wanted`` depends before ``until``."""
        todo, seen, chosen = [(wanted, until)], set(), set()
        while todo:
            item = todo.pop()
            if item in seen:
                continue
            seen.add(item)
            for position in self._writers(*item):
                if position not in chosen:
                    chosen.add(position)
                    operation = self.operations[position]
                    for storage in operation.touched:
                        dead = storage is operation.overwritten
                        todo.append((storage, storage.writers[0] + 1 if dead else position))
        return sorted(chosen)

    def _writers(self, storage: TrackedStorage, until: int) -> Iterator[int]:
        for position in reversed(storage.writers):
            if position < until:
                yield position
                if self.operations[position].overwritten is storage:
                    yield storage.writers[0]
                    return


def _return_freed_memory() -> None:
    """Give freed memory back: glibc keeps freed blocks below 32 MiB, and splits them for later allocations.

    Without this, a model of 400 MB in parameters of 16 MB left 4 GB unused (glibc 2.36, ``trunc_normal_``).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
