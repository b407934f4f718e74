"""Proxy modules through which torch's ``fully_shard`` gathers the parameters of units.

``fully_shard`` changes the class and the parameters of a module. The user's modules must stay as they are, so it is
applied to proxies: a *proxy* registers the parameters of a unit, and runs the unit's forward within its own. Torch's
hooks on the proxy gather, free and prefetch; the unit's modules get tensors over the gathered memory.

1. Before the forward of a proxy, torch gathers; after it, torch frees.
2. Before the backward, torch gathers again, and prefetches the previous unit. It registers a hook for that on the
   outputs of the forward. The proxy returns an object that keeps the hook; the proxy calls it when a backward reaches
   an output of the unit, or unpacks a parameter whose memory is freed.
3. When the gradients are complete, torch frees the parameters, and reduces and accumulates the gradients, in a node
   that it inserts before the inputs of the forward. The proxy's input is an empty tensor, the token, on which the whole
   parameters depend, so that this node runs after the nodes of all parameters.

User code that torch's engine would run differently from a single process is refused; it runs in modules that
``FSDP(ignored=…)`` leaves whole.
"""

from __future__ import annotations

import gc
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import after_backward, in_backward
from lightning_shardckpt.compat.torch_modules import parameter_slots
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    keep_version,
    set_accumulation_hooks,
    storage_uses,
    tree_leaves,
    with_hooks,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.gathered_parameters import values_of, views_of
from lightning_shardckpt.parallel.sharding.proxy_modules import (
    AnnouncedGather,
    AnnouncedReduction,
    Call,
    ProxyModule,
    ProxyRoot,
)
from lightning_shardckpt.parallel.tensors.gather import (
    GATHERED,
    RECEIVER,
    REMEDY,
    GatherItem,
    gradient_or_none,
    refuse_batched,
    refuse_sparse,
)
from lightning_shardckpt.parallel.tensors.gathered_weights import is_autocast, uses_other_hooks, version_key
from lightning_shardckpt.parallel.tensors.placement import Peers
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor, new_like


class GatheredByFSDP(NamedTuple):
    """A parameter that ``fully_shard`` has gathered.

    Attributes:
        whole: the tensor for the forward.
        regather: returns the memory for a backward, gathered again if it was freed.
        history: the tensor of `CastWeight` if the parameter is gathered in the dtype of autocast, else None.
    """

    whole: Tensor
    regather: Callable[[], Tensor]
    history: Tensor | None = None


class PlannedUnit(NamedTuple):
    """The parameters of a unit that torch's engine gathers.

    Attributes:
        name: the name of the unit, for messages.
        leaves: sharded parameters.
        reshard: whether to free them between forward and backward.
        is_rest: True if torch may gather them together with other units' parameters, at the first forward of a step.
        cast: the ids of parameters that only linear layers and convolutions use, so that autocast casts them.
        shared: the ids of parameters that other modules have, too (ties); torch gathers them once for all of these.
    """

    name: str
    leaves: Sequence[ShardedTensor]
    reshard: bool
    is_rest: bool = False
    cast: Collection[int] = ()
    shared: Collection[int] = ()


_SMALL = 1 / 16
"""The largest share of a unit that torch gathers together with other units' and keeps until the backward ends."""
Gathered = dict[int, GatheredByFSDP]
"""Gathered parameters, by the ids of the sharded ones."""


