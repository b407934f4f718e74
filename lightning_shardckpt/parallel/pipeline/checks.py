"""Checks that refuse steps which a pipeline would run differently from one process, or which would hang.

In a pipeline layers run on microbatches, and stages run different parts of a step, several times.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from lightning_shardckpt.compat.torch_distributed import watch_collectives
from lightning_shardckpt.compat.torch_modules import BatchNorm, buffer_slots
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.sharding.fqn import is_inside


class MicrobatchState:
    """Checks of the state that training on microbatches would change otherwise than training on batches.

    ``rest_runs_once``: whether modules after the layers run once, on the whole batch.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, *, rest_runs_once: bool) -> None:
        whole = [unit for unit, where in plan.others.items() if where == "last" and rest_runs_once]
        self._buffers, self._norms = list[tuple[str, nn.Module, str]](), list[tuple[str, nn.Module]]()
        for name, module in root.named_modules():
            clean, holders = clean_fqn(name), plan.holders(clean_fqn(name))
            if is_inside(clean, whole):  # it sees the whole batch
                continue
            if len(holders) == 1:
                self._buffers += [(f"{name}.{key}", module, key) for key in buffer_slots(module)]
            if isinstance(module, BatchNorm):
                self._norms.append((name, module))

    def check_norms(self) -> None:
        """Check the module before it trains on microbatches.

        Raises:
            UnsupportedCodeError: for batch norms.
        """
        if any(module.training for _, module in self._norms):
            raise UnsupportedCodeError(
                f"{self._norms[0][0]} is a batch norm, which would compute statistics of microbatches. Use another "
                "norm, or Pipeline(microbatches=1)."
            )

    def buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Return marks of the buffers of modules that see microbatches, by name. A mark changes with the values."""
        buffers = [(name, buffer_slots(module).get(key)) for name, module, key in self._buffers]
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers if buffer is not None}

    def check_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        """Check the buffers after training on microbatches.

        Raises:
            UnsupportedCodeError: for a buffer that training changes, such as an average of activations in a layer.
        """
        changed = [name for name, mark in self.buffer_marks().items() if before.get(name) != mark]
        if changed:
            raise UnsupportedCodeError(
                f"{changed[0]} is a buffer that training changes in a layer or before the layers, where it sees "
                "microbatches, not batches. Use Pipeline(microbatches=1), or keep such state out of these modules."
            )


def refuse_reentrant_checkpoint(layer: str) -> None:
    """Check the caller of a layer.

    Raises:
        UnsupportedCodeError: for a reentrant ``torch.utils.checkpoint`` or another autograd function, which runs the
            layer without gradients.
    """
    if torch.is_grad_enabled():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise UnsupportedCodeError(
                f"layer {layer} is called in torch.utils.checkpoint with use_reentrant=True, which hides from "
                "the pipeline the graph of gradients. Use use_reentrant=False, or "
                "FSDP(activation_checkpointing=True)."
            )
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, FunctionCtx):
            raise UnsupportedCodeError(
                f"layer {layer} is called in {type(first).__name__.removesuffix('Backward')}, a "
                "torch.autograd.Function, which hides from the pipeline the graph of gradients. Call layers outside "
                "of it, or use pipeline_parallel_size=1."
            )
        frame = frame.f_back


def refuse_world_collectives() -> AbstractContextManager[None]:
    """Refuse collectives over all processes in this thread; others, such as FSDP's, are allowed."""
    return watch_collectives(_refuse_world)


def _refuse_world(name: str, group: dist.ProcessGroup | None) -> None:
    if group is None or group is dist.group.WORLD:
        raise UnsupportedCodeError(
            f"torch.distributed.{name} over all processes was called inside a pipelined step. The stages run "
            "different parts of the step, so not all of them would call it. Use self.all_gather, which covers the "
            "data-parallel ranks of one stage, log with sync_dist=True, or communicate in a hook outside of the step."
        )
