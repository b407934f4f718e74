"""Refuse what a pipelined step would silently get wrong, or hang in.

Layers see microbatches, not batches, and the stages run different parts of a step, several times.
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
from torch.utils.checkpoint import CheckpointFunction

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_distributed import watched_collectives
from lightning_shardckpt.compat.torch_modules import (
    BatchNorm,
    any_global_hook,
    buffer_slots,
    compiled_call,
    result_hooks,
    withholds_state,
)
from lightning_shardckpt.compat.torch_tensors import version_of, watched_hooks, without_torch_function
from lightning_shardckpt.distributed.host_numbers import HostCopy
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.pipeline.absent_parameters import refuse_hook
from lightning_shardckpt.parallel.pipeline.attribute_owners import is_installed
from lightning_shardckpt.parallel.pipeline.layer_attributes import LayerAttributes
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.pipeline.step import StepState
from lightning_shardckpt.parallel.sharding.fqn import is_inside, own_parameters
from lightning_shardckpt.parallel.sharding.sample_numbers import other_draws_error
from lightning_shardckpt.parallel.sharding.user_hooks import module_of
from lightning_shardckpt.system.tensor_digest import bit_digest

_UNUSED = "appears to not have been used in the graph"  # torch's words
_grad: Any = Tensor.grad  # that of a sharded parameter reduces what has accumulated


class StepChecks:
    """Checks of the steps of one module. All give the same answer on all ranks of a pipeline, or are agreed upon.

    Args:
        root: the module, split into stages.
        plan: its stages.
        rest_runs_once: whether what comes after the layers sees the whole batch.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, *, rest_runs_once: bool) -> None:
        self._root, self._marks = root, list[Tensor]()
        self._changed: list[tuple[list[int], HostCopy]] = []  # places among this rank's parameters, by device
        self._own: list[tuple[str, nn.Parameter]] = []
        self._whole = [unit for unit, where in plan.others.items() if where == "last" and rest_runs_once]
        self._buffers = [
            (f"{name}.{key}", module, key)
            for name, module in root.named_modules()
            if len(plan.holders(clean_fqn(name))) == 1 and not self._sees_whole(clean_fqn(name))
            for key in buffer_slots(module)
        ]
        units = plan.units()
        self._parts = [
            (name, module, result_hooks(module))
            for name, module in root.named_modules()
            if is_inside(clean_fqn(name), units) and not self._sees_whole(clean_fqn(name))
        ]
        self._attributes = {
            name: (module, plan.holders(clean_fqn(name)))
            for name, module, _ in self._parts
            if not withholds_state(module) and not type(module).__module__.startswith("torch.")
        }
        self._calls = [
            (name, module, compiled_call(module))
            for name, module in root.named_modules()
            if name and (clean_fqn(name) in units or any(unit.startswith(f"{clean_fqn(name)}.") for unit in units))
        ]
        self._norms = [
            (name, module)
            for name, module in root.named_modules()
            if isinstance(module, BatchNorm) and not self._sees_whole(clean_fqn(name))
        ]

    def check_calls(self) -> None:
        """Check before anything runs.

        Raises:
            UnsupportedCodeError: for a module that was compiled since it was split into stages: its gate is gone.
        """
        for name, module, call in self._calls:
            if compiled_call(module) is not call:
                raise UnsupportedCodeError(
                    f"{name} was compiled after the module was split into pipeline stages, which replaces what runs it "
                    "on its stage. Compile the layers in __init__ or configure_model."
                )

    def check_start(self, state: StepState) -> None:
        """Check before the passes.

        Raises:
            UnsupportedCodeError: for hooks that see microbatches, and for batch norms.
        """
        self._check_hooks()
        _check_packing(packing_hook())
        if len(state.batches) > 1 and state.step.train and any(module.training for _, module in self._norms):
            raise UnsupportedCodeError(
                f"{self._norms[0][0]} is a batch norm: its statistics would be those of microbatches. Use another "
                "norm, or pipeline_microbatches=1."
            )

    def check_draws(self, state: StepState) -> None:
        """Check when it is known whether the step draws random numbers before its layers.

        Raises:
            UnsupportedCodeError: if passes would draw different ones.
        """
        if state.draws and state.samples[0] is not None and state.samples[0].alone:
            raise other_draws_error(state.step.name)
        if state.draws and not state.whole_steps and len(state.batches) > 1:
            raise UnsupportedCodeError(
                f"{state.step.name} draws random numbers outside of modules before its layers. Microbatches and the "
                "rest of the step, which sees the whole batch, would draw different ones: draw them in the dataloader "
                'or inside a module, or use pipeline_loss="microbatch" (for training) or pipeline_microbatches=1.'
            )

    def attributes(self, sizes: Sequence[int], device: torch.device) -> LayerAttributes:
        """Return what watches the attributes of modules that see microbatches of these sizes."""
        return LayerAttributes(self._attributes, sizes, device)

    def _check_hooks(self) -> None:
        hooked = [name for name, module, before in self._parts if result_hooks(module) - before]
        if any_global_hook():
            hooked.append("every module (torch.nn.modules.module.register_module_forward_hook, …)")
        if hooked:
            raise UnsupportedCodeError(
                f"{hooked[0]} got a forward or backward hook. In a pipeline layers, and what comes before them, run on "
                "microbatches, and those of other stages not at all: what the hook sees would not be what it expects. "
                "Remove it."
            )

    def buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Marks of the buffers that see microbatches, by name, which change when the values do."""
        buffers = [(name, buffer_slots(module).get(key)) for name, module, key in self._buffers]
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers if buffer is not None}

    def check_buffers(self, state: StepState, before: dict[str, tuple[int, int]]) -> None:
        """Check after the passes.

        Raises:
            UnsupportedCodeError: for a buffer of a layer that training changes, such as an average of activations.
        """
        changed = [name for name, mark in self.buffer_marks().items() if before.get(name) != mark]
        if changed and state.step.train and len(state.batches) > 1:
            raise UnsupportedCodeError(
                f"{changed[0]} is a buffer that training changes in a layer or before the layers, where it sees "
                "microbatches, not batches. Use pipeline_microbatches=1, or keep such state out of these modules."
            )

    def begin(self) -> None:
        """Begin a step: note this rank's parameters, by name as registered."""
        self._own = list(own_parameters(self._root))

    def notes(self) -> list[tuple[Tensor | None, dict[str, Any]]]:
        """The gradient of each of this rank's parameters, and what somebody has written onto it."""
        with without_torch_function():
            return [(_grad.__get__(p), _notes_on(p)) for _, p in self._own]

    def check_notes(self, state: StepState, before: list[tuple[Tensor | None, dict[str, Any]]]) -> None:
        """Check after forward passes what `notes` gave before.

        Raises:
            UnsupportedCodeError: for a parameter that the step puts elsewhere, a gradient that it changes, and notes
                that follow from how often a module ran.
        """
        here = dict(own_parameters(self._root))
        others = [name for name, parameter in self._own if here.get(name) is not parameter]
        if others or len(here) != len(self._own):
            raise _changes(state, [*others, *(here.keys() - dict(self._own))][0])
        for (name, _), (gradient, notes), (then, now) in zip(self._own, before, self.notes(), strict=True):
            if then is not gradient:
                raise UnsupportedCodeError(
                    f"{state.step.name} changes the gradient of {name} (zero_grad, grad = …). In a pipeline only the "
                    "last stage runs a step to its end, and other stages would keep theirs. Do it in a hook, such as "
                    "on_before_zero_grad or on_train_batch_start."
                )
            changed = [key for key, note in notes.items() if key in now and not _is_same_note(note, now[key])]
            if changed:
                raise UnsupportedCodeError(
                    f"{state.step.name} changes the attribute {changed[0]} of {name}. In a pipeline, parts of a step "
                    "run once for each microbatch, and more often, and on one stage. Change it in a hook between "
                    "steps, such as on_train_batch_start."
                )

    def mark_parameters(self) -> None:
        """Note marks of this rank's parameters, which change when values do, however they are written."""
        self._marks = self._parameter_marks()

    def compare_parameters(self) -> None:
        """Compare parameters with what was marked before, without a wait for a device; call it after the passes."""
        places: dict[torch.device, list[int]] = {}
        for place, mark in enumerate(self._marks):
            places.setdefault(mark.device, []).append(place)
        now = self._parameter_marks()
        self._changed = [
            (of, HostCopy(torch.stack([self._marks[k] for k in of]) != torch.stack([now[k] for k in of])))
            for of in places.values()
        ]

    def check_parameters(self, state: StepState) -> None:
        """Check what `compare_parameters` found.

        Raises:
            UnsupportedCodeError: for a parameter that the step itself changes.
        """
        name = self.changed_parameter()
        if name:
            raise _changes(state, name)

    def changed_parameter(self) -> str | None:
        """Return the name of a parameter that had changed since it was marked when `compare_parameters` was called."""
        found = [pair for of, are_other in self._changed for pair in zip(of, are_other.read().tolist(), strict=True)]
        changed = min((place for place, is_other in found if is_other), default=None)
        return None if changed is None else self._own[changed][0]

    def _parameter_marks(self) -> list[Tensor]:
        return [bit_digest(local_tensor(parameter)) for _, parameter in self._own]

    def _sees_whole(self, name: str) -> bool:
        return any(name == unit or name.startswith(f"{unit}.") for unit in self._whole)


