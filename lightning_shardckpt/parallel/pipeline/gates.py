"""Gates in front of modules, by which a step that calls all layers runs only the layers of one stage.

Every layer, and every other module with parameters, has a gate in front of its ``__call__``. During a *stage run* (one
run of the user's step on one stage):

- the gate of the stage's first layer inserts the received activations,
- the gate of the next stage's first layer takes the activations out, and ends the step by a private exception,
- gates of modules on other stages return placeholders of the right shape.

Outside of a stage run a gate only calls its module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import FrameType
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_distributed import watch_collectives
from lightning_shardckpt.compat.torch_modules import intercept_calls
from lightning_shardckpt.compat.torch_tensors import TreeSpec, flatten_call, tree_flatten, tree_unflatten
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.p2p import Message
from lightning_shardckpt.parallel.pipeline.placeholder import (
    GraphEntry,
    Placeholder,
    first_placeholder,
    in_stage_run,
    leak_error,
    placeholder_positions,
)
from lightning_shardckpt.parallel.pipeline.stages import Where
from lightning_shardckpt.system.random_generators import advance_rng, derive_rng, rng_checksum

Forward = Callable[..., Any]
_Flat = tuple[list[Any], Any]
"""The result of `flatten_call`."""
_PLAIN = (int, float, str, bool, type(None))


class StageExit(BaseException):
    """Ends a stage run, since other stages run the rest of the step. No Exception, so user code doesn't catch it."""


@dataclass(slots=True)
class StageRun:
    """One run of a step on one stage.

    Attributes:
        kind: "run" computes layers ``start`` to ``stop``; "probe" computes no layer, and finds the unknown arguments
            of layer ``stop``; "finish" computes the rest of the step from the results of the layers.
        whole: True if a "run" continues after the last layer to the end of the step.
        positions: the positions among the flattened arguments of layer ``stop`` of the tensors that cross the boundary;
            for a run that ends after the last layer, the positions of all tensors among its arguments.
        receive: for a "run", waits for the message of the previous stage, whose tensors are by position among the
            arguments of layer ``start``. It is called there, after user code before the layers has run.
        fill_in: for "finish", sets the unknown inputs of the last layer, by position, and returns its outputs, given
            the placeholders for them.
        has_drawn: for "finish", tells if more random numbers were drawn than by so many gates.
        draws: True if the step draws random numbers before its layers, so that stages compare their generators.
        checks: a checksum of the random generators at the end of this run, if ``draws``.
        entries: the entries of received tensors into the autograd graph, by position; None for one without gradient.
        failure: of receiving the message, such as a failure of the previous stage; it ended this run.
        outputs: the tensors at ``positions``, then the outputs of the last layer, if the run ends after it.
        returned: the output of the step, if it ran to its end.
        next: the index of the layer that the step must call next.
        advances: the number of random numbers that gates have drawn.
        drew: for "finish", True if the step drew other random numbers before the last layer.
    """

    kind: Literal["run", "probe", "finish"]
    start: int
    stop: int
    whole: bool = False
    positions: tuple[int, ...] = ()
    receive: Callable[[], Message] = lambda: Message({})
    fill_in: Callable[[dict[int, Placeholder], Any], Any] | None = None
    has_drawn: Callable[[int], bool] = lambda advances: False
    draws: bool = False
    checks: tuple[int, ...] = ()
    entries: dict[int, GraphEntry | None] = field(default_factory=dict)
    failure: Exception | None = None
    outputs: list[Tensor] = field(default_factory=list)
    returned: Any = None
    next: int = 0
    advances: int = 0
    drew: bool = False

    def computes(self, where: Where) -> bool:
        """Return True if this run computes the modules other than layers at ``where``."""
        if where == "first":
            return self.kind == "run" and self.start == 0
        return where == "every" or self.kind == "finish" or self.whole


