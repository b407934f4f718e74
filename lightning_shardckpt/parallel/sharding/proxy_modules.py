"""The modules that ``fully_shard`` is applied to, and its collectives on CPUs. Used by `fsdp_proxies`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.compat.torch_tensors import with_torch_function
from lightning_shardckpt.parallel.tensors.placement import Peers


class Call:
    """A function that a module's forward runs. torch's hooks see neither its result nor its exception."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        self._body: Callable[[Any], Any] | None = body
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self, argument: Any) -> None:
        assert self._body is not None
        try:
            with with_torch_function():
                self._value = self._body(argument)
        except BaseException as error:  # raised by `result`
            self._error = error
        self._body = None

    def result(self) -> Any:
        """Return the function's result, or raise its exception; only once."""
        value, self._value = self._value, None
        try:
            if self._error is not None:
                raise self._error
            return value
        finally:
            self._error = None  # its traceback has this frame: what it holds would live until a collection of garbage


class ProxyRoot(nn.Module):
    def __init__(self, proxies: Any) -> None:
        super().__init__()
        self.proxies = nn.ModuleList(proxies)

    def forward(self, call: Call) -> None:
        call.run(None)


class ProxyModule(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for n, parameter in enumerate(parameters):
            self.register_parameter(str(n), parameter)

    def forward(self, token: Tensor, call: Call) -> _Output | None:
        call.run(token)
        return _Output.on(token.device) if torch.is_grad_enabled() else None


class _Output(Tensor):
    """The output of a proxy module; it keeps the hook that torch registers for the backward."""

    hook: Callable[[Tensor], Any] | None

    @classmethod
    def on(cls, device: torch.device) -> _Output:
        made = torch.empty(0, device=device, requires_grad=True)
        made.__class__ = cls  # as_subclass returns a view, and torch warns about hooks on views
        assert isinstance(made, cls)
        made.hook = None
        return made

    def register_hook(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook


# ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────────────

# On CPUs, ranks announce a collective that differs from the previous step's: gloo aborts, or mixes memory, if the ranks
# enter different ones. On other devices torch's own collectives run, and the ranks compare after each backward.


@dataclass(frozen=True, slots=True)
class _Announced:
    peers: Peers
    purpose: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a collective, as torch asks for it."""
        return torch.empty(size, dtype=dtype, device=device)


class AnnouncedGather(_Announced):
    """An all-gather for ``set_custom_all_gather``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.peers.enter(self.purpose)
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        self.peers.wait(work, self.purpose, output_tensor.device)


class AnnouncedReduction(_Announced):
    """A reduce-scatter for ``set_custom_reduce_scatter``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        purpose = f"the gradients of {self.purpose}"
        self.peers.enter(f"{purpose}, {input_tensor.numel()} elements")
        # gloo's reduce_scatter does the same, but can't be waited for with a timeout
        work = dist.all_reduce(input_tensor, group=group, async_op=True)
        self.peers.wait(work, purpose, output_tensor.device)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
