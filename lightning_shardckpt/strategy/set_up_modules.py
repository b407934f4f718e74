"""The modules that a script of Fabric has set up, as they were sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.rebind_optimizer import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.nested_dict import NestedObjects
from lightning_shardckpt.strategy.fabric_module import sharded_of


class SetUpModules:
    """The sharded modules, in the order in which they were set up."""

    def __init__(self) -> None:
        self._sharded: list[ShardedModule] = []

    def __iter__(self) -> Iterator[ShardedModule]:
        return iter(self._sharded)

    def add(self, sharded: ShardedModule) -> None:
        """Take one more."""
        self._sharded.append(sharded)

    def naming(self, objects: NestedObjects) -> NestedObjects:
        """Return the modules that have the parameters of a state's optimizers; names of several begin with numbers."""
        held = {id(p) for one in objects.optimizers.values() for group in one.param_groups for p in group["params"]}
        own = [one.root for one in self._sharded if any(id(p) in held for p in one.root.parameters())]
        return NestedObjects({(number,): root for number, root in enumerate(own)})

    @property
    def holders(self) -> dict[Tensor, int]:
        """Each parameter → how many ranks of the world hold it or a part of it."""
        return {parameter: ranks for sharded in self._sharded for parameter, ranks in sharded.holders.items()}

    def rebind(self, optimizer: Optimizer) -> None:
        """Make an optimizer that was built before hold the parameters that the modules have now.

        Raises:
            UnsupportedCodeError: if no module was set up yet, or it holds a parameter that is of none of them.
        """
        if not self._sharded:
            raise UnsupportedCodeError(
                f"{type(optimizer).__name__} is set up before any module: call fabric.setup(model, optimizer), or "
                "fabric.setup_module(model) first"
            )
        replaced = {old: new for sharded in self._sharded for old, new in sharded.replaced.items()}
        elsewhere = {old: new for sharded in self._sharded for old, new in sharded.elsewhere.items()}
        rebind_optimizer(optimizer, replace(self._sharded[0], replaced=replaced, elsewhere=elsewhere))

    def meant_by(self, module: nn.Module | None) -> ShardedModule:
        """Return the module that is meant, given what ``fabric.setup`` returned; without it, the only one.

        Raises:
            UnsupportedCodeError: if it was not set up, or there are several.
        """
        if module is None and len(self._sharded) == 1:
            return self._sharded[0]
        sharded = sharded_of(module)
        if sharded is None:
            raise UnsupportedCodeError(
                f"run_step needs to know the module, of the {len(self._sharded)} that were set up: pass module=, what "
                "fabric.setup returned"
            )
        return sharded

    def whole_names(self, objects: NestedObjects) -> WholeNames:
        """Return the names of the whole modules in a state, also on a pipeline stage that has parts of them.

        Of a state without any, of those that have the parameters of its optimizers.
        """
        objects = objects if objects.modules else self.naming(objects)
        by_root = {id(sharded.root): sharded for sharded in self._sharded}
        names, ties = set[str](), list[tuple[str, ...]]()
        for path, prefix in objects.prefixes.items():
            sharded = by_root.get(id(objects.modules[path]))
            if sharded is not None:
                names |= {prefix + name for name in sharded.state_names}
                ties += [tuple(prefix + name for name in tie) for tie in sharded.state_ties]
            else:
                names |= {prefix + name for name in objects.modules[path].state_dict()}
        return WholeNames(frozenset(names), tuple(ties))
