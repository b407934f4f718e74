"""The modules that ``fully_shard`` is given, and its collectives on CPUs; see `carriers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.compat.torch_tensors import with_torch_function
from lightning_shardckpt.parallel.tensors.peers import Peers


class Call:
    """A function that a module's forward runs; what it returns or raises, torch's hooks do not see."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        self._body: Callable[[Any], Any] | None = body
        self._found: Any = None
        self._error: BaseException | None = None

    def run(self, argument: Any) -> None:
        assert self._body is not None
        try:
            with with_torch_function():
                self._found = self._body(argument)
        except BaseException as error:  # raised by `result`
            self._error = error
        self._body = None

    def result(self) -> Any:
        """Return what the function returned, once.

        Raises:
            BaseException: what it raised.
        """
        found, error = self._found, self._error
        self._found = self._error = None
        if error is not None:
            raise error
        return found


class RootOfCarriers(nn.Module):
    def __init__(self, carriers: Any) -> None:
        super().__init__()
        self.carriers = nn.ModuleList(carriers)

    def forward(self, call: Call) -> None:
        call.run(None)


class CarrierModule(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for n, parameter in enumerate(parameters):
            self.register_parameter(str(n), parameter)

    def forward(self, token: Tensor, call: Call) -> _Output | None:
        call.run(token)
        return _Output.on(token.device) if torch.is_grad_enabled() else None


class _Output(Tensor):
    """What a carrier returns in place of outputs: it keeps the hook that torch registers."""

    hook: Callable[[Tensor], Any] | None

    @classmethod
    def on(cls, device: torch.device) -> _Output:
        made = torch.empty(0, device=device, requires_grad=True)
        made.__class__ = cls  # `as_subclass` makes a view, of which torch warns
        assert isinstance(made, cls)
        made.hook = None
        return made

    def register_hook(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook


# ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Announced where they are not those of the step before: gloo ends the process, or mixes memory, where the ranks enter
# different collectives. On other devices they are torch's own, and the ranks compare what they did after each backward.


@dataclass(frozen=True, slots=True)
class _Announced:
    peers: Peers
    purpose: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective."""
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
        # as gloo reduces and scatters, but a wait for it ends in time
        work = dist.all_reduce(input_tensor, group=group, async_op=True)
        self.peers.wait(work, purpose, output_tensor.device)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
