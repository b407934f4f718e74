"""Let a stage run only its own layers of a step that calls them all.

Every layer, and every other module that a stage owns, gets a gate in front of its ``__call__``. During a *stage
run* (one run of the user's step on one stage) the gate of the stage's first layer lets the received activations in, the
gate of the first layer after its range takes the activations out and leaves the step by a private exception, and all
gates answer for modules that are elsewhere with placeholders of the right shape. Otherwise a gate changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.pytree import TreeSpec, flatten_call, tree_flatten, tree_unflatten
from lightning_shardckpt.compat.torch_modules import intercept_calls
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.checks import guarded_step, refuse_reentrant_checkpoint
from lightning_shardckpt.parallel.pipeline.p2p import Message
from lightning_shardckpt.parallel.pipeline.stages import Where
from lightning_shardckpt.parallel.sharding.sample_numbers import forbid_other_draws
from lightning_shardckpt.parallel.tensors.graph_entry import GraphEntry
from lightning_shardckpt.parallel.tensors.placeholder import (
    Placeholder,
    first_placeholder,
    in_stage_run,
    leak_error,
    placeholder_positions,
)
from lightning_shardckpt.system.random_generators import advance_rng, checksum_after, derive_rng, rng_checksum

Forward = Callable[..., Any]
_PLAIN = (int, float, str, bool, type(None))


class StageExit(BaseException):
    """Leaves a step whose rest is another stage's; not an Exception, so that user code does not catch it."""


@dataclass(slots=True)
class StageRun:
    """One run of a step on one stage.

    Attributes:
        kind: "run" computes layers ``start`` to ``stop``; "probe" computes nothing, to see which arguments of layer
            ``stop`` are unknown; "finish" computes what comes after the layers, whose results are given.
        whole: a run that does not leave after its last layer, but runs the rest of the step.
        carry: positions among the arguments (flattened) of the tensors that cross the boundary at ``stop``; if the run
            left after the last layer, of all tensors among that layer's arguments.
        receive: for a run, waits for the message of the stage before, whose tensors are by position among the arguments
            of layer ``start``; it is called there, so that what comes before runs meanwhile.
        results: for "finish", gives the unknown inputs of the last layer their values, by position, and makes its
            outputs of what the weightless copy gave.
        seed: for "finish", that with which it began.
        draws: whether the step draws random numbers before its layers, so that stages compare them.
        facts: the state of the random generators when this run left, if that matters.
        entered: where the received tensors entered, by position; None: without gradient.
        failure: of waiting for that message, such as that the stage before failed; this run left because of it.
        outputs: the tensors at ``carry``, then those that the last layer returned if the run left after it.
        returned: what the step returned, if it was not left.
        early: modules of the last stage that were called before the first layer.
        timely: modules of the first stage that were.
        advances: how often gates have drawn a random number.
        drew: for "finish", whether the step drew others before the last layer.
    """

    kind: Literal["run", "probe", "finish"]
    start: int
    stop: int
    whole: bool = False
    carry: tuple[int, ...] = ()
    receive: Callable[[], Message] = lambda: Message({})
    results: Callable[[dict[int, Placeholder], Any], Any] | None = None
    seed: int = 0
    draws: bool = False
    facts: tuple[int, ...] = ()
    entered: dict[int, GraphEntry | None] = field(default_factory=dict)
    failure: Exception | None = None
    outputs: list[Tensor] = field(default_factory=list)
    returned: Any = None
    next: int = 0
    early: list[str] = field(default_factory=list)
    timely: set[str] = field(default_factory=set)
    advances: int = 0
    drew: bool = False

    def runs(self, where: Where) -> bool:
        """Return whether this run computes modules of that place."""
        if where == "first":
            return self.kind == "run" and self.start == 0
        return where == "every" or self.kind == "finish" or self.whole


