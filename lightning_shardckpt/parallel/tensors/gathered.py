"""Sharded tensors with their gathered values, and the parameters that running forwards have gathered.

A module keeps its sharded parameters while its forward runs, so that code finds their hooks, gradients and attributes;
a function that needs values gets the gathered ones. Values written into these are copied into the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_tensors import memory_id, version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placement import describe, local_part, version_key
from lightning_shardckpt.parallel.tensors.values import Scatter, check_equal_on_ranks, gather_whole, sharding_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CAST_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS)
"""The modules whose weights and biases are arguments of `CAST_FUNCTIONS` only."""
CAST_FUNCTIONS = frozenset(
    (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)
"""The functions whose arguments autocast casts: a weight gathered in that dtype gives them the same values."""


@dataclass(slots=True, eq=False)
class GatheredTensor:
    """A sharded tensor, gathered.

    Attributes:
        shards: the sharded tensor.
        whole: the gathered one; a DTensor if a tensor-parallel plan shards it.
        version: the `version_key` of ``shards`` when it was gathered.
        regather: returns the memory of ``whole`` in a backward if torch's engine frees it; None for other tensors.
        history: if ``whole`` has the dtype of autocast, a tensor without memory in the dtype of the parameter, which
            receives the gradient; else None.
        written: the version of ``whole`` whose values ``shards`` have.
    """

    shards: DTensor
    whole: Tensor
    version: tuple[int, int]
    regather: Callable[[], Tensor] | None = None
    history: Tensor | None = None
    written: int = field(init=False)

    def __post_init__(self) -> None:
        self.written = version_of(self.whole)

    def refresh(self) -> None:
        """Gather again into the same memory, if the shards have changed.

        Raises:
            UnsupportedCodeError: if a plan shards the tensor, or code has changed both.
        """
        if self.version != version_key(self.shards):
            if isinstance(self.whole, DTensor):
                self._refuse_change("a forward")
            if self.is_changed:
                raise UnsupportedCodeError(
                    f"a forward changes {describe(self.shards)} and its gathered values, one by itself and the other "
                    "through a view. Change only one of them."
                )
            with torch.no_grad():
                shards = new_dtensor(local_tensor(self.shards).detach(), spec_of(self.shards))
                self.whole.copy_(gather_whole(shards, "a view"))
            self.version, self.written = version_key(self.shards), version_of(self.whole)

    @property
    def is_changed(self) -> bool:
        """Whether values were written into ``whole``, by an in-place function or through a view."""
        return version_of(self.whole) != self.written

    def write_back(self, what: str) -> None:
        """Copy the whole tensor into the shards, through autograd if it requires a gradient.

        Raises:
            UnsupportedCodeError: on every rank, if the values differ between ranks, or a plan shards the tensor.
        """
        if isinstance(self.whole, DTensor):
            self._refuse_change(what)
        sharding, values = sharding_of(self.shards), self.whole.detach()
        check_equal_on_ranks(values.clone(), sharding, what)  # of a copy: NumPy would keep torch's engine from freeing
        if torch.is_grad_enabled() and self.whole.requires_grad and not self.shards.is_leaf:
            self.shards.copy_(Scatter.apply(self.whole, self.shards))  # type: ignore[no-untyped-call]  # torch's
        else:
            with torch.no_grad():
                local_tensor(self.shards).copy_(local_part(values, sharding))
            increment_version(self.shards)
        self.version, self.written = version_key(self.shards), version_of(self.whole)

    def _refuse_change(self, what: str) -> NoReturn:
        raise UnsupportedCodeError(
            f"{what} changes a parameter of shape {tuple(self.whole.shape)} that tensor parallelism shards. Leave its "
            "module out of tensor_parallel_plan."
        )

    def end_forward(self, what: str) -> None:
        """Copy values that the forward ``what`` has written into the shards, and changes of the shards into ``whole``.
        """
        if self.is_changed:
            self.write_back(what)
        elif self.regather is None:  # torch's engine gathers again by itself
            self.refresh()

    def fits(self, func: Callable[..., Any] | None) -> bool:
        """Return whether a function of the parameter gives the same result with ``whole``, also for gradients."""
        leaf = self.whole if self.history is None else self.history
        if torch.is_grad_enabled() and leaf.requires_grad != self.shards.requires_grad:
            return False
        return self.history is None or (func in CAST_FUNCTIONS and is_autocast(self.whole.device, self.whole.dtype))

    def use(self) -> Tensor:
        """Return the values for one function call; gradients of several calls are added in the parameter's dtype."""
        if self.history is not None and torch.is_grad_enabled() and self.history.requires_grad:
            return _UseCast.apply(self.history, self.whole)  # type: ignore[no-any-return, no-untyped-call]  # torch's
        return self.whole


