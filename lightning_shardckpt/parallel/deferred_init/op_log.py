"""What was done to deferred tensors, and how are their bytes computed again? The log under ``DeferredInit``.

See ``deferred.py`` for the idea. Nothing here intercepts anything: ``recorder.py`` fills the log.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_shardckpt.errors import StateError

_CACHE_BYTES = 64 << 20  # real memory kept behind mirrors, unless one operation needs more
_CACHE_OPERANDS = 3  # ... then this many times the largest storage used lately: what ``trunc_normal_`` works on
_CACHE_RECENT = 8  # ... which is the largest of so many
_COPY_BYTES = 1 << 20  # a foreign input up to this size is copied into the log, a larger one referenced and checked

aten = torch.ops.aten
_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_UNINITIALISED_TYPES = (UninitializedBuffer, UninitializedParameter)
ALTERNATIVE = "build this part outside the deferred context, or pass defer_init=False"


@contextmanager
def unseen() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


@dataclass(eq=False, slots=True)
class Storage:
    """One tracked storage: which logged operations wrote it, and where its bytes and its mirror are."""

    nbytes: int
    writers: list[int]  # positions in the log, ascending; the first one created it
    weak: StorageWeakRef | None = None
    meta: torch.UntypedStorage | None = None


@dataclass(frozen=True, slots=True)
class View:
    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: Storage) -> View:
        if tensor.is_conj() or tensor.is_neg():
            raise StateError(f"cannot defer a lazily conjugated or negated tensor: {ALTERNATIVE}")
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Constant:
    """A foreign input as it was when read: a copy, or a reference with a checksum."""

    tensor: torch.Tensor
    crc: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            return cls(tensor.detach().clone(), None)
        if tensor.numel() * tensor.element_size() <= _COPY_BYTES:
            return cls(tensor.detach().clone(memory_format=torch.preserve_format), None)
        return cls(tensor.detach(), _crc(tensor))

    def value(self, operation: str) -> torch.Tensor:
        if self.crc is not None and _crc(self.tensor) != self.crc:
            raise StateError(
                f"cannot replay {operation}: its input of shape {tuple(self.tensor.shape)}, made outside the deferred "
                f"context, changed after it was read. Leave it unchanged until the parameters are filled, or "
                f"{ALTERNATIVE}."
            )
        return self.tensor


def _crc(tensor: torch.Tensor) -> int:
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(flat)


@dataclass(frozen=True, slots=True)
class Operation:
    func: torch._ops.OpOverload[..., Any]
    inputs: list[object]  # flattened; tensors as View or Constant
    spec: TreeSpec
    touched: frozenset[Storage]
    overwritten: Storage | None  # its earlier bytes do not matter to this operation
    created: tuple[tuple[int, Storage], ...]  # (position in the flattened outputs, storage)
    random: tuple[torch.Generator, torch.Tensor] | None
    default_dtype: torch.dtype

    def run(self, memory: dict[Storage, torch.UntypedStorage]) -> None:
        """Computes on `memory`, and adds what it creates."""
        flat = [
            x.on(memory[x.storage])
            if isinstance(x, View)
            else x.value(str(self.func))
            if isinstance(x, Constant)
            else x
            for x in self.inputs
        ]
        args, kwargs = tree_unflatten(flat, self.spec)
        with ExitStack() as undo:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            if self.random:
                generator, state = self.random
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            outputs = tree_flatten(self.func(*args, **kwargs))[0]
        for position, storage in self.created:
            if self.func.overloadpacket in _UNINITIALISED:
                outputs[position].zero_()  # so that ranks agree about memory that nobody initialised
            memory[storage] = outputs[position].untyped_storage()


@dataclass(slots=True)
class Log:
    """The operations so far, and a bounded cache of the real bytes behind mirrors."""

    operations: list[Operation] = field(default_factory=list)
    by_address: dict[int, Storage] = field(default_factory=dict)
    cache: OrderedDict[Storage, torch.UntypedStorage] = field(default_factory=OrderedDict)
    freed_bytes: int = 0  # evicted since memory was returned to the system

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """Returns the tracked storage of `tensor`, or None. An address is never reused: weak references pin it."""
        plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        if plain and not isinstance(tensor, _UNINITIALISED_TYPES) and tensor.layout is torch.strided:
            return self.by_address.get(tensor.untyped_storage()._cdata)
        return None

    def is_mirror(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and self.find(tensor) is not None

    def track(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        if storage.weak is not None:
            del self.by_address[storage.weak.cdata]  # no longer pinned, so it may be reused
        storage.weak = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        self.by_address[memory._cdata] = storage

    def append(self, operation: Operation, writes: set[Storage]) -> None:
        for storage in writes.union(storage for _, storage in operation.created):
            storage.writers.append(len(self.operations))
        self.operations.append(operation)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, whose memory nobody else has, after logging its value as an operation that creates it."""
        storage = Storage(tensor.untyped_storage().nbytes(), [])
        inputs, spec = tree_flatten(((Constant(tensor.detach().clone(), None),), {}))
        created = ((0, storage),)
        dtype = torch.get_default_dtype()
        self.append(Operation(aten.clone.default, inputs, spec, frozenset(), None, created, None, dtype), set())
        self.track(storage, tensor.untyped_storage())
        return tensor

    def escape(self, tensor: torch.Tensor, operation: str) -> None:
        """Makes real memory that something unlogged may write to foreign."""
        storage = self.find(tensor)
        if storage is not None:
            if storage.meta is not None:
                raise StateError(f"cannot log what {operation} does to the memory of a parameter: {ALTERNATIVE}")
            del self.by_address[tensor.untyped_storage()._cdata]

    def mirror(self, tensor: torch.Tensor, storage: Storage) -> torch.Tensor:
        """Returns a meta tensor with the geometry of `tensor`, over the one meta storage that stands for `storage`."""
        nbytes = tensor.untyped_storage().nbytes()
        if storage.meta is None:
            storage.meta = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
            self.by_address[storage.meta._cdata] = storage
        elif storage.meta.nbytes() < nbytes:
            storage.meta.resize_(nbytes)
        return View.of(tensor, storage).on(storage.meta)

    def real(self, tensor: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        """Returns the tensor that the mirror `tensor` stands for; its bytes are undefined if `overwritten`."""
        storage = self.find(tensor)
        assert storage is not None and storage.weak is not None
        # A user may still hold a real alias: there is at most one real memory per storage, so writes are seen by both.
        alive: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(storage.weak.cdata)
        if alive is not None:
            memory = alive
        else:
            memory = self.run(storage, storage.writers[0] + 1 if overwritten else len(self.operations))
            self.track(storage, memory)
        self.keep(storage, memory)
        return View.of(tensor, storage).on(memory)

    def keep(self, storage: Storage, memory: torch.UntypedStorage) -> None:
        """Caches `memory`, at the expense of what was used longest ago."""
        self.cache[storage] = memory
        self.cache.move_to_end(storage)
        sizes = [memory.nbytes() for memory in self.cache.values()]
        budget_bytes = max(_CACHE_BYTES, _CACHE_OPERANDS * max(sizes[-_CACHE_RECENT:]))
        excess = sum(sizes) - budget_bytes
        while excess > 0 and self.cache:
            freed = self.cache.popitem(last=False)[1].nbytes()
            excess -= freed
            self.freed_bytes += freed
        if self.freed_bytes > _CACHE_BYTES:
            _return_freed_memory()
            self.freed_bytes = 0

    def run(self, wanted: Storage, until: int) -> torch.UntypedStorage:
        """Computes the bytes of `wanted` before operation `until`, alone; every other storage lives while needed."""
        positions = self._slice(wanted, until)
        last_use = {storage: i for i in positions for storage in self._uses(i)}
        memory: dict[Storage, torch.UntypedStorage] = {}
        for i in positions:
            self.operations[i].run(memory)
            for storage in self._uses(i):
                if last_use[storage] == i and storage is not wanted:
                    memory.pop(storage, None)
        return memory[wanted]

    def _uses(self, position: int) -> set[Storage]:
        operation = self.operations[position]
        return set(operation.touched).union(storage for _, storage in operation.created)

    def _slice(self, wanted: Storage, until: int) -> list[int]:
        """Returns the positions, ascending, of the operations that matter to `wanted` before `until`."""
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

    def _writers(self, storage: Storage, until: int) -> Iterator[int]:
        for position in reversed(storage.writers):
            if position < until:
                yield position
                if self.operations[position].overwritten is storage:
                    yield storage.writers[0]
                    return


def _return_freed_memory() -> None:
    """Undoes what the allocator does to a log: glibc keeps freed blocks below 32 MiB, and splits them for what stays.

    Without this, a model of 400 MB in parameters of 16 MB left 4 GB behind (glibc 2.36, ``trunc_normal_``).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