class Gates:
    """The gates of one LightningModule; only one stage run at a time."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self.running: StageRun | None = None

    def run(self, run: StageRun, step: Callable[[], Any]) -> tuple[Tensor, ...]:
        """Run ``step`` as one stage run, and return the tensors that leave it, so that hooks of FSDP see them."""
        self.running = run
        try:
            with guarded_step(), in_stage_run():
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
            raise leak_error("what the step returns", placeholder)
        return tuple(leaf for leaf in tree_flatten(run.returned)[0] if isinstance(leaf, Tensor))


class Stub:
    """A module's result, by shape, from its weightless copy; remembered for arguments of the same kind."""

    def __init__(self, copy: nn.Module, fqn: str) -> None:
        self._copy, self._fqn = copy, fqn
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, like: nn.Module | None = None) -> Any:
        """Placeholders for what the module would return.

        Args:
            args: positional arguments of the call.
            kwargs: its other arguments.
            like: the real module, where this rank has it; the copy then follows its training mode.
        """
        if like is not None and like.training != self._copy.training:
            for part, real in zip(self._copy.modules(), like.modules(), strict=True):
                part.training = real.training
        leaves, spec = flatten_call(args, kwargs)
        key: Any = (spec, self._copy.training, *(_kind(leaf) for leaf in leaves))
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
            with torch.no_grad(), derive_rng(self._fqn):  # it draws when it meets new shapes only
                out = self._copy.forward(*args, **kwargs)
        except (UnsupportedCodeError, AttributeError, LookupError, ValueError):
            like = next((leaf for leaf in leaves if isinstance(leaf, Placeholder)), None)
            if like is None:
                raise
            # Its shapes depend on values, as those of experts, or it looks up weights in _buffers, as in PEFT: a layer
            # returns what it got, or the entry finds the difference. An error of its own is raised where it runs.
            return Placeholder.of(like.geometry, self._fqn, like.device)
        if len(flatten_call(args, kwargs)[0]) != len(leaves):
            raise UnsupportedCodeError(
                f"{self._fqn} adds to a list or dict that it gets. Other stages of the pipeline don't see that: return "
                "what is needed."
            )
        return out

    def _made(self, item: Any, leaves: list[Any]) -> Any:
        kind, value = item
        if kind == "argument":
            return leaves[value]
        if kind == "placeholder":
            meta, device = value
            return Placeholder.of(meta, f"the output of {self._fqn}", device)
        return value


