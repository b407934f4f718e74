"""Let a CheckpointIO know to which strategy it is given.

Lightning asks a CheckpointIO to save and to load, and says neither whose checkpoint it is nor that a strategy will
never ask. But every Trainer and Fabric assigns it to ``strategy.checkpoint_io`` when it is made, wherever it was passed
(``_lazy_init_strategy`` of both connectors, Lightning 2.6). So the setters of that property tell.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.fabric.strategies.fsdp import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

_BY_THEMSELVES = (
    *(FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy),
    *(FabricFSDPStrategy, FabricModelParallelStrategy, FabricDeepSpeedStrategy),
)
"""Strategies that write or read checkpoints without a CheckpointIO."""


@runtime_checkable
class Assignable(Protocol):
    """An object that is told which strategy it is given to."""

    def assigned_to(self, strategy: Strategy | FabricStrategy) -> None:
        """Note the strategy when a Trainer or Fabric is made, and when somebody assigns it."""


def check_asks(strategy: Strategy | FabricStrategy, name: str) -> None:
    """Make sure that a strategy will ask a CheckpointIO, to save and to load.

    Raises:
        TypeError: for one that does not, naming both and saying what to do.
    """
    if isinstance(strategy, _BY_THEMSELVES):
        ours = "lightning_shardckpt" + (".fabric" if isinstance(strategy, FabricStrategy) else "")
        raise TypeError(
            f"{type(strategy).__name__} writes and reads checkpoints by itself, in another format, and would not use "
            f"{name}. Use strategy={ours}.ShardedStrategy(), which shards models as well and saves with {name}; or "
            f"leave {name} out."
        )


def is_wrapper(io: object) -> bool:
    """Return whether a CheckpointIO hands on to another one, such as AsyncCheckpointIO.

    Relies on ``_WrappingCheckpointIO``, their class since Lightning 2.0.
    """
    return isinstance(io, _WrappingCheckpointIO)


def _tell(kind: Any) -> None:
    """Wrap the setter of ``checkpoint_io`` that a class has."""
    found: property = vars(kind)["checkpoint_io"]
    original = found.fset
    assert original is not None

    def assign(strategy: Strategy | FabricStrategy, io: Any) -> None:
        innermost = io
        while isinstance(innermost, _WrappingCheckpointIO):
            innermost = innermost.checkpoint_io
        if isinstance(innermost, Assignable):
            innermost.assigned_to(strategy)
        original(strategy, io)

    kind.checkpoint_io = found.setter(assign)


for _kind in (Strategy, FabricStrategy, FabricFSDPStrategy, FabricModelParallelStrategy):
    _tell(_kind)