class Engine:
    """The proxies of one module, and the root module of ``fully_shard`` around them.

    Args:
        mesh: the mesh that parameters are sharded over; two axes for HSDP.
        device: where parameters are gathered.
        peers: the ranks of each axis of ``mesh`` with more than one, the shard axis first.
        offload: whether the shards are in CPU memory.
        reduce_dtype: the dtype in which gradients are reduced; None for the dtype of the parameters.
        autocast_dtype: the dtype of autocast in steps; None without autocast.
        plan: returns the units; called once, before the first forward.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        peers: Sequence[Peers],
        *,
        offload: bool,
        reduce_dtype: torch.dtype | None,
        autocast_dtype: torch.dtype | None,
        plan: Callable[[], Sequence[PlannedUnit]],
    ) -> None:
        self.mesh, self.device, self.peers, self._plan = mesh, device, peers, plan
        self.offload_policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
        self.reduce_dtype, self._autocast_dtype = reduce_dtype, autocast_dtype
        self._proxies, self._by_unit = list[FSDPProxy](), defaultdict[str, list[FSDPProxy]](list)
        self._root: Any = None
        self._is_in_backward = False
        self._trail_hash, self._last_entry = 0, ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    def proxies_of(self, unit: str) -> Sequence[FSDPProxy]:
        """Return the proxies that gather the parameters of a unit, by its name."""
        self._prepare()
        return self._by_unit.get(unit, ())

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step within the root module, so that torch's streams wait for earlier work once, not for each unit."""
        self._prepare()
        self.recover()
        for proxy in self._proxies:
            proxy.begin_step()
        call = Call(lambda _: step())
        self._root(call)
        if not torch.is_grad_enabled():  # there is no backward that frees them
            for proxy in self._proxies:
                proxy.free()
        result = call.result()
        if not torch.is_grad_enabled():  # replicas may run other numbers of steps
            self._compare_trails(0, self.peers[:1])
        return result

    def _prepare(self) -> None:
        """Create the proxies and the root module; called when the parameters have memory."""
        if self._root is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            together = defaultdict[Any, list[tuple[str, ShardedTensor]]](list)
            for unit in self._plan():
                for (dtype, cast_to, is_shared), leaves in self._group_alike(unit).items():
                    few = sum(p.numel() for p in leaves) <= _SMALL * sum(p.numel() for p in unit.leaves)  # as of norms
                    is_rest = is_shared or unit.is_rest or (unit.reshard and few)
                    key = (None, False, dtype, cast_to) if is_rest else (unit.name, unit.reshard, dtype, cast_to)
                    together[key] += [(unit.name, leaf) for leaf in leaves]
            for (_, reshard, _, cast_to), named in together.items():
                proxy = FSDPProxy(self, named, reshard=reshard, cast_to=cast_to)
                self._proxies.append(proxy)
                for name in dict.fromkeys(name for name, _ in named):
                    self._by_unit[name].append(proxy)
            del self._plan
            self._root = fully_shard(ProxyRoot(proxy.module for proxy in self._proxies), mesh=self.mesh)
            self._root(Call(lambda _: None))  # the first forward makes it the root

    def _group_alike(
        self, unit: PlannedUnit
    ) -> dict[tuple[torch.dtype, torch.dtype | None, bool], list[ShardedTensor]]:
        """Return the parameters of a unit by dtype, the dtype in which they are gathered instead, and if shared."""
        groups = defaultdict[tuple[torch.dtype, torch.dtype | None, bool], list[ShardedTensor]](list)
        for leaf in unit.leaves:
            is_cast = leaf.dtype == torch.float32 and id(leaf) in unit.cast
            groups[leaf.dtype, self._autocast_dtype if is_cast else None, id(leaf) in unit.shared].append(leaf)
        return groups

    # --- backward ---

    def record(self, entry: str) -> None:
        """Record a forward or backward of a unit, which the ranks compare after the backward."""
        self._trail_hash, self._last_entry = zlib.crc32(entry.encode(), self._trail_hash), entry

    def begin_backward(self) -> None:
        """Begin a backward, if none is running."""
        if self._is_in_backward:
            return
        self._is_in_backward = True
        for proxy in self._proxies:
            proxy.begin_backward()
        after_backward(lambda: after_backward(self._end_backward))  # torch may queue its own end later

    def _end_backward(self) -> None:
        """Compare the units that the ranks ran, remove gradients that no rank has computed, and call hooks.

        Collective: every rank of the mesh must call it, after every backward.
        """
        for proxy in self._proxies:
            proxy.end_backward()
            proxy.refuse_late_hooks()
        flags = [(leaf, is_used) for proxy in self._proxies for leaf, is_used in proxy.list_used()]
        if self._compare_trails(sum(not is_used for _, is_used in flags), self.peers):
            used = torch.tensor([is_used for _, is_used in flags], dtype=torch.uint8)
            for peers in self.peers:
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=peers.reads)
            for (leaf, _), is_used in zip(flags, used.tolist(), strict=True):
                if not is_used:
                    leaf.grad = None
        hooked = [item for proxy in reversed(self._proxies) for item in proxy.restore_gradients()]
        self._is_in_backward = False
        with torch.no_grad():
            for leaf, before in hooked:
                _call_gradient_hooks(leaf, before)
            for leaf, _ in hooked:
                for hook in list((accumulation_hooks(leaf) or {}).values()):
                    hook(leaf)

    def _compare_trails(self, unused: float, axes: Sequence[Peers]) -> float:
        """Compare the recorded units of the ranks of ``axes``; return the maximum of ``unused``. Collective."""
        done, before = self._last_entry, self._trail_hash
        self._trail_hash, self._last_entry = 0, ""
        for peers in axes:
            unused = max(numbers[0] for numbers in peers.compare(done, float(unused), before=before))
        self.peers[0].end_step(is_alike=True)
        return unused

    def recover(self) -> None:
        """Discard the state of a backward that raised an error."""
        if self._is_in_backward and not in_backward():
            self._is_in_backward, self._trail_hash, self._last_entry = False, 0, ""
            self.peers[0].end_step(is_alike=False)
            self._root.reset_iter_state()
            for proxy in self._proxies:
                proxy.end_backward(failed=True)
                for leaf, before in proxy.restore_gradients():
                    _add_gradient(leaf, before)


