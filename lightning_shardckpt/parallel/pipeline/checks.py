"""Checks that refuse steps which a pipeline would run differently from one process, or which would hang.

In a pipeline layers run on microbatches, and stages run different parts of a step, several times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_distributed import watch_collectives
from lightning_shardckpt.compat.torch_modules import (
    BatchNorm,
    any_global_hook,
    buffer_slots,
    compiled_call,
    other_hooks,
    result_hooks,
    withholds_state,
)
from lightning_shardckpt.compat.torch_tensors import version_of, watch_hooks, without_torch_function
from lightning_shardckpt.distributed.host_numbers import HostCopy
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.pipeline.absent_parameters import refuse_hook
from lightning_shardckpt.parallel.pipeline.attribute_owners import is_installed
from lightning_shardckpt.parallel.pipeline.layer_attributes import LayerAttributes
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.pipeline.step import StepState
from lightning_shardckpt.parallel.sharding.fqn import is_inside, own_parameters
from lightning_shardckpt.parallel.sharding.user_hooks import module_of
from lightning_shardckpt.system.tensor_digest import bit_digests

_UNUSED = "appears to not have been used in the graph"  # torch's message
_grad: Any = Tensor.grad  # the attribute of a sharded parameter would reduce accumulated gradients


class StepChecks:
    """Checks of the steps of one module. The ranks of a pipeline get the same results, or agree on them.

    ``rest_runs_once``: whether modules after the layers run once, on the whole batch.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, *, rest_runs_once: bool) -> None:
        self._root = root
        self._marks: list[tuple[list[int], Tensor]] = []  # by device, with indices of this rank's parameters
        self._changed: list[tuple[list[int], HostCopy]] = []
        self._own, self._trained = list[tuple[str, nn.Parameter]](), set[str]()
        last = frozenset({plan.stages - 1})
        self._of_last = {name for name, _ in root.named_parameters() if plan.holders(clean_fqn(name)) == last}
        units = plan.units()
        whole = [unit for unit, where in plan.others.items() if where == "last" and rest_runs_once]
        self._buffers, self._norms = list[tuple[str, nn.Module, str]](), list[tuple[str, nn.Module]]()
        self._parts, self._calls = list[tuple[str, nn.Module, frozenset[int]]](), list[tuple[str, nn.Module, Any]]()
        self._attributes = dict[str, tuple[nn.Module, frozenset[int]]]()
        for name, module in root.named_modules():
            clean, holders = clean_fqn(name), plan.holders(clean_fqn(name))
            if name and (clean in units or any(unit.startswith(f"{clean}.") for unit in units)):
                self._calls.append((name, module, compiled_call(module)))
            if is_inside(clean, whole):  # it sees the whole batch
                continue
            if len(holders) == 1:
                self._buffers += [(f"{name}.{key}", module, key) for key in buffer_slots(module)]
            if isinstance(module, BatchNorm):
                self._norms.append((name, module))
            if is_inside(clean, units):
                self._parts.append((name, module, result_hooks(module)))
                if not withholds_state(module) and not type(module).__module__.startswith("torch."):
                    self._attributes[name] = module, holders

    def check_calls(self) -> None:
        """Check that all gates are in place.

        Raises:
            UnsupportedCodeError: for a module that was compiled after the split into stages, which removes its gate.
        """
        for name, module, call in self._calls:
            if compiled_call(module) is not call:
                raise UnsupportedCodeError(
                    f"{name} was compiled after the module was split into pipeline stages, which replaces the call "
                    "that runs it on its stage only. Compile the layers in __init__ or configure_model."
                )

    def check_start(self, state: StepState) -> None:
        """Check the module before the passes.

        Raises:
            UnsupportedCodeError: for hooks on microbatches, and for batch norms.
        """
        hooked = [
            name
            for name, module, before in self._parts
            if result_hooks(module) - before or not all(is_installed(module_of(hook)) for hook in other_hooks(module))
        ]
        if any_global_hook():
            hooked.append("every module (torch.nn.modules.module.register_module_forward_hook, …)")
        if hooked:
            raise _hook_error(hooked[0])
        _check_packing(packing_hook())
        if len(state.batches) > 1 and state.step.train and any(module.training for _, module in self._norms):
            raise UnsupportedCodeError(
                f"{self._norms[0][0]} is a batch norm, which would compute statistics of microbatches. Use another "
                "norm, or pipeline_microbatches=1."
            )

    def guard_hooks(self) -> AbstractContextManager[None]:
        """Refuse hooks of modules, gradients and saved tensors that a step registers, and ``retain_grad``."""

        def of_module(module: nn.Module, *_: Any, **__: Any) -> None:
            if name := next((name for name, part, _ in self._parts if part is module), None):
                raise _hook_error(name)

        def packed(context: saved_tensors_hooks) -> None:
            _check_packing(context.pack_hook)

        return watch_hooks(refuse_hook, _refuse_retain_grad, packed, of_module)

    def refuses_draws(self, state: StepState) -> bool:
        """Return True if the step must not draw random numbers before its layers."""
        return not state.whole_steps and len(state.batches) > 1

    def check_draws(self, state: StepState) -> None:
        """Check random numbers that the step draws before its layers.

        Raises:
            UnsupportedCodeError: if passes would draw different numbers.
        """
        if not state.draws or not self.refuses_draws(state):
            return
        raise UnsupportedCodeError(
            f"{state.step.name} draws random numbers outside of modules before its layers. Microbatches and the "
            "rest of the step, which sees the whole batch, would draw different ones: draw them in the dataloader "
            'or inside a module, or use pipeline_loss="microbatch" (for training) or pipeline_microbatches=1.'
        )

    def layer_attributes(self, sizes: Sequence[int]) -> LayerAttributes:
        """Return the attributes of modules that see microbatches, for microbatches of these sizes."""
        return LayerAttributes(self._attributes, sizes)

    def buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Return marks of the buffers of modules that see microbatches, by name. A mark changes with the values."""
        buffers = [(name, buffer_slots(module).get(key)) for name, module, key in self._buffers]
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers if buffer is not None}

    def check_buffers(self, state: StepState, before: dict[str, tuple[int, int]]) -> None:
        """Check the buffers after the passes.

        Raises:
            UnsupportedCodeError: for a buffer that training changes, such as an average of activations in a layer.
        """
        changed = [name for name, mark in self.buffer_marks().items() if before.get(name) != mark]
        if changed and state.step.train and len(state.batches) > 1:
            raise UnsupportedCodeError(
                f"{changed[0]} is a buffer that training changes in a layer or before the layers, where it sees "
                "microbatches, not batches. Use pipeline_microbatches=1, or keep such state out of these modules."
            )

    def begin(self) -> None:
        """Begin a step: list this rank's parameters, with the names by which they are registered."""
        self._own = list(own_parameters(self._root))

    def parameter_attributes(self) -> list[tuple[Tensor | None, dict[str, Any]]]:
        """Return the gradient and the user's attributes of each of this rank's parameters."""
        with without_torch_function():
            return [
                (_grad.__get__(p), {name: value for name, value in vars(p).items() if not name.startswith("_")})
                for _, p in self._own
            ]

    def check_parameter_attributes(self, state: StepState, before: list[tuple[Tensor | None, dict[str, Any]]]) -> None:
        """Compare `parameter_attributes` after the forward passes with those ``before``.

        Raises:
            UnsupportedCodeError: if the step replaces a parameter, or changes its gradient or an attribute.
        """
        parameters = dict(own_parameters(self._root))
        replaced = [name for name, parameter in self._own if parameters.get(name) is not parameter]
        if replaced or len(parameters) != len(self._own):
            raise _change_error(state, [*replaced, *(parameters.keys() - dict(self._own))][0])
        for (name, _), (old_grad, old), (new_grad, new) in zip(
            self._own, before, self.parameter_attributes(), strict=True
        ):
            if new_grad is not old_grad:
                raise UnsupportedCodeError(
                    f"{state.step.name} changes the gradient of {name} (zero_grad, grad = …). In a pipeline only the "
                    "last stage runs a step to its end, and other stages would keep theirs. Do it in a hook, such as "
                    "on_before_zero_grad or on_train_batch_start."
                )
            changed = [key for key, value in old.items() if key in new and not _is_same(value, new[key])]
            if changed:
                raise UnsupportedCodeError(
                    f"{state.step.name} changes the attribute {changed[0]} of {name}. In a pipeline, parts of a step "
                    "run once for each microbatch, and more often, and on one stage. Change it in a hook between "
                    "steps, such as on_train_batch_start."
                )

    def note_trained(self) -> None:
        """Note which parameters of other stages require a gradient."""
        trained = (name for name, parameter in self._root.named_parameters() if parameter.requires_grad)
        self._trained = set(trained) - self._of_last

    def check_trained(self, state: StepState) -> None:
        """Raise if the step freezes or thaws a parameter after `note_trained`, where the last stage alone runs it."""
        before = self._trained
        self.note_trained()
        if changed := before ^ self._trained:
            raise _change_error(state, f"requires_grad of {min(changed)} after its layers")

    def mark_parameters(self) -> None:
        """Compute marks of this rank's parameters. A mark changes with the values, however they are written."""
        by_device: dict[torch.device, list[int]] = {}
        for index, (_, parameter) in enumerate(self._own):
            by_device.setdefault(local_tensor(parameter).device, []).append(index)
        self._marks = [(indices, self._compute_marks(indices)) for indices in by_device.values()]

    def compare_parameters(self) -> None:
        """Compare the parameters with the marks, without a wait for the device. Call it after the passes."""
        self._changed = [(indices, HostCopy(before != self._compute_marks(indices))) for indices, before in self._marks]

    def _compute_marks(self, indices: Sequence[int]) -> Tensor:
        return bit_digests([local_tensor(self._own[index][1]) for index in indices])

    def check_parameters(self, state: StepState) -> None:
        """Check the result of `compare_parameters`.

        Raises:
            UnsupportedCodeError: if the step changed a parameter.
        """
        name = self.changed_parameter()
        if name:
            raise _change_error(state, name)

    def changed_parameter(self) -> str | None:
        """Return the name of a parameter that `compare_parameters` found changed; None if there is none."""
        pairs = [pair for indices, flags in self._changed for pair in zip(indices, flags.read().tolist(), strict=True)]
        index = min((index for index, is_changed in pairs if is_changed), default=None)
        return None if index is None else self._own[index][0]


