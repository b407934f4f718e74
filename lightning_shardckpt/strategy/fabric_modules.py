"""The sharded modules of a Fabric script, and the forward that ``fabric.setup`` returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.describe import WRAPPED, NestedObjects
from lightning_shardckpt.compat.lightning_fabric import is_in_backward
from lightning_shardckpt.compat.torch_autograd import accumulates_gradient_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.state.model import WholeNames


def _refuse_other_backward(root: ref[nn.Module], gradient: Tensor) -> None:
    """Raise an UnsupportedCodeError in a backward that accumulates gradients outside of ``fabric.backward``."""
    module = root()
    if is_in_backward() or module is None:
        return
    if any(accumulates_gradient_of(p) for p in module.parameters() if p.requires_grad):
        raise UnsupportedCodeError(
            f"loss.backward() would not average the gradients of {type(module).__name__} over the ranks: call "
            "fabric.backward(loss). torch.autograd.grad may be called anywhere, but under mixed precision."
        )


class ShardedForward(nn.Module):
    """Runs the forward of a sharded module, inside FSDP's hooks.

    Args:
        sharded: the module.
        running: returns the module whose pipeline is running a step.
    """

    def __init__(self, sharded: ShardedModule, running: Callable[[], ShardedModule | None]) -> None:
        super().__init__()
        self.__dict__["sharded"] = sharded  # not a submodule: Fabric has the module itself
        self.__dict__[WRAPPED] = sharded.root
        self._running = running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sharded: ShardedModule = self.__dict__["sharded"]
        if sharded.pipeline is not None:
            if self._running() is not sharded:
                raise UnsupportedCodeError(
                    f"{type(sharded.root).__name__} is a pipeline, of which this rank has a part: call it in a "
                    "function of the batch, by fabric.strategy.run_step(function, batch)"
                )
            return sharded.root(*args, **kwargs)
        output = sharded.run(partial(sharded.root, *args, **kwargs))
        if not torch.is_grad_enabled():  # no backward will follow
            reshard(sharded.root)

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(partial(_refuse_other_backward, ref(sharded.root)))  # type: ignore[no-untyped-call]
            return tensor

        apply_to_collection(output, Tensor, watch)  # as Fabric does
        return output


def get_sharded(module: nn.Module | None) -> ShardedModule | None:
    """Return the sharded module of the result of ``fabric.setup``, or of its forward; None for other modules."""
    inside = () if module is None else (module, *module.children())
    forward = next((one for one in inside if isinstance(one, ShardedForward)), None)
    return None if forward is None else cast(ShardedModule, forward.__dict__["sharded"])


class BackwardSyncControl:
    """Implements ``fabric.no_backward_sync``; the only method that Fabric calls."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients of replicated parameters are not reduced, if ``enabled``."""
        sharded = get_sharded(module)
        if sharded is None:
            raise TypeError(f"{type(module).__name__} was not set up by fabric.setup")
        return sharded.gradients.no_sync() if enabled else nullcontext()


class SetUpModules(list[ShardedModule]):
    """The sharded modules, in the order in which they were set up."""

    def find_modules(self, objects: NestedObjects) -> NestedObjects:
        """Return the modules with the parameters of a state's optimizers; the names of several start with numbers."""
        ids = {id(p) for one in objects.optimizers.values() for group in one.param_groups for p in group["params"]}
        roots = [one.root for one in self if any(id(p) in ids for p in one.root.parameters())]
        return NestedObjects({(number,): root for number, root in enumerate(roots)})

    def rebind(self, optimizer: Optimizer) -> None:
        """Replace the parameters in an optimizer by the parameters of the sharded modules.

        Raises:
            UnsupportedCodeError: if no module was set up yet, or a parameter belongs to none of them.
        """
        if not self:
            raise UnsupportedCodeError(
                f"{type(optimizer).__name__} is set up before any module: call fabric.setup(model, optimizer), or "
                "fabric.setup_module(model) first"
            )
        replaced = {old: new for sharded in self for old, new in sharded.replaced.items()}
        elsewhere = {old: new for sharded in self for old, new in sharded.elsewhere.items()}
        rebind_optimizer(optimizer, replace(self[0], replaced=replaced, elsewhere=elsewhere))

    def resolve(self, module: nn.Module | None) -> ShardedModule:
        """Return the sharded module of the result of ``fabric.setup``; for None the only one.

        Raises:
            UnsupportedCodeError: if the module was not set up, or for None if there are several.
        """
        sharded = self[0] if module is None and len(self) == 1 else get_sharded(module)
        if sharded is None:
            raise UnsupportedCodeError(
                f"run_step must know which of the {len(self)} modules runs: pass the result of fabric.setup as module="
            )
        return sharded

    def whole_names(self, objects: NestedObjects) -> WholeNames:
        """Return the names of the whole modules in a state, also on a pipeline stage that has only parts.

        For a state without modules, of the modules with the parameters of its optimizers.
        """
        objects = objects if objects.modules else self.find_modules(objects)
        by_root = {id(sharded.root): sharded for sharded in self}
        names, ties = set[str](), list[tuple[str, ...]]()
        for path, prefix in objects.prefixes.items():
            sharded = by_root.get(id(objects.modules[path]))
            own = objects.modules[path].state_dict() if sharded is None else sharded.state_names
            names |= {prefix + name for name in own}
            own_ties = () if sharded is None else sharded.state_ties
            ties += [tuple(prefix + name for name in tie) for tie in own_ties]
        return WholeNames(frozenset(names), tuple(ties))
