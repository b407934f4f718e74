"""How does a stage run only its own layers of a step that calls them all?

Every layer, and every other module that a stage owns, gets a gate in front of its ``__call__``. During a *pass* (one
run of the user's step on one stage) the gate of the stage's first layer lets the received activations in, the gate of
the first layer behind its range takes the activations out and leaves the step by a private exception, and all gates
answer for modules that are elsewhere with unknown values of the right shape. Outside a pass a gate changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.collectives import without_world_collectives
from lightning_shardckpt.parallel.rng import advance_rng, derived_rng, rng_mark
from lightning_shardckpt.parallel.stages import Where
from lightning_shardckpt.parallel.unknown import Entry, Unknown, first_unknown, in_pass, leaked, unknowns

Forward = Callable[..., Any]
_PLAIN = (int, float, str, bool, type(None))


class Leave(BaseException):
    """Leaves a step whose rest is another stage's; not an Exception, so that user code does not catch it."""


@dataclass(slots=True)
class Pass:
    """One run of a step on one stage.

    Attributes:
        kind: "run" computes layers ``start`` to ``stop``; "probe" computes nothing, to see which arguments of layer
            ``stop`` are unknown (of the last layer, if ``stop`` is the number of layers); "finish" computes what comes
            behind the layers, whose results are given.
        whole: a run that does not leave behind its last layer, but runs the rest of the step.
        carry: positions among the arguments (flattened) of the tensors that cross the boundary at ``stop``.
        incoming: for a run, what the stage before sent, by position among the arguments of layer ``start``.
        results: for "finish", gives the unknown inputs of the last layer their values, and makes its outputs of what
            the hollow layer gave.
        random: if that matters, the state of the random generators in which the stage before left its pass.
        random_left: their state when this pass left.
        entered: where the received tensors entered; None: without gradient.
        outputs: the tensors that leave, then those that the last layer returned if the pass left behind it.
        returned: what the step returned, if it was not left.
    """

    kind: Literal["run", "probe", "finish"]
    start: int
    stop: int
    whole: bool = False
    carry: tuple[int, ...] = ()
    incoming: Mapping[int, tuple[Tensor, bool]] = field(default_factory=dict)
    results: Callable[[list[Unknown], Any], Any] | None = None
    random: tuple[int, ...] = ()
    random_left: int = 0
    entered: list[Entry | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    returned: Any = None
    next: int = 0

    def runs(self, where: Where) -> bool:
        """Whether this pass computes modules of that place."""
        if where == "first":
            return self.kind == "run" and self.start == 0
        return where == "every" or self.kind == "finish" or self.whole


class Gates:
    """The gates of one LightningModule; only one pass runs at a time."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self.running: Pass | None = None

    def run(self, this: Pass, step: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Run ``step`` as ``this`` pass; returns the tensors that leave it, so that hooks of FSDP see them."""
        self.running = this
        try:
            with without_world_collectives(), in_pass():
                this.returned = step()
        except Leave:
            return tuple(this.outputs)
        finally:
            self.running = None
        if this.next < len(self.layers):
            raise TopologyError(
                f"the step returned after {this.next} of the {len(self.layers)} layers of its pipeline, before "
                f"{self.layers[this.next]}. A pipelined step must call every layer once."
            )
        unknown = first_unknown(this.returned)
        if unknown is not None and this.kind != "probe":
            raise leaked("what the step returns", unknown)
        return tuple(leaf for leaf in tree_flatten(this.returned)[0] if isinstance(leaf, Tensor))


class Stub:
    """What a module would return, by shape, from its hollow copy; remembered for arguments of the same kind."""

    def __init__(self, twin: nn.Module, fqn: str) -> None:
        self._twin, self._fqn = twin, fqn
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, like: nn.Module | None = None) -> Any:
        """``like``: the real module, where this rank has it; what is hollow then follows its training mode."""
        if like is not None and like.training != self._twin.training:
            for part, real in zip(self._twin.modules(), like.modules(), strict=True):
                part.training = real.training
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        key: Any = (spec, self._twin.training, *(_kind(leaf) for leaf in leaves))
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            known, key = None, None
        if known is None:
            out = self._infer(args, kwargs, leaves)
            out_leaves, out_spec = tree_flatten(out)
            # Also objects such as caches: those of this call, not of the first one.
            places = {id(leaf): position for position, leaf in enumerate(leaves) if not isinstance(leaf, _PLAIN)}
            recipe = [_recipe(leaf, places) for leaf in out_leaves]
            if key is not None and None not in recipe:
                self._known[key] = recipe, out_spec
            return out
        recipe, out_spec = known
        return tree_unflatten([self._made(item, leaves) for item in recipe], out_spec)

    def _infer(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
        try:
            with torch.no_grad(), derived_rng(self._fqn):  # it draws when it meets new shapes only
                out = self._twin.forward(*args, **kwargs)
        except TopologyError:
            like = next((leaf for leaf in leaves if isinstance(leaf, Unknown)), None)
            if like is None:
                raise
            # Its shapes depend on values (experts do): a layer returns what it got, or the entry finds the difference.
            return Unknown.of(like._meta, self._fqn, like.device)
        if len(tree_flatten((tuple(args), dict(kwargs)))[0]) != len(leaves):
            raise TopologyError(
                f"{self._fqn} adds to a list or dict that it gets. Other stages of the pipeline don't see that: return "
                "what is needed."
            )
        return out

    def _made(self, item: Any, leaves: list[Any]) -> Any:
        kind, value = item
        if kind == "argument":
            return leaves[value]
        if kind == "unknown":
            meta, device = value
            return Unknown.of(meta, f"the output of {self._fqn}", device)
        return value


class Gate:
    """Stands in front of one module; see the module's docstring.

    Args:
        place: the position among the layers, or where another module is.
        stub: of the hollow copy.
        owned: whether this rank has the real module.
    """

    def __init__(self, gates: Gates, fqn: str, place: int | Where, stub: Stub, *, owned: bool) -> None:
        self._gates, self._fqn, self._place, self._stub, self._owned = gates, fqn, place, stub, owned

    def call(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = self._gates.running
        if this is None:
            if not self._owned:
                raise TopologyError(
                    f"{self._fqn} is on another pipeline stage and was called outside of a training, validation, test "
                    "or predict step, or by torch.utils.checkpoint around layers of several stages. To run the module "
                    "at other times, or for generate(), load its checkpoint with pipeline_parallel_size=1."
                )
            return self._real(module, forward, args, kwargs)
        if isinstance(self._place, int):
            return self._layer(this, self._place, module, forward, args, kwargs)
        if self._owned and this.runs(self._place):
            return self._real(module, forward, args, kwargs)
        return self._hollow(this, module, args, kwargs)

    def _layer(
        self, this: Pass, index: int, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_order(this, index)
        this.next += 1
        last = len(self._gates.layers) - 1
        leaves = tree_flatten((args, kwargs))[0]
        if this.kind == "probe":
            if index == min(this.stop, last):
                this.carry = tuple(unknowns(leaves))
                raise Leave
            return self._hollow(this, module, args, kwargs)
        if this.kind == "finish":
            out = self._hollow(this, module, args, kwargs)
            if index < last:
                return out
            assert this.results is not None
            return this.results([leaves[position] for position in unknowns(leaves)], out)
        self._refuse_reentrant_checkpoint()
        if index < this.start:
            return self._hollow(this, module, args, kwargs)
        if index == this.start:
            self._enter(this, leaves)
        leaves_behind = index == last and not this.whole
        if index == this.stop or leaves_behind:
            this.outputs = [self._checked(leaves[position]) for position in this.carry]
        if index == this.stop:
            this.random_left = rng_mark()
            raise Leave
        out = self._real(module, forward, args, kwargs)
        if leaves_behind:
            this.outputs += [self._checked(leaf) for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            raise Leave
        return out

    def _check_order(self, this: Pass, index: int) -> None:
        layers = self._gates.layers
        if index == this.next:
            return
        if index < this.next:
            what = f"layer {self._fqn} was called a second time"
        else:
            what = f"layer {self._fqn} was called before {layers[this.next]}"
        raise TopologyError(
            f"{what}. A pipelined step calls each layer once, in the order {layers[0]} … {layers[-1]}: two passes over "
            "the layers (as generate() makes for each token), skipped layers or another order can't be pipelined. Use "
            "pipeline_parallel_size=1, or name the layers in their order with pipeline_layers."
        )

    def _enter(self, this: Pass, leaves: list[Any]) -> None:
        found = tuple(unknowns(leaves))
        if this.start == 0:
            if found:
                raise leaked(f"the input of the first layer {self._fqn}", leaves[found[0]])
            return
        if set(found) != set(this.incoming):
            raise TopologyError(
                f"the arguments of layer {self._fqn} (flattened) that come from the stage before are at positions "
                f"{sorted(this.incoming)} there, but at {sorted(found)} here: the step runs differently on the stages"
            )
        if this.random and this.random != (rng_mark(),):
            raise TopologyError(
                f"before layer {self._fqn}, the step has drawn other random numbers than on the stage before it: "
                "functions such as torch.nn.functional.dropout draw only where there is a value. Use modules such as "
                "torch.nn.Dropout, or draw before anything that a module computes."
            )
        for position in found:
            value, requires_grad = this.incoming[position]
            leaf = leaves[position]
            if leaf.shape != value.shape:
                raise TopologyError(
                    f"argument {position} of layer {self._fqn} has shape {tuple(value.shape)} on the stage before, "
                    f"but {tuple(leaf.shape)} was expected here: the stages got different batches, or shapes depend on "
                    "values"
                )
            this.entered.append(leaf.become(value, requires_grad=requires_grad))

    def _refuse_reentrant_checkpoint(self) -> None:
        if torch.is_grad_enabled():
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise TopologyError(
                    f"layer {self._fqn} is called in torch.utils.checkpoint with use_reentrant=True, which hides from "
                    "the pipeline what gradients depend on. Use use_reentrant=False, or "
                    "ShardedStrategy(activation_checkpointing=True)."
                )
            frame = frame.f_back

    def _checked(self, leaf: Tensor) -> Tensor:
        if isinstance(leaf, Unknown):
            raise leaked(f"an argument or result of layer {self._fqn}", leaf)
        if isinstance(leaf, DTensor):
            raise TopologyError(
                f"an argument or result of layer {self._fqn} is a DTensor ({leaf.placements}); only plain tensors "
                "cross stages. Let the tensor-parallel plan return local or gathered tensors at the ends of layers."
            )
        return leaf

    def _real(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        this = self._gates.running
        if this is None or this.kind != "probe":  # a probe looks for what is drawn outside of modules
            advance_rng()
        with derived_rng(self._fqn):  # what a module draws must not shift what other stages draw outside modules
            return forward(*args, **kwargs)

    def _hollow(self, this: Pass, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.training and this.kind != "probe":
            advance_rng()  # as where the module is real, so that all stages draw alike behind it
        return self._stub(args, kwargs, like=module if self._owned else None)


class _Gated(nn.Module):
    """Mixed into the class of a module that has a gate; the outermost of all wrappers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate: Gate = self.__dict__["_shardckpt_gate"]
        return gate.call(self, super().__call__, args, kwargs)


def add_gate(module: nn.Module, gate: Gate) -> None:
    """Put ``gate`` in front of ``module``; after FSDP, whose hooks must run behind it."""
    module.__dict__["_shardckpt_gate"] = gate
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Gated, kind), {"__module__": kind.__module__})


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, isinstance(leaf, Unknown))
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _recipe(leaf: Any, places: Mapping[int, int]) -> Any:
    """How to make an output without running anything; None if that needs its value."""
    if id(leaf) in places:
        return "argument", places[id(leaf)]
    if not isinstance(leaf, Tensor):
        return "constant", leaf
    return ("unknown", (leaf._meta, leaf.device)) if isinstance(leaf, Unknown) else None