def _changes(state: StepState, name: str) -> UnsupportedCodeError:
    return UnsupportedCodeError(
        f"{state.step.name} changes {name}. In a pipeline, parts of a step run once for each microbatch, "
        "and more often, so it would change more than once. Change parameters in a hook between steps, such as "
        "on_train_batch_start."
    )


def _notes_on(parameter: Tensor) -> dict[str, Any]:
    return {name: note for name, note in vars(parameter).items() if not name.startswith("_")}


def _is_same_note(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (bool, int, float, str) and one == other)


def refuse_reentrant_checkpoint(layer: str) -> None:
    """Check the call of a layer that computes.

    Raises:
        UnsupportedCodeError: if it comes from a reentrant ``torch.utils.checkpoint``, or another autograd function,
            which runs it without gradients.
    """
    if torch.is_grad_enabled():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise UnsupportedCodeError(
                f"layer {layer} is called in torch.utils.checkpoint with use_reentrant=True, which hides from "
                "the pipeline what gradients depend on. Use use_reentrant=False, or "
                "ShardedStrategy(activation_checkpointing=True)."
            )
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, FunctionCtx):
            raise UnsupportedCodeError(
                f"layer {layer} is called in {type(first).__name__.removesuffix('Backward')}, a "
                "torch.autograd.Function, which hides from the pipeline what gradients depend on. Call layers outside "
                "of it, or use pipeline_parallel_size=1."
            )
        frame = frame.f_back