class Gate:
    """Stands in front of one module, and decides who computes a call of it.

    Args:
        place: the position among the layers, or where another module is.
        stub: of the weightless copy.
        owned: whether this rank has the real module.
    """

    def __init__(self, gates: Gates, fqn: str, place: int | Where, stub: Stub, *, owned: bool) -> None:
        self._gates, self._fqn, self._place, self._stub, self._owned = gates, fqn, place, stub, owned

    def call(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module: compute it by ``forward``, give its shapes only, or leave the step."""
        run = self._gates.running
        if run is None:
            if not self._owned:
                raise UnsupportedCodeError(
                    f"{self._fqn} is on another pipeline stage and was called outside of a training, validation, test "
                    "or predict step, or by torch.utils.checkpoint around layers of several stages. To run the module "
                    "at other times, or for generate(), load its checkpoint with pipeline_parallel_size=1. (The "
                    "Trainer runs a module with example_input_array: leave that out, or enable_model_summary=False.)"
                )
            return self._real(module, forward, args, kwargs)
        if isinstance(self._place, int):
            return self._layer(run, self._place, module, forward, args, kwargs)
        if self._owned and run.runs(self._place):
            return self._real(module, forward, args, kwargs)
        if self._place == "last" and run.next == 0:
            run.early.append(self._fqn)  # an error if a layer needs its result
        if self._place == "first" and run.next == 0:
            run.timely.add(self._fqn)  # a later call is of a second pass through all, of which the layers tell
        elif self._place == "first" and run.next == len(self._gates.layers) and self._fqn not in run.timely:
            raise _misplaced([self._fqn], "first", "after", "last")
        return self._by_shape(run, module, args, kwargs)

    def _layer(
        self,
        run: StageRun,
        index: int,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._check_order(run, index)
        run.next += 1
        last = len(self._gates.layers) - 1
        leaves = flatten_call(args, kwargs)[0]
        if run.kind == "probe":
            if index == min(run.stop, last):
                run.carry = tuple(placeholder_positions(leaves))
                raise StageExit
            return self._by_shape(run, module, args, kwargs)
        if run.kind == "finish":
            if index < last:
                return self._by_shape(run, module, args, kwargs)
            run.drew = rng_checksum() != checksum_after(run.seed, run.advances)
            out = self._by_shape(run, module, args, kwargs)
            assert run.results is not None
            return run.results({position: leaves[position] for position in placeholder_positions(leaves)}, out)
        refuse_reentrant_checkpoint(self._fqn)
        if index < run.start:
            return self._by_shape(run, module, args, kwargs)
        if index == run.start:
            self._enter(run, leaves)
        leaves_after = index == last < run.stop and not run.whole
        if leaves_after:
            run.carry = tuple(position for position, leaf in enumerate(leaves) if _is_plain_tensor(leaf))
        if index == run.stop or leaves_after:
            run.outputs = [self._checked(leaves[position]) for position in run.carry]
        if index == run.stop:
            if run.draws:
                run.facts = (rng_checksum(),)
            raise StageExit
        out = self._real(module, forward, args, kwargs)
        if leaves_after:
            run.outputs += [self._checked(leaf) for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            raise StageExit
        return out

    def _check_order(self, run: StageRun, index: int) -> None:
        layers = self._gates.layers
        if index == run.next:
            return
        if index < run.next:
            what = f"layer {self._fqn} was called a second time"
        else:
            what = f"layer {self._fqn} was called before {layers[run.next]}"
        raise UnsupportedCodeError(
            f"{what}. A pipelined step calls each layer once, in the order {layers[0]} … {layers[-1]}: two passes over "
            "the layers (as generate() makes for each token), skipped layers or another order can't be pipelined. Use "
            "pipeline_parallel_size=1, or name the layers in their order with pipeline_layers."
        )

    def _enter(self, run: StageRun, leaves: list[Any]) -> None:
        found = tuple(placeholder_positions(leaves))
        if run.start == 0:
            if found and run.early:
                raise _misplaced(run.early, "last", "before", "first")
            if found:
                raise leak_error(f"the input of the first layer {self._fqn}", leaves[found[0]])
            return
        try:
            message = run.receive()
        except Exception as failure:  # which user code must not catch
            run.failure = failure
            raise StageExit from None
        incoming = message.tensors
        unknown = next((position for position in found if position not in incoming), None)
        if unknown is not None:
            raise leak_error(f"argument {unknown} of layer {self._fqn}", leaves[unknown])
        if len(found) != len(incoming):
            raise UnsupportedCodeError(
                f"the arguments of layer {self._fqn} (flattened) that come from the stage before are at positions "
                f"{sorted(incoming)} there, but at {sorted(found)} here: the step runs differently on the stages"
            )
        if message.facts and message.facts != (rng_checksum(),):
            raise UnsupportedCodeError(
                f"before layer {self._fqn}, the step has drawn other random numbers than on the stage before it: "
                "functions such as torch.nn.functional.dropout draw only where there is a value. Use modules such as "
                "torch.nn.Dropout, or draw before anything that a module computes."
            )
        for position in found:
            value, requires_grad = incoming[position]
            leaf = leaves[position]
            if leaf.shape != value.shape:
                raise UnsupportedCodeError(
                    f"argument {position} of layer {self._fqn} has shape {tuple(value.shape)} on the stage before, "
                    f"but {tuple(leaf.shape)} was expected here: the stages got different batches, or shapes depend on "
                    "values"
                )
            run.entered[position] = leaf.become(value, requires_grad=requires_grad)

    def _checked(self, leaf: Tensor) -> Tensor:
        if isinstance(leaf, Placeholder):
            raise leak_error(f"an argument or result of layer {self._fqn}", leaf)
        if isinstance(leaf, DTensor):
            raise UnsupportedCodeError(
                f"an argument or result of layer {self._fqn} is a DTensor ({leaf.placements}); only plain tensors "
                "cross stages. Let the tensor-parallel plan return local or gathered tensors at the ends of layers."
            )
        return leaf

    def _real(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        run = self._gates.running
        if run is None or run.kind != "probe":  # a probe looks for what is drawn outside of modules
            self._advance(run)
        # What a module draws must not shift what other stages draw outside modules.
        with derive_rng(self._fqn), forbid_other_draws(self._fqn):
            return forward(*args, **kwargs)

    def _advance(self, run: StageRun | None) -> None:
        advance_rng()
        if run is not None:
            run.advances += 1

    def _by_shape(self, run: StageRun, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.training and run.kind != "probe":
            self._advance(run)  # as where the module is real, so that all stages draw alike after it
        return self._stub(args, kwargs, like=module if self._owned else None)


def _is_plain_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder | DTensor)


def _misplaced(names: Sequence[str], place: Where, called: str, needed: Where) -> UnsupportedCodeError:
    return UnsupportedCodeError(
        f"the step calls {', '.join(names)} {called} the layers of the pipeline, and uses the result, but the {place} "
        f"stage has it. Modules registered before the layers are on the first stage, those after them on the last; "
        f"say it where that is not the order of calls: pipeline_modules={dict.fromkeys(names, needed)}"
    )


def add_gate(module: nn.Module, gate: Gate) -> None:
    """Put ``gate`` in front of ``module``; after FSDP, whose hooks must run inside it."""
    owner = ref(module)

    def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        module = owner()
        assert module is not None  # somebody calls it
        return gate.call(module, forward, args, kwargs)

    intercept_calls(module, call)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder):
        return (tuple(leaf.geometry.shape), leaf.geometry.dtype, leaf.device, True)
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device, False)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _recipe(leaf: Any, places: Mapping[int, int]) -> Any:
    """A recipe for an output that runs nothing; None if the output depends on values."""
    if id(leaf) in places:
        return "argument", places[id(leaf)]
    if not isinstance(leaf, Tensor):
        return ("constant", leaf) if isinstance(leaf, _PLAIN) else None
    return ("placeholder", (leaf.geometry, leaf.device)) if isinstance(leaf, Placeholder) else None
