"""The modules that a script of Fabric has set up, as they were sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.rebind_optimizer import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.nested_dict import NestedObjects
from lightning_shardckpt.strategy.fabric_module import record_of


class SetUpModules:
    """The records of sharded modules, in the order in which they were set up."""

    def __init__(self) -> None:
        self._records: list[ShardedModule] = []

    def __iter__(self) -> Iterator[ShardedModule]:
        return iter(self._records)

    def add(self, record: ShardedModule) -> None:
        """Take one more."""
        self._records.append(record)

    @property
    def as_one(self) -> nn.Module:
        """All of them as one module, whose names begin with numbers."""
        objects = NestedObjects()
        objects.modules |= {(number,): record.root for number, record in enumerate(self._records)}
        return objects.root

    @property
    def holders(self) -> dict[Tensor, int]:
        """Each parameter → how many ranks of the world hold it or a part of it."""
        return {parameter: ranks for record in self._records for parameter, ranks in record.holders.items()}

    def rebind(self, optimizer: Optimizer) -> None:
        """Make an optimizer that was built before hold the parameters that the modules have now.

        Raises:
            TopologyError: if no module was set up yet, or it holds a parameter that is of none of them.
        """
        if not self._records:
            raise TopologyError(
                f"{type(optimizer).__name__} is set up before any module: call fabric.setup(model, optimizer), or "
                "fabric.setup_module(model) first"
            )
        replaced = {old: new for record in self._records for old, new in record.replaced.items()}
        elsewhere = {old: new for record in self._records for old, new in record.elsewhere.items()}
        rebind_optimizer(optimizer, replace(self._records[0], replaced=replaced, elsewhere=elsewhere))

    def meant_by(self, module: nn.Module | None) -> ShardedModule:
        """Return the record of what ``fabric.setup`` returned; without it, of the only module.

        Raises:
            TopologyError: if it was not set up, or there are several.
        """
        if module is None and len(self._records) == 1:
            return self._records[0]
        record = record_of(module)
        if record is None:
            raise TopologyError(
                f"run_step needs to know the module, of the {len(self._records)} that were set up: pass module=, what "
                "fabric.setup returned"
            )
        return record

    def whole_names(self, objects: NestedObjects) -> WholeNames:
        """Return the names of the whole modules in a state, also on a pipeline stage that has parts of them."""
        records = {id(record.root): record for record in self._records}
        names, ties = set[str](), list[tuple[str, ...]]()
        for path, prefix in objects.prefixes.items():
            record = records.get(id(objects.modules[path]))
            if record is not None:
                names |= {prefix + name for name in record.state_names}
                ties += [tuple(prefix + name for name in tie) for tie in record.state_ties]
            else:
                names |= {prefix + name for name in objects.modules[path].state_dict()}
        return WholeNames(frozenset(names), tuple(ties))