IN_FORWARD: dict[int, GatheredTensor] = {}
"""The parameters that running forwards have gathered, by id."""


@contextmanager
def in_forward(gathered: Mapping[int, GatheredTensor]) -> Iterator[None]:
    """Inside, functions of these parameters run on the gathered values; the keys are the ids of the parameters."""
    IN_FORWARD.update(gathered)
    try:
        yield
    finally:
        for number in gathered:
            del IN_FORWARD[number]


def is_in_forward(value: object) -> bool:
    """Return whether a value is a parameter that a running forward has gathered."""
    return id(value) in IN_FORWARD


def gathered_in_forward(tensor: Tensor, func: Callable[..., Any] | None = None) -> GatheredTensor | None:
    """Return a parameter as a running forward has gathered it; None if it has not, or ``func`` must not use that.

    Copies values that the forward has written into the gathered one to the shards, and changes of the shards back.
    """
    found = IN_FORWARD.get(id(tensor))
    if found is None:
        return None
    if found.version != version_key(found.shards):
        found.refresh()
    elif found.is_changed:
        found.write_back("a forward")
    return found if found.fits(func) else None


def is_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether autocast is enabled and casts to ``dtype``."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


class _UseCast(torch.autograd.Function):
    """Returns a tensor over the memory of a weight in the dtype of autocast; for gradients, a cast of ``history``."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, whole: Tensor) -> Tensor:
        ctx.dtype = history.dtype
        return whole.new_empty(0).set_(whole.untyped_storage(), whole.storage_offset(), whole.shape)  # type: ignore[call-overload, no-any-return]  # typed since 2.13

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


# ── tensors that autograd saves ───────────────────────────────────────────────────────────────────────────────────────


class _SavedActivation(NamedTuple):
    """A tensor other than a parameter. Autograd does not check the version of tensors that hooks have packed."""

    tensor: Tensor
    version: int


class SavedParameters:
    """Packs the tensors that operations on gathered parameters save for their backward, and unpacks them.

    A reference to the sharded parameter takes the place of a gathered one. Autograd can't see changes of a parameter
    whose memory it does not keep, and would compute wrong gradients. As for plain tensors, a change is an error.
    """

    def __init__(self, name: str, gathered: Sequence[GatheredTensor]) -> None:
        self._name, self._leaves = name, [g.shards for g in gathered]
        self._regather = [g.regather for g in gathered]  # not the gathered tensors, whose memory is to be freed
        self._numbers = {_memory(g.whole): n for n, g in enumerate(gathered)}
        self._outer: SavedParameters | None = None  # of the unit around this one

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the hooks as a context; an empty one where checkpointing or offloading has its own hooks."""
        if uses_other_hooks():
            return nullcontext()
        self._outer = _owner_of(packing_hook())
        return saved_tensors_hooks(self._pack, self._unpack)

    def _key(self, n: int) -> tuple[int, int]:
        """Return a key that changes if the backward would get other values."""
        if self._regather[n] is not None:  # sees what was assigned to ``data``, as a plain leaf does
            return version_of(self._leaves[n]), 0
        return version_key(self._leaves[n])

    def _pack(self, tensor: Tensor) -> Any:
        n = self._numbers.get(_memory(tensor))
        if n is None and self._outer is not None:
            return self._outer._pack(tensor)
        if n is None:
            return _SavedActivation(tensor.detach(), version_of(tensor))  # not itself: the graph would form a cycle
        local, spec = local_tensor(tensor), spec_of(tensor) if isinstance(tensor, DTensor) else None
        if self._regather[n] is None:
            return self, n, self._key(n), spec, local.detach()
        return self, n, self._key(n), spec, (local.size(), local.stride(), local.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedActivation):
            if version_of(packed.tensor) != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"one of shape {tuple(packed.tensor.shape)} that {self._name or 'the module'} computed with is at "
                    f"version {version_of(packed.tensor)} instead of {packed.version}."
                )
            return packed.tensor
        owner, n, key, spec, saved = packed
        if owner._key(n) != key:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {owner._name or 'the module'}, of shape {tuple(owner._leaves[n].shape)}. Change it "
                "before the forward or after the backward."
            )
        regather = owner._regather[n]
        memory = None if regather is None else local_tensor(regather())  # not under no_grad: then it would not copy
        with torch.no_grad():
            local: Tensor = saved if memory is None else memory.as_strided(*saved)
            return local if spec is None else new_dtensor(local, spec)


def uses_other_hooks() -> bool:
    """Return whether hooks for saved tensors of checkpointing, offloading or the user are in place."""
    hook = packing_hook()
    return hook is not None and _owner_of(hook) is None


def _owner_of(hook: Any) -> SavedParameters | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SavedParameters) else None


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
