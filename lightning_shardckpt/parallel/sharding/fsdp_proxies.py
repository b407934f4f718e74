"""Proxy modules through which torch's ``fully_shard`` gathers the parameters of units.

``fully_shard`` changes the class and the parameters of a module. The user's must stay as they are, so it is applied to
proxies: a *proxy* registers the parameters of a unit, and runs the unit's forward within its own. Torch's hooks on the
proxy gather, free and prefetch; the unit's modules get tensors over the gathered memory.

1. Before the forward of a proxy, torch gathers; after it, torch frees.
2. Before the backward, torch gathers again, and prefetches the previous unit. It registers a hook for that on the
   outputs of the forward. The proxy returns an object that keeps the hook; the proxy calls it when a backward reaches
   an output of the unit, or unpacks a parameter whose memory is freed.
3. When the gradients are complete, torch frees the parameters, and reduces and accumulates the gradients, in a node
   that it inserts before the inputs of the forward. The proxy's input is an empty tensor, the token, on which the whole
   parameters depend, so that this node runs after the nodes of all parameters.

User code that this would change is refused; it runs in modules that ``FSDP(ignored=…)`` leaves whole.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import fully_shard

from lightning_shardckpt.compat.dtensor import local_tensor, rows_of
from lightning_shardckpt.compat.torch_autograd import in_backward
from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.compat.torch_modules import parameter_slots
from lightning_shardckpt.compat.torch_tensors import (
    storage_uses,
    tree_leaves,
    with_torch_function,
    without_torch_function,
)
from lightning_shardckpt.distributed.host_numbers import wait_for
from lightning_shardckpt.parallel.sharding.backward_pass import Passes, refuse
from lightning_shardckpt.parallel.sharding.gathered_parameters import as_gathered, copy_memory
from lightning_shardckpt.parallel.tensors.gathered_weights import CastWeight, is_autocast, uses_other_hooks, version_key
from lightning_shardckpt.parallel.tensors.placement import Peers
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import (
    GATHERED,
    RECEIVER,
    GatherItem,
    gradient_or_none,
    refuse_batched,
    refuse_sparse,
)


class GatheredByFSDP(NamedTuple):
    """A parameter that ``fully_shard`` has gathered."""

    whole: Tensor  # for the forward, in place of the sharded one
    regather: Callable[[], Tensor]  # returns the memory for a backward, gathered again if it was freed
    cast: CastWeight | None  # `whole` with its history, if it is in the dtype of autocast; only some functions get it


Gathered = dict[int, GatheredByFSDP]
"""Gathered parameters, by the ids of the sharded ones."""


class FSDPProxy:
    """Sharded parameters of one dtype that torch gathers together, for the forward of one unit or of several.

    Parameters of several units are gathered at the first forward of a step, and kept until the end of the backward. All
    forwards of the step then depend on the token of the first one, so that torch reduces all gradients together.

    Args:
        named: the parameters, each with the name of its unit; a shared one several times.
        options: of ``fully_shard``. A dtype for the parameters, also the attribute ``cast_to``, is that of autocast.
    """

    def __init__(
        self, passes: Passes, named: Sequence[tuple[str, ShardedTensor]], device: torch.device, **options: Any
    ) -> None:
        self.cast_to, self._passes, self._device = options["mp_policy"].param_dtype, passes, device
        self._leaves = [*{id(leaf): leaf for _, leaf in named}.values()]
        names = {id(leaf): name for name, leaf in reversed(named)}  # the first of several units
        self._names = [names[id(leaf)] for leaf in self._leaves]
        self._numbers = {id(leaf): n for n, leaf in enumerate(self._leaves)}
        self._items, self._dtype = [GatherItem.of(leaf) for leaf in self._leaves], self._leaves[0].dtype
        wholes = [item.wrap(torch.empty(item.shape, dtype=self._dtype, device="meta")) for item in self._items]
        module: Any = ProxyModule([nn.Parameter(w, p.requires_grad) for w, p in zip(wholes, self._leaves, strict=True)])
        fully_shard(module, **options)
        units = dict.fromkeys(name for name, _ in named)
        if device.type == "cpu":
            announced = _Announced(passes.peers[0], ", ".join(units))
            module.set_custom_all_gather(announced)
            module.set_custom_reduce_scatter(announced)
        self.module, self._has_several = module, len(units) > 1
        slots: Any = parameter_slots(module)
        self._slots: dict[str, Any] = slots  # in the order of the parameters, sharded or gathered
        self._slots.update((str(n), leaf) for n, leaf in enumerate(self._leaves))
        self._wholes = list[Any]()
        module.load_state_dict({}, strict=False)  # lets torch use the memory of the leaves
        self._gathered = self._leaf_states()
        self._at_step: Any = None
        self._token: Tensor | None = None
        self._torch_before_backward: Callable[[Tensor | None], Any] | None = None
        self._entered = set[str]()  # the units that the running backward has reached
        passes.on_end.append(self._end_backward)
        for leaf, name in zip(self._leaves, self._names, strict=True):
            passes.units[id(leaf)] = leaf, name
            leaf.__dict__[RECEIVER] = partial(passes.add_rows, leaf)

    def select(self, leaves: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Return the parameters that this proxy can gather for the next forward."""
        if self.cast_to is not None and not is_autocast(self._device, self.cast_to):
            return []
        return [leaf for leaf in leaves if id(leaf) in self._numbers and rows_of(leaf).dtype == self._dtype]

    # --- gathered memory ---

    @property
    def _is_gathered(self) -> bool:
        return self._slots["0"] is not self._leaves[0]

    def _leaf_states(self) -> list[tuple[int, tuple[int, int], bool]]:
        """Return keys that change with the memory, values and requires_grad of the leaves."""
        with without_torch_function():
            return [(rows_of(p).data_ptr(), version_key(p), p.requires_grad) for p in self._leaves]

    def begin_step(self) -> None:
        """Begin a step: torch's streams wait for all earlier changes of the leaves."""
        self._at_step, self._token = self._leaf_states(), None

    def free(self) -> None:
        """Free the gathered memory, if any."""
        self._token = None
        if self._is_gathered:
            self.module.reshard()

    def _refresh(self) -> None:
        """Make torch gather again if the leaves have changed."""
        state = self._leaf_states()
        if self._is_gathered:
            if state == self._gathered:
                return
            self.free()
        if any((now[0], now[1][1]) != (then[0], then[1][1]) for now, then in zip(state, self._gathered, strict=True)):
            self.module.load_state_dict({}, strict=False)
            state = self._leaf_states()  # torch moves rows that it pads to new memory
        self._gathered = state
        if torch.is_inference_mode_enabled():  # torch's buffers must not be inference tensors
            with torch.inference_mode(False), torch.no_grad():
                self.module.unshard()
        elif self._at_step is not None and self._at_step != state:  # torch's streams have not waited for the change
            self.module.unshard()

    # --- forward ---

    def run(
        self, leaves: Sequence[ShardedTensor], inputs: Any, body: Callable[[Gathered], Any], others: Gathered
    ) -> Any:
        """Run ``body``, a unit's forward, within the proxy's, with ``leaves`` from `select` gathered, beside others."""
        numbers = self._begin(leaves)
        run_inside = partial(self._run_inside, numbers, inputs, body, others)
        token = self._token if self._has_several and torch.is_grad_enabled() and not in_backward() else None
        if token is not None and self._is_gathered:  # within another forward of this step, for autograd
            outputs, has_backward = run_inside(token), True
        else:
            outputs, has_backward = self._call_module(run_inside)
        if has_backward:  # gather again when a backward reaches one of the outputs
            before = partial(self._before_backward, numbers)
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(before)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return outputs

    def keep(self, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
        """Return copies of the gathered parameters, differentiable if gradients are enabled; free torch's memory."""
        numbers = self._begin(leaves)

        def copy(token: Tensor) -> list[Tensor]:
            self._wholes = [*self._slots.values()]
            return [gathered.whole for gathered in self._as_seen(numbers, token, copies=True).values()]

        wholes, has_backward = self._call_module(copy)
        if has_backward:
            self.module.set_unshard_in_backward(False)  # the copies suffice
        self.free()
        return wholes  # type: ignore[no-any-return]  # as `copy` returns it

    def _begin(self, leaves: Sequence[ShardedTensor]) -> list[int]:
        """Begin a forward with some of the parameters, and return their numbers."""
        numbers = [self._numbers[id(leaf)] for leaf in leaves]
        self._passes.recover()
        self._passes.record(self._names[numbers[0]])
        self._refresh()
        return numbers

    def _call_module(self, body: Callable[[Tensor], Any]) -> tuple[Any, bool]:
        """Run ``body`` with a token within torch's hooks; return its result, and whether torch expects a backward."""
        token = torch.empty(0, device=self._device, requires_grad=torch.is_grad_enabled())
        output, result = run_within(self.module, token, body)
        has_backward = output is not None and output.hook is not None  # not while activations are recomputed
        if has_backward:
            self._torch_before_backward = output.hook
        return result, has_backward

    def _run_inside(
        self, numbers: Sequence[int], inputs: Any, body: Callable[[Gathered], Any], others: Gathered, token: Tensor
    ) -> Any:
        self._wholes, copies = [*self._slots.values()], False
        storages = [local_tensor(self._wholes[n]).untyped_storage() for n in numbers]
        before = [*map(storage_uses, storages)]
        if torch.is_grad_enabled():
            self._token, copies = token, uses_other_hooks()  # whose saved tensors may outlive torch's memory
            if not all(whole.requires_grad for whole in self._wholes):  # torch frees frozen ones late
                tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
                if tensors and not any(tensor.is_leaf for tensor in tensors):
                    register_multi_grad_hook(tensors, lambda _: self.free())
        seen = self._as_seen(numbers, token, copies=copies)
        references = [ref(gathered.whole) for gathered in seen.values()]
        outputs = body(others | seen)
        del seen  # so that nothing uses the memory any more
        for release in (lambda: None, partial(copy_memory, references), gc.collect):
            release()
            if not any(now > then for now, then in zip(map(storage_uses, storages), before, strict=True)):
                break
        else:
            refuse(self._names[numbers[0]], "keeps a view of a parameter when its forward is done")
        if not all(storage.resizable() for storage in storages):
            refuse(self._names[numbers[0]], "makes an array of NumPy of a parameter's memory")
        return outputs

    def _as_seen(self, numbers: Sequence[int], token: Tensor, *, copies: bool) -> Gathered:
        """Return gathered parameters for a forward, differentiable if gradients are enabled."""
        own = [self._wholes[n] for n in numbers]
        memories = [local_tensor(whole).data for whole in own]  # no views, so that they may be changed
        wholes = [self._items[n].wrap(m.clone() if copies else m) for n, m in zip(numbers, memories, strict=True)]
        exposed: Sequence[Tensor] = wholes
        if self.cast_to is not None:
            exposed = [torch.empty((), dtype=self._dtype, device=p.device).expand(p.shape) for p in own]
            for parameter in own:
                parameter.grad_dtype = self._dtype  # not that of autocast
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in own):
            if not all(parameter.requires_grad for parameter in self._wholes):
                token = token.detach().requires_grad_()  # a backward may need frozen ones after the others
            complete = partial(self._complete, numbers, copies)
            exposed = _Expose.apply(complete, exposed, token, *own)  # type: ignore[no-untyped-call]  # torch's
        seen = Gathered()
        for n, whole, history in zip(numbers, wholes, exposed, strict=True):
            leaf, regather = self._leaves[n], partial(self._memory, n)
            if self.cast_to is not None:
                seen[id(leaf)] = GatheredByFSDP(whole, regather, CastWeight(whole, history, version_key(leaf)))
            else:
                seen[id(leaf)] = GatheredByFSDP(as_gathered(history, leaf), regather, None)
        return seen

    # --- backward ---

    def _before_backward(self, numbers: Sequence[int], gradient: Tensor | None, *, gathers: bool = True) -> None:
        """Gather again, when a backward reaches an output or needs the memory of a parameter, if it ``gathers`` any."""
        refuse_batched(gradient)
        assert self._torch_before_backward is not None
        self.module.set_unshard_in_backward(gathers)
        with without_torch_function():
            self._torch_before_backward(gradient)
        self._passes.begin_backward()
        if (name := self._names[numbers[0]]) not in self._entered:
            self._entered.add(name)
            self._passes.record(f"the backward of {name}")
        if gathers and not self._is_gathered:  # this backward has gone through the unit before
            self.module.unshard()

    def _memory(self, number: int) -> Tensor:
        if not self._is_gathered:
            self._before_backward((number,), None)
        memory: Tensor = self._wholes[number].detach()
        return memory.clone() if torch.is_grad_enabled() else memory  # a graph of second derivatives keeps it

    def _end_backward(self, failed: bool) -> None:
        """End the step of this proxy: the next forward gathers again. If it failed, discard unreduced gradients."""
        self._token = None
        self._entered.clear()
        for whole in self._wholes if failed else ():
            whole.grad = None

    def _complete(self, numbers: Sequence[int], copies: bool, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Return the gradients for torch to reduce, in a backward; zeros for a missing one, which others may have."""
        if torch.is_grad_enabled():
            refuse(self._names[numbers[0]], "has parameters whose gradients are differentiated (create_graph=True)")
        for gradient in gradients:
            refuse_sparse(gradient)
            refuse_batched(gradient)
        if self._names[numbers[0]] not in self._entered:  # the backward came through no output of the unit
            self._before_backward(numbers, None, gathers=not copies)
        backward, completed = self._passes.begin_backward(), list[Tensor | None]()
        for n, gradient in zip(numbers, gradients, strict=True):
            whole = self._wholes[n].requires_grad_(self._leaves[n].requires_grad)  # a later forward may have changed it
            if not whole.requires_grad:
                gradient = None
            elif gradient is None:
                backward.filled.setdefault(id(self._leaves[n]), self._leaves[n].grad is not None)
                gradient = torch.full_like(whole, -0.0, dtype=self._dtype)  # -0.0 + x has the bits of x
            else:
                backward.used.add(id(self._leaves[n]))
                if self._items[n].partial is not None:
                    gradient = gradient.clone()
                    dist.all_reduce(gradient, group=self._items[n].partial)
            completed.append(gradient)
        return completed


class _Expose(torch.autograd.Function):
    """Returns tensors over the memory of torch's gathered parameters, or copies, or tensors without memory."""

    @staticmethod
    def forward(ctx: Any, complete: Any, exposed: Sequence[Tensor], token: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.complete = complete
        setattr(ctx, GATHERED, True)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, p in zip(exposed, own, strict=True) if not p.requires_grad))
        return tuple(exposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.complete([gradient_or_none(gradient) for gradient in gradients])


# ── proxy modules, and their collectives on CPUs ──────────────────────────────────────────────────────────────────────


def run_within(module: nn.Module, token: Tensor | None, body: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run ``body(token)`` in the forward of a `ProxyModule`; return the module's output, and the result.

    torch's hooks see neither the result nor an exception.
    """
    results, errors = list[Any](), list[BaseException]()

    def run(argument: Any) -> None:
        try:
            with with_torch_function():
                results.append(body(argument))
        except BaseException as error:
            errors.append(error)

    try:
        with without_torch_function():
            output = module(token, run)
    except RuntimeError:
        if not errors:  # which may have caused it
            raise
    if errors:
        raise errors.pop()  # its traceback has this frame: what that held would live until a collection of garbage
    return output, results.pop()


class ProxyModule(nn.Module):
    """A module of ``fully_shard``, with parameters, or, as the root, with proxies; the root's forward has no token."""

    def __init__(self, parameters: Sequence[nn.Parameter] = (), proxies: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.proxies = nn.ModuleList(proxies)
        for n, parameter in enumerate(parameters):
            self.register_parameter(str(n), parameter)

    def forward(self, token: Tensor | None, run: Callable[[Any], None]) -> Any:
        run(token)
        if token is None or not torch.is_grad_enabled():
            return None
        output = torch.empty(0, device=token.device, requires_grad=True)
        output.__class__ = _Output  # as_subclass returns a view, and torch warns about hooks on views
        return output


class _Output(Tensor):
    """The output of a proxy module; it keeps the hook that torch registers for the backward."""

    hook: Callable[[Tensor], Any] | None = None

    def register_hook(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook


@dataclass(frozen=True)
class _Announced:
    """The collectives of a proxy on CPUs, for ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

    Ranks announce one that differs from the previous step's: gloo aborts, or mixes memory, if they enter different
    ones. On other devices torch's own collectives run, and the ranks compare after each backward.
    """

    peers: Peers
    units: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *, op: Any = None, **options: Any
    ) -> None:
        if op is None:
            self.peers.enter(self.units)
            work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
            wait_for(work, self.units, self.peers.ranks)
            return
        purpose = f"the gradients of {self.units}"
        self.peers.enter(f"{purpose}, {input_tensor.numel()} elements")
        # gloo's reduce_scatter does the same, but can't be waited for with a timeout
        wait_for(dist.all_reduce(input_tensor, group=group, async_op=True), purpose, self.peers.ranks)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