@contextmanager
def guarded_step() -> Iterator[None]:
    """Inside, what a run of a step can't do is an error in this thread: collectives over all processes, and others."""
    try:
        with without_world_collectives():
            yield
    except AttributeError as error:
        if error.obj is None and error.name in ("next_functions", "register_hook", "register_prehook"):
            raise UnsupportedCodeError(
                f"{error}: a pipelined step asks for the grad_fn of a tensor, which it has on the stage that computes "
                "it alone. Use pipeline_parallel_size=1, or a torch.autograd.Function."
            ) from error
        if not isinstance(error.obj, nn.Module):
            raise
        raise UnsupportedCodeError(
            f"{error}. If the forward of a layer sets it: in a pipeline, one stage calls the layer, with microbatches. "
            "Return it from the layer, or use pipeline_parallel_size=1."
        ) from error
    except RuntimeError as error:
        if _UNUSED not in str(error):
            raise
        raise UnsupportedCodeError(
            f"{error} In a pipelined step, torch.autograd.grad finds no way through the layers of other stages, nor to "
            "parameters: gradients with respect to them are known when all stages have run their backward. Use "
            "pipeline_parallel_size=1."
        ) from error


def guarded_hooks() -> AbstractContextManager[None]:
    """Inside, hooks of users on gradients and saved tensors, and retained gradients, are an error in this thread."""
    return watched_hooks(refuse_hook, _refuse_retaining, lambda context: _check_packing(context.pack_hook))


def without_world_collectives() -> AbstractContextManager[None]:
    """Inside, a collective over all processes is an error in this thread; others, such as FSDP's, are not touched."""
    return watched_collectives(_refuse_world)


def _refuse_retaining(tensor: Tensor) -> None:
    raise UnsupportedCodeError(
        f"a pipelined step calls retain_grad of a tensor of shape {tuple(tensor.shape)}, whose gradient one stage of "
        "the pipeline will have, and for microbatches. Use pipeline_parallel_size=1 to look at it."
    )


def _check_packing(hook: Any) -> None:
    if hook is not None and not is_installed(module_of(hook)):
        raise UnsupportedCodeError(
            f"the hook {getattr(hook, '__qualname__', hook)} of saved tensors (saved_tensors_hooks) would get those of "
            "microbatches in a pipeline, and of one stage. Use ShardedStrategy(activation_checkpointing=True), torch's "
            "save_on_cpu, or pipeline_parallel_size=1."
        )


def _refuse_world(name: str, group: dist.ProcessGroup | None) -> None:
    if group is None or group is dist.group.WORLD:
        raise UnsupportedCodeError(
            f"torch.distributed.{name} over all processes was called inside a pipelined step. The stages run "
            "different parts of the step, so not all of them would come here. Use self.all_gather, which covers "
            "the data-parallel ranks of one stage, log with sync_dist=True, or communicate in a hook outside of "
            "the step."
        )