class Gates:
    """The gates of one module, with at most one stage run at a time."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self.running: StageRun | None = None

    def run(self, run: StageRun, step: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Run ``step`` as one stage run, and return its output tensors, in which FSDP's hooks find them."""
        self.running = run
        try:
            with watch_collectives(refuse_world), in_stage_run():
                run.returned = step()
        except StageExit:
            if run.failure is not None:
                raise run.failure from None
            return tuple(run.outputs)
        finally:
            self.running = None
        if run.next < len(self.layers):
            raise UnsupportedCodeError(
                f"the step returned after {run.next} of the {len(self.layers)} layers of its pipeline, before "
                f"{self.layers[run.next]}. A pipelined step must call every layer once."
            )
        placeholder = first_placeholder(run.returned)
        if placeholder is not None and run.kind != "probe":
            raise leak_error("the result of the step", placeholder)
        return tuple(leaf for leaf in tree_flatten(run.returned)[0] if isinstance(leaf, Tensor))


class Stub:
    """Infers the outputs of a module, as placeholders, from a copy without weights; cached by kinds of arguments."""

    def __init__(self, copy: nn.Module, fqn: str) -> None:
        self._copy, self._fqn = copy, fqn
        self._cache: dict[Any, tuple[list[Callable[[list[Any]], Any]], TreeSpec]] = {}

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], flat: _Flat, *, like: nn.Module | None = None
    ) -> Any:
        """Return the outputs of a call, with placeholders for tensors. The copy gets the training mode of ``like``."""
        if like is not None and like.training != self._copy.training:
            for part, real in zip(self._copy.modules(), like.modules(), strict=True):
                part.training = real.training
        leaves, spec = flat
        key: Any = (spec, self._copy.training, *(_cache_key(leaf) for leaf in leaves))
        try:
            cached = self._cache.get(key)
        except TypeError:  # an argument that cannot be hashed
            cached, key = None, None
        if cached is None:
            out = self._infer(args, kwargs, leaves)
            out_leaves, out_spec = tree_flatten(out)
            # An argument that is returned, such as a cache object, is that of each call, not of the first one.
            positions = {id(leaf): position for position, leaf in enumerate(leaves) if not isinstance(leaf, _PLAIN)}
            builders = [_builder(leaf, positions) for leaf in out_leaves]
            known = [build for build in builders if build is not None]
            if key is None or len(known) < len(builders):
                return out
            cached = self._cache[key] = known, out_spec
        recipe, out_spec = cached
        return tree_unflatten([build(leaves) for build in recipe], out_spec)

    def _infer(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
        try:
            with torch.no_grad(), derive_rng(self._fqn):  # it draws only for new shapes
                out = self._copy.forward(*args, **kwargs)
        except (UnsupportedCodeError, AttributeError, LookupError, ValueError):
            like = next((leaf for leaf in leaves if isinstance(leaf, Placeholder)), None)
            if like is None:
                raise
            # Shapes depend on values, as in experts, or the forward looks up weights in _buffers, as in PEFT. Assume
            # that the layer returns the shape of its input; `Gate._receive` compares. Other errors are raised by the
            # stage that runs the layer.
            return Placeholder.of(like.geometry, self._fqn, like.device)
        if len(flatten_call(args, kwargs)[0]) != len(leaves):
            raise UnsupportedCodeError(
                f"{self._fqn} adds to or removes from a list or dict that it gets. Other stages of the pipeline don't "
                "see the change: leave it as it is, and return a new one."
            )
        return out


class Gate:
    """The gate of one module, put in front of it; decides if a call computes the module.

    Make it after FSDP, whose hooks must run inside the gate.

    Args:
        gates: those of all modules.
        module: this one.
        fqn: its name.
        place: the index among the layers, or the place of another module.
        stub: infers its outputs.
        owned: True if this rank has the module.
    """

    def __init__(
        self, gates: Gates, module: nn.Module, fqn: str, place: int | Where, stub: Stub, *, owned: bool
    ) -> None:
        self._gates, self._module, self._fqn = gates, ref(module), fqn
        self._place, self._stub, self._owned = place, stub, owned
        intercept_calls(module, lambda forward, *args, **kwargs: self._call(forward, args, kwargs))

    def _call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module: compute it by ``forward``, return placeholders, or end the stage run."""
        run = self._gates.running
        if run is None:
            if not self._owned:
                raise UnsupportedCodeError(
                    f"{self._fqn} is on another pipeline stage and was called outside of a training, validation, test "
                    "or predict step, or by torch.utils.checkpoint around layers of several stages. To run the module "
                    "at other times, or for generate(), load its checkpoint with pipeline_parallel_size=1. (The "
                    "Trainer runs a module with example_input_array: leave that out, or enable_model_summary=False.)"
                )
            return self._compute(forward, args, kwargs)
        if isinstance(self._place, int):
            return self._call_layer(run, self._place, forward, args, kwargs)
        if self._owned and run.computes(self._place):
            return self._compute(forward, args, kwargs)
        return self._infer(run, args, kwargs, flatten_call(args, kwargs))

    def _call_layer(
        self, run: StageRun, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_order(run, index)
        run.next += 1
        last = len(self._gates.layers) - 1
        flat = flatten_call(args, kwargs)
        leaves = flat[0]
        if run.kind == "probe" and index == min(run.stop, last):
            run.positions = tuple(placeholder_positions(leaves))
            raise StageExit
        if run.kind == "finish" and index == last:
            run.drew = run.has_drawn(run.advances)
            out = self._infer(run, args, kwargs, flat)
            assert run.fill_in is not None
            return run.fill_in({position: leaves[position] for position in placeholder_positions(leaves)}, out)
        if run.kind == "run":
            _refuse_autograd_function(self._fqn)
        if run.kind != "run" or index < run.start:
            return self._infer(run, args, kwargs, flat)
        if index == run.start:
            self._receive(run, leaves)
        ends_after = index == last < run.stop and not run.whole
        if ends_after:
            tensors = [(position, leaf) for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            run.positions = tuple(n for n, tensor in tensors if not isinstance(tensor, Placeholder | DTensor))
        if index == run.stop or ends_after:
            run.outputs = [self._check_plain(leaves[position]) for position in run.positions]
        if index == run.stop:
            if run.draws:
                run.checks = (rng_checksum(),)
            raise StageExit
        out = self._compute(forward, args, kwargs)
        if ends_after:
            run.outputs += [self._check_plain(leaf) for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            raise StageExit
        return out

    def _check_order(self, run: StageRun, index: int) -> None:
        layers = self._gates.layers
        if index == run.next:
            return
        call = "a second time" if index < run.next else f"before {layers[run.next]}"
        raise UnsupportedCodeError(
            f"layer {self._fqn} was called {call}. A pipelined step calls each layer once, in the order {layers[0]} … "
            f"{layers[-1]}: two passes over the layers (as generate() makes for each token), skipped layers or another "
            "order can't be pipelined. Use pipeline_parallel_size=1, or name the layers in their order with "
            "Pipeline(layers=…)."
        )

    def _receive(self, run: StageRun, leaves: list[Any]) -> None:
        """Put received activations in place of the placeholders among the arguments of the stage's first layer."""
        unknown = tuple(placeholder_positions(leaves))
        if run.start == 0:
            if unknown:
                raise leak_error(f"the input of the first layer {self._fqn}", leaves[unknown[0]])
            return
        try:
            message = run.receive()
        except Exception as failure:  # which user code must not catch
            run.failure = failure
            raise StageExit from None
        incoming = message.tensors
        missing = next((position for position in unknown if position not in incoming), None)
        if missing is not None:
            raise leak_error(f"argument {missing} of layer {self._fqn}", leaves[missing])
        if len(unknown) != len(incoming):
            raise UnsupportedCodeError(
                f"the step runs differently on two pipeline stages: the previous stage sends the (flattened) arguments "
                f"{sorted(incoming)} of layer {self._fqn}, this stage expects {sorted(unknown)}"
            )
        if message.checks and message.checks != (rng_checksum(),):
            raise UnsupportedCodeError(
                f"before layer {self._fqn}, the step has drawn other random numbers than on the previous pipeline "
                "stage: functions such as torch.nn.functional.dropout draw only for tensors that a stage has. Use "
                "modules such as torch.nn.Dropout, or draw before the first module is called."
            )
        for position in unknown:
            value, requires_grad = incoming[position]
            leaf = leaves[position]
            if leaf.shape != value.shape:
                raise UnsupportedCodeError(
                    f"argument {position} of layer {self._fqn} has shape {tuple(value.shape)} on the previous pipeline "
                    f"stage, expected {tuple(leaf.shape)} on this one: the stages got different batches, or shapes "
                    "depend on values"
                )
            run.entries[position] = leaf.become(value, requires_grad=requires_grad)

    def _check_plain(self, leaf: Tensor) -> Tensor:
        if isinstance(leaf, Placeholder):
            raise leak_error(f"an argument or result of layer {self._fqn}", leaf)
        if isinstance(leaf, DTensor):
            raise UnsupportedCodeError(
                f"an argument or result of layer {self._fqn} is a DTensor ({leaf.placements}); only plain tensors "
                "cross stages. Let the tensor-parallel plan return local or gathered tensors at the ends of layers."
            )
        return leaf

    @property
    def _is_training(self) -> bool:
        module = self._module()
        assert module is not None  # it is being called
        return module.training

    def _compute(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_training:
            return forward(*args, **kwargs)
        self._advance(self._gates.running)
        # Draws of a module must not shift the draws outside of modules, which all stages make.
        with derive_rng(self._fqn):
            return forward(*args, **kwargs)

    def _infer(self, run: StageRun, args: tuple[Any, ...], kwargs: dict[str, Any], flat: _Flat) -> Any:
        if self._is_training:
            self._advance(run)  # as in `_compute`, so that all stages draw the same numbers later
        return self._stub(args, kwargs, flat, like=self._module() if self._owned else None)

    def _advance(self, run: StageRun | None) -> None:
        if run is None:
            advance_rng()
        elif run.kind != "probe":  # a probe looks for draws outside of modules
            advance_rng()
            run.advances += 1


def _cache_key(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder):
        return (tuple(leaf.geometry.shape), leaf.geometry.dtype, leaf.device, True)
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, False)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _builder(leaf: Any, positions: Mapping[int, int]) -> Callable[[list[Any]], Any] | None:
    """Return a function of the arguments that builds an output without a forward; None if it depends on values."""
    if id(leaf) in positions:
        return itemgetter(positions[id(leaf)])
    if isinstance(leaf, Placeholder):
        return lambda _: Placeholder.of(leaf.geometry, leaf.origin, leaf.device)
    return (lambda _: leaf) if isinstance(leaf, _PLAIN) else None


# ── code that would run differently, or hang ────────────────────────────────────────────────────────────────────────


def _refuse_autograd_function(layer: str) -> None:
    """Check the caller of a layer.

    Raises:
        UnsupportedCodeError: for an autograd function, such as a reentrant ``torch.utils.checkpoint``, which runs the
            layer without gradients.
    """
    if torch.is_grad_enabled():
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, FunctionCtx):
            raise UnsupportedCodeError(
                f"layer {layer} is called in {type(first).__name__.removesuffix('Backward')}, a "
                "torch.autograd.Function, which hides from the pipeline the graph of gradients. Call layers outside of "
                "such functions (torch.utils.checkpoint with use_reentrant=False), or use pipeline_parallel_size=1."
            )
        frame = frame.f_back


def refuse_world(name: str, group: dist.ProcessGroup | None) -> None:
    """Refuse a collective over all processes; others, such as FSDP's, are allowed."""
    if group is None or group is dist.group.WORLD:
        raise UnsupportedCodeError(
            f"torch.distributed.{name} over all processes was called inside a pipelined step. The stages run "
            "different parts of the step, so not all of them would call it. Use self.all_gather, which covers the "
            "data-parallel ranks of one stage, log with sync_dist=True, or communicate in a hook outside of the step."
        )