class FSDPProxy:
    """Sharded parameters of one dtype that torch gathers together, for the forward of one unit or of several.

    Parameters of several units are gathered at the first forward of a step, and kept until the end of the backward. All
    forwards of the step then depend on the token of the first one, so that torch reduces all gradients together.

    Args:
        engine: the engine of the module.
        named: the parameters, each with the name of its unit.
        reshard: whether to free them between forward and backward.
        cast_to: the dtype of autocast to gather in; None for the dtype of the parameters.
    """

    def __init__(
        self,
        engine: Engine,
        named: Sequence[tuple[str, ShardedTensor]],
        *,
        reshard: bool,
        cast_to: torch.dtype | None,
    ) -> None:
        self._engine, self._cast_to = engine, cast_to
        units, names = list(dict.fromkeys(name for name, _ in named)), dict[int, str]()
        for name, leaf in named:
            names.setdefault(id(leaf), name)  # the first of several units
        self._leaves = list({id(leaf): leaf for _, leaf in named}.values())
        self._names = [names[id(leaf)] for leaf in self._leaves]
        self._has_several = len(units) > 1
        self._token: Tensor | None = None
        self._numbers = {id(leaf): n for n, leaf in enumerate(self._leaves)}
        self._items = [GatherItem.of(leaf) for leaf in self._leaves]
        self._dtype = self._leaves[0].dtype
        parameters = [
            nn.Parameter(
                item.wrap(torch.empty(item.shape, dtype=leaf.dtype, device="meta")), requires_grad=leaf.requires_grad
            )
            for leaf, item in zip(self._leaves, self._items, strict=True)
        ]
        module: Any = ProxyModule(parameters)
        fully_shard(
            module,
            mesh=engine.mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=cast_to,
                reduce_dtype=engine.reduce_dtype or self._dtype,
                cast_forward_inputs=False,
            ),
            offload_policy=engine.offload_policy,
        )
        if engine.device.type == "cpu":
            module.set_custom_all_gather(AnnouncedGather(engine.peers[0], ", ".join(units)))
            module.set_custom_reduce_scatter(AnnouncedReduction(engine.peers[0], ", ".join(units)))
        self.module = module
        slots: Any = parameter_slots(module)
        self._slots: dict[str, Any] = slots
        self._slots.update((str(n), leaf) for n, leaf in enumerate(self._leaves))
        self._wholes = list[Any]()
        self._take_shards()
        self._gathered = self._leaf_states()
        self._at_step: Any = None
        self._torch_before_backward: Callable[[Tensor | None], Any] | None = None
        self._entered = set[str]()  # the units that the running backward has reached
        self._direct = dict[int, Tensor]()
        self._aside = list[tuple[int, Tensor | None, dict[int, Any] | None]]()
        self._had, self._used, self._filled = list[bool](), list[bool](), list[bool]()
        for n, leaf in enumerate(self._leaves):
            leaf.__dict__[RECEIVER] = partial(self._receive, n)

    @property
    def is_cast(self) -> bool:
        """Whether it gathers in the dtype of autocast."""
        return self._cast_to is not None

    def select(self, leaves: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Return the parameters that this proxy can gather for the next forward."""
        if self._cast_to is not None and not is_autocast(self._engine.device, self._cast_to):
            return []
        return [leaf for leaf in leaves if id(leaf) in self._numbers and local_tensor(leaf).dtype == self._dtype]

    # --- gathered memory ---

    @property
    def _is_gathered(self) -> bool:
        return self._slots["0"] is not self._leaves[0]

    def _take_shards(self) -> None:
        """Let torch use the memory of the leaves, as after a load of a state dict."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            self.module.load_state_dict({}, strict=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def _leaf_states(self) -> list[tuple[int, tuple[int, int], bool]]:
        """Return keys that change with the memory, values and requires_grad of the leaves."""
        with without_torch_function():
            return [
                (local_tensor(leaf).untyped_storage().data_ptr(), version_key(leaf), leaf.requires_grad)
                for leaf in self._leaves
            ]

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
            self._take_shards()
            state = self._leaf_states()  # torch moves rows that it pads to new memory
        self._gathered = state
        if torch.is_inference_mode_enabled():  # torch's buffers must not be inference tensors
            with torch.inference_mode(False), torch.no_grad():
                self.module.unshard()
        elif self._at_step is not None and self._at_step != state:  # torch's streams have not waited for the change
            self.module.unshard()

    # --- forward ---

    def run(self, leaves: Sequence[ShardedTensor], inputs: Any, body: Callable[[Gathered], Any]) -> Any:
        """Run ``body``, a unit's forward, within the proxy's, with ``leaves`` from `select` gathered."""
        numbers = self._begin(leaves)
        is_gathered = self._token is not None and self._is_gathered  # a forward within another may have freed it
        if self._has_several and is_gathered and torch.is_grad_enabled() and not in_backward():
            assert self._token is not None
            outputs = self._run_inside(numbers, inputs, body, self._token)  # of another forward of this step
            self._register_backward(numbers, outputs)
            return outputs
        call = Call(partial(self._run_inside, numbers, inputs, body))
        token = torch.empty(0, device=self._engine.device, requires_grad=torch.is_grad_enabled())
        try:
            with without_torch_function():  # for torch's hooks; `call` enables it for the forward
                output = self.module(token, call)
        except RuntimeError:
            call.result()  # raises the forward's exception, which may have caused torch's
            raise
        outputs = call.result()
        if output is not None and output.hook is not None:  # no hook while activations are recomputed
            self._torch_before_backward = output.hook
            self._register_backward(numbers, outputs)
        return outputs

    def _begin(self, leaves: Sequence[ShardedTensor]) -> list[int]:
        """Begin a forward with some of the parameters, and return their numbers."""
        numbers = [self._numbers[id(leaf)] for leaf in leaves]
        self._engine.recover()
        self._engine.record(self._names[numbers[0]])
        self._refresh()
        return numbers

    def _register_backward(self, numbers: Sequence[int], outputs: Any) -> None:
        """Gather again when a backward reaches one of the outputs."""
        before = partial(self._before_backward, numbers)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(before)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def keep(self, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
        """Return copies of the gathered parameters, differentiable if gradients are enabled.

        Torch's memory is freed at once, and not gathered again for the backward.
        """
        numbers = self._begin(leaves)
        call = Call(partial(self._copy_gathered, numbers))
        output = self.module(torch.empty(0, device=self._engine.device, requires_grad=torch.is_grad_enabled()), call)
        wholes: list[Tensor] = call.result()
        if output is not None and output.hook is not None:
            self._torch_before_backward = output.hook
            self.module.set_unshard_in_backward(False)
        self.free()
        return wholes

    def _copy_gathered(self, numbers: Sequence[int], token: Tensor) -> list[Tensor]:
        self._wholes = [self._slots[str(n)] for n in range(len(self._leaves))]
        return list(self._as_seen(numbers, token, copies=True)[0])

    def _run_inside(self, numbers: Sequence[int], inputs: Any, body: Callable[[Gathered], Any], token: Tensor) -> Any:
        if torch.is_grad_enabled():
            self._token = token
        self._wholes = [self._slots[str(n)] for n in range(len(self._leaves))]
        copies = torch.is_grad_enabled() and uses_other_hooks()  # whose saved tensors may outlive torch's memory
        before = self._count_uses(numbers)
        wholes, histories = self._as_seen(numbers, token, copies=copies)
        if torch.is_grad_enabled():
            self._free_before(inputs)
        gathered = {
            id(self._leaves[n]): GatheredByFSDP(whole, partial(self._memory, n), history)
            for n, whole, history in zip(numbers, wholes, histories, strict=True)
        }
        references = [ref(whole) for whole in wholes]
        del wholes, histories
        outputs = body(gathered)
        del gathered
        if self._has_more_uses(numbers, before):
            _copy_memory(references)
            if self._has_more_uses(numbers, before):
                gc.collect()
                if self._has_more_uses(numbers, before):
                    self._refuse(numbers[0], "keeps a view of a parameter when its forward is done")
        if any(not local_tensor(self._wholes[n]).untyped_storage().resizable() for n in numbers):
            self._refuse(numbers[0], "makes an array of NumPy of a parameter's memory")
        return outputs

    def _as_seen(
        self, numbers: Sequence[int], token: Tensor, *, copies: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return gathered parameters for a forward, differentiable if gradients are enabled, and their histories.

        Only parameters in the dtype of autocast have histories; their gradients keep the dtype of the parameters.
        """
        gathered = [self._wholes[n] for n in numbers]
        if self.is_cast:
            for whole in gathered:
                whole.grad_dtype = self._dtype
        if not torch.is_grad_enabled() or not any(whole.requires_grad for whole in gathered):
            wholes = [self._share(n, whole, copies=copies) for n, whole in zip(numbers, gathered, strict=True)]
            return wholes, [self._without_memory(n) if self.is_cast else None for n in numbers]
        if any(not whole.requires_grad for whole in self._wholes):  # a backward may need frozen ones after the others
            token = token.detach().requires_grad_()
        outputs: tuple[Tensor, ...] = _Expose.apply(self, tuple(numbers), copies, token, *gathered)  # type: ignore[no-untyped-call]
        if not self.is_cast:
            return outputs, [None] * len(outputs)
        return [self._share(n, whole, copies=copies) for n, whole in zip(numbers, gathered, strict=True)], outputs

    def _without_memory(self, number: int) -> Tensor:
        return torch.empty((), dtype=self._dtype, device=self._engine.device).expand(self._items[number].shape)

    def _share(self, number: int, whole: Tensor, *, copies: bool) -> Tensor:
        """Return a new tensor over torch's memory, or a copy."""
        memory = local_tensor(whole).data  # no view, so that it may be changed in place; has its own version
        return self._items[number].wrap(memory.clone() if copies else memory)

    def _count_uses(self, numbers: Sequence[int]) -> list[int]:
        return [storage_uses(local_tensor(self._wholes[n])) for n in numbers]

    def _has_more_uses(self, numbers: Sequence[int], before: Sequence[int]) -> bool:
        """Return whether more tensors than before use the memory of a parameter."""
        return any(now > then for now, then in zip(self._count_uses(numbers), before, strict=True))

    def _free_before(self, inputs: Any) -> None:
        """Free frozen parameters when a backward has the gradients of the inputs; torch would at its end."""
        if all(whole.requires_grad for whole in self._wholes):
            return
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
        if tensors and not any(tensor.is_leaf for tensor in tensors):
            register_multi_grad_hook(tensors, lambda _: self.free())

    # --- backward ---

    def _before_backward(self, numbers: Sequence[int], gradient: Tensor | None, *, gathers: bool = True) -> None:
        """Gather again, when a backward reaches an output or needs the memory of a parameter, if it ``gathers`` any.

        Args:
            gradient: of the output; None if only other outputs of its node have one.
        """
        if gradient is not None:
            refuse_batched(gradient)
        assert self._torch_before_backward is not None
        self.module.set_unshard_in_backward(gathers)
        with without_torch_function():
            self._torch_before_backward(gradient)
        self._engine.begin_backward()
        if (name := self._names[numbers[0]]) not in self._entered:
            self._entered.add(name)
            self._engine.record(f"the backward of {name}")
        if gathers and not self._is_gathered:  # this backward has gone through the unit before
            self.module.unshard()

    def _memory(self, number: int) -> Tensor:
        if not self._is_gathered:
            self._before_backward((number,), None)
        memory: Tensor = self._wholes[number].detach()
        return memory.clone() if torch.is_grad_enabled() else memory  # a graph of second derivatives keeps it

    def begin_backward(self) -> None:
        """Begin a backward: hooks of parameters must get its reduced gradient, so set the earlier ones aside."""
        self._used, self._filled = [False] * len(self._leaves), [False] * len(self._leaves)
        self._entered.clear()
        for leaf in with_hooks(self._leaves):
            self._aside.append((self._numbers[id(leaf)], leaf.grad, hooks := accumulation_hooks(leaf)))
            leaf.grad = None
            if hooks:
                set_accumulation_hooks(leaf, OrderedDict())  # torch would call them after each of several reductions
        self._had = [leaf.grad is not None for leaf in self._leaves]

    def end_backward(self, *, failed: bool = False) -> None:
        """End the step of this proxy: the next forward gathers again. If it failed, discard unreduced gradients."""
        self._token = None
        self._entered.clear()
        for whole in self._wholes if failed else ():
            whole.grad = None

    def complete(
        self, numbers: Sequence[int], gradients: Sequence[Tensor | None], *, copies: bool
    ) -> list[Tensor | None]:
        """Return the gradients for torch to reduce; a missing one is filled with zeros, as other ranks may have it.

        Called in a backward, for each forward of the unit. ``copies``: whether the forward got copies.
        """
        if torch.is_grad_enabled():
            self._refuse(numbers[0], "has parameters whose gradients are differentiated (create_graph=True)")
        for gradient in gradients:
            refuse_sparse(gradient)
            if gradient is not None:
                refuse_batched(gradient)
        if self._names[numbers[0]] not in self._entered:  # the backward came through no output of the unit
            self._before_backward(numbers, None, gathers=not copies)
        completed = list[Tensor | None]()
        for n, gradient in zip(numbers, gradients, strict=True):
            whole = self._wholes[n].requires_grad_(self._leaves[n].requires_grad)  # a later forward may have changed it
            if not whole.requires_grad:
                completed.append(None)
                continue
            self._used[n] |= gradient is not None
            self._filled[n] |= gradient is None
            if gradient is None:
                gradient = torch.full_like(whole, -0.0, dtype=self._dtype)  # -0.0 + x has the bits of x
            elif self._items[n].partial is not None:
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=self._items[n].partial)
            completed.append(gradient)
        return completed

    def list_used(self) -> list[tuple[ShardedTensor, bool]]:
        """Return each parameter, and whether it had a gradient before this backward, or got one on this rank."""
        return [
            (leaf, had or used or not filled)
            for leaf, had, used, filled in zip(self._leaves, self._had, self._used, self._filled, strict=True)
        ]

    def _receive(self, number: int, reduced: DTensor | None) -> None:
        """Take the reduced gradient of a use outside of units; None if no rank has one. Called in a backward."""
        self._engine.begin_backward()
        if reduced is not None:
            rows, before = local_tensor(reduced), self._direct.get(number)
            self._direct[number] = rows if before is None else before.add_(rows)
            self._used[number] = True  # on all ranks

    def refuse_late_hooks(self) -> None:
        """Raise if a parameter got a hook in the backward, which torch has called for a part of the gradient or not."""
        aside = {id(self._leaves[n]) for n, _, _ in self._aside}
        for leaf in with_hooks(self._leaves):
            if id(leaf) not in aside or accumulation_hooks(leaf):
                self._refuse(self._numbers[id(leaf)], "has a parameter that got a hook in a backward")

    def restore_gradients(self) -> Iterator[tuple[ShardedTensor, Tensor | None]]:
        """Complete the gradients of a backward.

        Yields:
            The parameters with hooks that have got a gradient, and the earlier gradients, which are not added yet.
        """
        aside, self._aside = self._aside, []
        direct, self._direct = self._direct, {}
        for n, rows in direct.items():
            _add_gradient(self._leaves[n], new_like(self._leaves[n], rows))
        for n, before, after in reversed(aside):
            leaf = self._leaves[n]
            if after:
                set_accumulation_hooks(leaf, after)
            if leaf.grad is None:
                leaf.grad = before
            else:
                yield leaf, before

    def _refuse(self, number: int, what: str) -> None:
        name = self._names[number]
        where = f"the module {name}" if name else "the module"
        raise UnsupportedCodeError(f"{where} {what}, which fully_shard cannot follow. {REMEDY}")


def _copy_memory(references: Sequence[ref[Tensor]]) -> None:
    """Move gathered parameters that outlive a forward, and their detached views, to new memory."""
    with torch.no_grad(), without_torch_function():
        for whole in [whole for reference in references if (whole := reference()) is not None]:
            shared = local_tensor(values_of(whole))
            memory = shared.clone().untyped_storage()
            views = [view for reference in views_of(whole) if (view := reference()) is not None]
            for tensor in (local_tensor(whole), *views):
                if tensor.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr():
                    with keep_version(tensor):
                        tensor.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _add_gradient(leaf: ShardedTensor, gradient: Tensor | None) -> None:
    """Add a gradient to the one that a leaf has, whose memory it keeps."""
    if leaf.grad is None:
        leaf.grad = gradient
    elif gradient is not None:
        with torch.no_grad():
            local_tensor(leaf.grad).add_(local_tensor(gradient))


def _call_gradient_hooks(leaf: ShardedTensor, before: Tensor | None) -> None:
    """Call the hooks of a leaf with the gradient that a backward has reduced, and add the result to an earlier one."""
    gradient: Any = leaf.grad
    for hook in list((gradient_hooks(leaf) or {}).values()):
        new = hook(gradient)
        gradient = gradient if new is None else new
    leaf.grad = before
    _add_gradient(leaf, gradient)


class _Expose(torch.autograd.Function):
    """Returns tensors over the memory of torch's gathered parameters, or copies, or tensors without memory."""

    @staticmethod
    def forward(
        ctx: Any, proxy: FSDPProxy, numbers: tuple[int, ...], copies: bool, token: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.proxy, ctx.numbers, ctx.copies = proxy, numbers, copies
        setattr(ctx, GATHERED, True)
        ctx.set_materialize_grads(False)
        if proxy.is_cast:
            wholes = [proxy._without_memory(n) for n in numbers]
        else:
            wholes = [proxy._share(n, p, copies=copies) for n, p in zip(numbers, parameters, strict=True)]
        frozen = [whole for whole, p in zip(wholes, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        own = [gradient_or_none(gradient) for gradient in gradients]
        return None, None, None, None, *ctx.proxy.complete(ctx.numbers, own, copies=ctx.copies)