def _change_error(state: StepState, name: str) -> UnsupportedCodeError:
    return UnsupportedCodeError(
        f"{state.step.name} changes {name}. In a pipeline, parts of a step run for each microbatch and more often, and "
        "its end on the last stage alone. Change parameters in a hook between steps, such as on_train_batch_start."
    )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) in (bool, int, float, str) and old == new)


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
                "ShardedStrategy(activation_checkpointing=True)."
            )
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, FunctionCtx):
            raise UnsupportedCodeError(
                f"layer {layer} is called in {type(first).__name__.removesuffix('Backward')}, a "
                "torch.autograd.Function, which hides from the pipeline the graph of gradients. Call layers outside "
                "of it, or use pipeline_parallel_size=1."
            )
        frame = frame.f_back


@contextmanager
def guard_step() -> Iterator[None]:
    """Refuse collectives over all processes in this thread, and explain errors that only occur in a pipeline."""
    try:
        with refuse_world_collectives():
            yield
    except AttributeError as error:
        if error.obj is None and error.name in ("next_functions", "register_hook", "register_prehook"):
            raise UnsupportedCodeError(
                f"{error}: a pipelined step asks for the grad_fn of a tensor, which exists only on the stage that "
                "computes it. Use pipeline_parallel_size=1, or a torch.autograd.Function."
            ) from error
        if not isinstance(error.obj, nn.Module):
            raise
        raise UnsupportedCodeError(
            f"{error}. If the forward of a layer sets it: in a pipeline only one stage calls the layer, on "
            "microbatches. Return the value from the layer, or use pipeline_parallel_size=1."
        ) from error
    except RuntimeError as error:
        if _UNUSED not in str(error):
            raise
        raise UnsupportedCodeError(
            f"{error} In a pipelined step, torch.autograd.grad can't pass through the layers of other stages, or reach "
            "parameters, whose gradients are complete only after the backward of all stages. Use "
            "pipeline_parallel_size=1."
        ) from error


def refuse_world_collectives() -> AbstractContextManager[None]:
    """Refuse collectives over all processes in this thread; others, such as FSDP's, are allowed."""
    return watch_collectives(_refuse_world)


def _hook_error(name: str) -> UnsupportedCodeError:
    return UnsupportedCodeError(
        f"{name} got a forward or backward hook. In a pipeline layers, and modules called before them, run on "
        "microbatches, and modules of other stages do not run, so the hook would see other tensors than on one "
        "process. Remove it; if a package registers it, use pipeline_parallel_size=1."
    )


def _refuse_retain_grad(tensor: Tensor) -> None:
    raise UnsupportedCodeError(
        f"a pipelined step calls retain_grad of a tensor of shape {tuple(tensor.shape)}, whose gradient exists only on "
        "one stage of the pipeline, and for microbatches. Use pipeline_parallel_size=1 to read it."
    )


def _check_packing(hook: Any) -> None:
    if hook is not None and not is_installed(module_of(hook)):
        raise UnsupportedCodeError(
            f"the hook {getattr(hook, '__qualname__', hook)} of saved tensors (saved_tensors_hooks) would get only the "
            "tensors of microbatches on one pipeline stage. Use ShardedStrategy(activation_checkpointing=True), "
            "torch's save_on_cpu, or pipeline_parallel_size=1."
        )


def _refuse_world(name: str, group: dist.ProcessGroup | None) -> None:
    if group is None or group is dist.group.WORLD:
        raise UnsupportedCodeError(
            f"torch.distributed.{name} over all processes was called inside a pipelined step. The stages run "
            "different parts of the step, so not all of them would call it. Use self.all_gather, which covers the "
            "data-parallel ranks of one stage, log with sync_dist=True, or communicate in a hook outside of the step."
        )
