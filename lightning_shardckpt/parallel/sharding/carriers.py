"""Gather the parameters of units by torch's ``fully_shard``, while the user's modules stay as they are.

``fully_shard`` changes the class of a module, and what its parameters are. So it is given modules of ours: a *carrier*
registers the parameters of a unit, and runs the unit's forward inside its own. Torch's hooks on it gather, free and
prefetch; the slots of the user's modules get tensors over the same memory, as they do from every gather.

1. Before the forward of a carrier, torch gathers; after it, torch frees.
2. Before the backward of what a forward returns, torch gathers again, and prefetches the unit before. It registers a
   hook for that on the tensors that are returned. A carrier returns a stand-in that keeps the hook; it is called when a
   backward reaches an output of the unit, or asks for a parameter whose memory is freed.
3. When the gradients are complete, torch frees the parameters, reduces the gradients and adds them to those of the
   shards. It puts an operation for that after the tensors that a forward takes. A carrier takes an empty one, on which
   the whole parameters depend, so that its backward follows theirs.

What torch's engine would do otherwise than one process is refused by name; ``fsdp_engine="exact"`` does it.
"""

from __future__ import annotations

import gc
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.pytree import tree_leaves
from lightning_shardckpt.compat.torch_autograd import after_backward, in_backward
from lightning_shardckpt.compat.torch_modules import parameter_slots
from lightning_shardckpt.compat.torch_tensors import (
    keep_version,
    storage_uses,
    with_hooks,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.carrier_modules import (
    AnnouncedGather,
    AnnouncedReduction,
    Call,
    CarrierModule,
    RootOfCarriers,
)
from lightning_shardckpt.parallel.sharding.gathered_parameters import values_of, views_of
from lightning_shardckpt.parallel.tensors.autocast_weights import is_autocast
from lightning_shardckpt.parallel.tensors.derivatives import GATHERED_BY_FSDP, REMEDY
from lightning_shardckpt.parallel.tensors.gather import GatherItem, gradient_or_none, refuse_batched, refuse_sparse
from lightning_shardckpt.parallel.tensors.peers import Peers
from lightning_shardckpt.parallel.tensors.saved_parameters import uses_other_hooks, version_key
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor


class CarriedWhole(NamedTuple):
    """A whole parameter in torch's memory.

    Attributes:
        whole: as a forward is to see it.
        again: gives a backward the memory, gathered again if it was freed.
        history: of a parameter that is gathered in the dtype of autocast, see `CastWeight`; None for others.
    """

    whole: Tensor
    again: Callable[[], Tensor]
    history: Tensor | None = None


class PlannedUnit(NamedTuple):
    """The parameters of a unit that torch's engine is to gather.

    Attributes:
        name: of the unit, for messages.
        leaves: sharded parameters that no other unit has.
        reshard: whether to free them between forward and backward.
        is_rest: whether torch may gather them with those of other units, all at the first forward of a step.
        multiplied: the ids of those that only linear layers and convolutions have, of which autocast casts them.
    """

    name: str
    leaves: Sequence[ShardedTensor]
    reshard: bool
    is_rest: bool = False
    multiplied: Collection[int] = ()


Carried = dict[int, CarriedWhole]
"""Whole parameters by the ids of the sharded ones."""


class Engine:
    """The carriers of one module, and the root that torch's engine needs around them.

    Args:
        mesh: over which parameters are sharded; of two axes for HSDP.
        device: where parameters are gathered.
        peers: the ranks of each axis of ``mesh`` that has several, those that shard first.
        offload: whether the shards are in CPU memory.
        reduce_dtype: in which gradients are reduced; None for that of the parameters.
        autocast_dtype: to which autocast casts parameters in steps; None without it.
        plan: names the units; called once, before the first forward.
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
        self._carriers, self._by_unit = list[Carrier](), defaultdict[str, list[Carrier]](list)
        self._root: Any = None
        self._is_in_backward = False
        self._trail, self._last = 0, ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    def carriers_of(self, unit: str) -> Sequence[Carrier]:
        """Return what gathers the parameters of a unit, by its name."""
        self._prepare()
        return self._by_unit.get(unit, ())

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step inside the root, so that torch's streams wait for earlier work once, and not for each unit."""
        self._prepare()
        self.recover()
        for carrier in self._carriers:
            carrier.begin_step()
        call = Call(lambda _: step())
        self._root(call)
        if not torch.is_grad_enabled():  # no backward frees what they keep
            for carrier in self._carriers:
                carrier.free()
        found = call.result()
        if not torch.is_grad_enabled():
            self._compare_trails(0)
        return found

    def _prepare(self) -> None:
        """Make the carriers and the root, once the parameters have memory."""
        if self._root is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            together = defaultdict[Any, list[tuple[str, ShardedTensor]]](list)
            for unit in self._plan():
                for leaf in unit.leaves:
                    is_cast = leaf.dtype == torch.float32 and id(leaf) in unit.multiplied
                    cast_to = self._autocast_dtype if is_cast else None
                    place = None if unit.is_rest else unit.name
                    together[place, unit.reshard, leaf.dtype, cast_to].append((unit.name, leaf))
            for (_, reshard, _, cast_to), named in together.items():
                carrier = Carrier(self, named, reshard=reshard, cast_to=cast_to)
                self._carriers.append(carrier)
                for name in dict.fromkeys(name for name, _ in named):
                    self._by_unit[name].append(carrier)
            del self._plan
            self._root = fully_shard(RootOfCarriers(carrier.module for carrier in self._carriers), mesh=self.mesh)
            self._root(Call(lambda _: None))  # torch decides now which is the root

    # --- backward ---

    def note(self, what: str) -> None:
        """Note what every rank should do now."""
        self._trail, self._last = zlib.crc32(what.encode(), self._trail), what

    def begin_backward(self) -> None:
        """Begin a backward; called in it, any number of times."""
        if self._is_in_backward:
            return
        self._is_in_backward = True
        for carrier in self._carriers:
            carrier.begin_backward()
        after_backward(self._end_backward)

    def _end_backward(self) -> None:
        """Compare what the ranks did, and take away gradients that no rank has. Collective, in every backward."""
        self._is_in_backward = False
        for carrier in self._carriers:
            carrier.end_backward()
        if not self._compare_trails(sum(carrier.count_unused() for carrier in self._carriers)):
            return
        used = [is_used for carrier in self._carriers for is_used in carrier.list_used()]
        bits = torch.tensor(used, dtype=torch.uint8)
        for peers in self.peers:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=peers.reads)
        anywhere = iter(bits.tolist())
        for carrier in self._carriers:
            carrier.take_away_unused(anywhere)

    def _compare_trails(self, unused: float) -> float:
        """Compare what the ranks did; return the largest ``unused`` of a rank. Collective."""
        done, self._trail, self._last = f"{self._last}, after {self._trail:08x}", 0, ""
        for peers in self.peers:  # the second axis hears what the first one has told
            unused = max(numbers[0] for numbers in peers.compare(done, float(unused)))
        self.peers[0].end_step(is_alike=True)
        return unused

    def recover(self) -> None:
        """Forget a backward that did not finish."""
        if self._is_in_backward and not in_backward():
            self._is_in_backward, self._trail, self._last = False, 0, ""
            self.peers[0].end_step(is_alike=False)
            self._root.reset_iter_state()
            for carrier in self._carriers:
                carrier.drop_gradients()


class Carrier:
    """Sharded parameters of one dtype that torch gathers together, for the forward of a unit, or of several.

    Several are gathered at the first forward of a step, and kept until the backward is done. All forwards until then
    depend on the token of the first one, so that torch reduces their gradients together, when they are complete.

    Args:
        engine: that it is a part of.
        named: the parameters, each with the name of its unit.
        reshard: whether to free them between forward and backward.
        cast_to: the dtype of autocast, in which they are gathered; None for that of the parameters.
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
        self._names, self._leaves = [name for name, _ in named], [leaf for _, leaf in named]
        units = list(dict.fromkeys(self._names))
        self._has_several = len(units) > 1
        self._token: Tensor | None = None
        self._numbers = {id(leaf): n for n, leaf in enumerate(self._leaves)}
        self._items = [GatherItem.of(leaf) for leaf in self._leaves]
        self._dtype = self._leaves[0].dtype
        stand_ins = [
            nn.Parameter(
                item.wrap(torch.empty(item.shape, dtype=leaf.dtype, device="meta")), requires_grad=leaf.requires_grad
            )
            for leaf, item in zip(self._leaves, self._items, strict=True)
        ]
        module: Any = CarrierModule(stand_ins)
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
        self._gathered = self._state_of_leaves()
        self._at_step: Any = None
        self._torch_before_backward: Callable[[Tensor], Any] | None = None
        self._entered = set[str]()
        """The units that this backward has reached."""
        self._accumulators: dict[int, Any] = {}
        self.begin_backward()

    @property
    def is_cast(self) -> bool:
        """Whether it gathers parameters in the dtype of autocast."""
        return self._cast_to is not None

    def takes(self, leaves: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Return the parameters that torch's engine can gather here for the forward that begins."""
        if self._cast_to is not None and not is_autocast(self._engine.device, self._cast_to):
            return []
        hooked = with_hooks(leaves)  # hooks get the sum of all gradients, which torch may reduce in parts
        return [
            leaf
            for leaf in leaves
            if id(leaf) in self._numbers
            and local_tensor(leaf).dtype == self._dtype
            and not any(leaf is one for one in hooked)
        ]

    # --- what torch's engine has gathered ---

    @property
    def _is_gathered(self) -> bool:
        return self._slots["0"] is not self._leaves[0]

    def _take_shards(self) -> None:
        """Let torch take over the memory of the leaves, as it does after a state dict was loaded."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            self.module.load_state_dict({}, strict=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def _state_of_leaves(self) -> list[tuple[int, tuple[int, int], bool]]:
        """What tells whether memory, values or requires_grad changed."""
        with without_torch_function():
            return [
                (local_tensor(leaf).untyped_storage().data_ptr(), version_key(leaf), leaf.requires_grad)
                for leaf in self._leaves
            ]

    def begin_step(self) -> None:
        """Note how the leaves are when torch's streams wait for what was done to them."""
        self._at_step, self._token = self._state_of_leaves(), None

    def free(self) -> None:
        """Free whole parameters, if there are some."""
        self._token = None
        if self._is_gathered:
            self.module.reshard()

    def _refresh(self) -> None:
        """Take over what was done to the leaves since they were gathered."""
        state = self._state_of_leaves()
        if self._is_gathered:
            if state == self._gathered:
                return
            self.free()
        if any((now[0], now[1][1]) != (then[0], then[1][1]) for now, then in zip(state, self._gathered, strict=True)):
            self._take_shards()
            state = self._state_of_leaves()  # torch gives rows that it pads other memory
        self._gathered = state
        if torch.is_inference_mode_enabled():  # torch must not make its memory there
            with torch.inference_mode(False), torch.no_grad():
                self.module.unshard()
        elif self._at_step is not None and self._at_step != state:  # torch's streams have not waited for the change
            self.module.unshard()

    # --- forward ---

    def run(self, leaves: Sequence[ShardedTensor], inputs: Any, body: Callable[[Carried], Any]) -> Any:
        """Return what ``body`` does with whole parameters.

        Args:
            leaves: the parameters; `takes` said that they can be had.
            inputs: of the unit's forward.
            body: the forward.
        """
        numbers = self._begin(leaves)
        if self._has_several and self._has_token() and torch.is_grad_enabled() and not in_backward():
            assert self._token is not None
            found = self._run_inside(numbers, inputs, body, self._token)  # gathered for another forward of this step
            self._gather_before_backward(numbers, found)
            return found
        call = Call(partial(self._run_inside, numbers, inputs, body))
        device, with_history = self._engine.device, torch.is_grad_enabled()
        try:
            with without_torch_function():  # torch's hooks look at the leaves; `call` lets the forward have it
                output = self.module(torch.empty(0, device=device, requires_grad=with_history), call)
        except RuntimeError:
            call.result()  # raises what the forward raised, because of which torch may fail, too
            raise
        found = call.result()
        if output is not None and output.hook is not None:  # none where activations are computed again
            self._torch_before_backward = output.hook
            self._gather_before_backward(numbers, found)
        return found

    def _has_token(self) -> bool:
        """Return whether torch has gathered for an earlier forward of this step; a pass inside another may free it."""
        return self._token is not None and self._is_gathered

    def _begin(self, leaves: Sequence[ShardedTensor]) -> list[int]:
        """Begin a forward with some of the parameters, and return their numbers."""
        numbers = [self._numbers[id(leaf)] for leaf in leaves]
        self._engine.recover()
        self._engine.note(self._names[numbers[0]])
        self._refresh()
        return numbers

    def _gather_before_backward(self, numbers: Sequence[int], outputs: Any) -> None:
        before = partial(self._before_backward, numbers)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(before)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def keep(self, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
        """Return whole parameters in memory of their own, with history if gradients are enabled.

        Torch frees its memory at once, and does not gather again for the backward, which needs no parameters.
        """
        numbers = self._begin(leaves)
        call = Call(partial(self._copy_inside, numbers))
        output = self.module(torch.empty(0, device=self._engine.device, requires_grad=torch.is_grad_enabled()), call)
        wholes: list[Tensor] = call.result()
        if output is not None and output.hook is not None:
            self._torch_before_backward = output.hook
            self.module.set_unshard_in_backward(False)
        self.free()
        return wholes

    def _copy_inside(self, numbers: Sequence[int], token: Tensor) -> list[Tensor]:
        self._wholes = [self._slots[str(n)] for n in range(len(self._leaves))]
        return list(self._as_seen(numbers, token, copies=True)[0])

    def _run_inside(self, numbers: Sequence[int], inputs: Any, body: Callable[[Carried], Any], token: Tensor) -> Any:
        if torch.is_grad_enabled():
            self._token = token
        self._wholes = [self._slots[str(n)] for n in range(len(self._leaves))]
        copies = torch.is_grad_enabled() and uses_other_hooks()  # checkpointing may keep them for longer than torch
        uses = self._count_uses(numbers)
        wholes, histories = self._as_seen(numbers, token, copies=copies)
        if torch.is_grad_enabled():
            self._free_before(inputs)
        given = {
            id(self._leaves[n]): CarriedWhole(whole, partial(self._memory, n), history)
            for n, whole, history in zip(numbers, wholes, histories, strict=True)
        }
        seen = [ref(whole) for whole in wholes]
        del wholes, histories
        found = body(given)
        del given
        if self._has_more_uses(numbers, uses):
            _give_memory([whole for one in seen if (whole := one()) is not None])
            if self._has_more_uses(numbers, uses):
                gc.collect()
                if self._has_more_uses(numbers, uses):
                    self._refuse(numbers[0], "keeps a view of a parameter when its forward is done")
        if any(not local_tensor(self._wholes[n]).untyped_storage().resizable() for n in numbers):
            self._refuse(numbers[0], "makes an array of NumPy of a parameter's memory")
        return found

    def _as_seen(
        self, numbers: Sequence[int], token: Tensor, *, copies: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Whole parameters as a forward is to see them, with history if gradients are enabled.

        Those in another dtype, and then their histories: their gradients are in the dtype of the parameters.
        """
        some = [self._wholes[n] for n in numbers]
        if self.is_cast:
            for whole in some:
                whole.grad_dtype = self._dtype
        if not torch.is_grad_enabled() or not any(whole.requires_grad for whole in some):
            wholes = [self._over(n, whole, copies=copies) for n, whole in zip(numbers, some, strict=True)]
            return wholes, [self._without_memory(n) if self.is_cast else None for n in numbers]
        for n in numbers:
            self._leaves[n].__dict__[GATHERED_BY_FSDP] = self._names[n]
            self._order_direct_gradients(n)
        if any(not whole.requires_grad for whole in self._wholes):  # frozen ones may be needed after the last gradient
            token = token.detach().requires_grad_()
        made: tuple[Tensor, ...] = _Whole.apply(self, tuple(numbers), copies, token, *some)  # type: ignore[no-untyped-call]
        if not self.is_cast:
            return made, [None] * len(made)
        return [self._over(n, whole, copies=copies) for n, whole in zip(numbers, some, strict=True)], made

    def _without_memory(self, number: int) -> Tensor:
        return torch.empty((), dtype=self._dtype, device=self._engine.device).expand(self._items[number].shape)

    def _order_direct_gradients(self, number: int) -> None:
        """Let a gradient that comes through no unit wait for torch's, which its streams may be adding to the same."""
        leaf = self._leaves[number]
        if self._engine.device.type == "cpu" or number in self._accumulators or not leaf.requires_grad:
            return
        device = torch.get_device_module(self._engine.device)
        with without_torch_function():
            node = get_gradient_edge(leaf).node
        node.register_prehook(lambda _: device.synchronize(self._engine.device))
        self._accumulators[number] = node  # autograd makes another one if nothing keeps it

    def _over(self, number: int, whole: Tensor, *, copies: bool) -> Tensor:
        """A tensor of its own over the memory of torch's."""
        memory = local_tensor(whole).data  # no view, so that it may be changed in place; with a version of its own
        return self._items[number].wrap(memory.clone() if copies else memory)

    def _count_uses(self, numbers: Sequence[int]) -> list[int]:
        return [storage_uses(local_tensor(self._wholes[n])) for n in numbers]

    def _has_more_uses(self, numbers: Sequence[int], before: Sequence[int]) -> bool:
        """Return whether more tensors than before have the memory; those of a forward that failed may have gone."""
        return any(now > then for now, then in zip(self._count_uses(numbers), before, strict=True))

    def _free_before(self, inputs: Any) -> None:
        """Free frozen parameters once a backward has the gradients of the inputs; torch does at its end."""
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
        frozen = any(not whole.requires_grad for whole in self._wholes)
        if frozen and tensors and not any(tensor.is_leaf for tensor in tensors):
            register_multi_grad_hook(tensors, lambda _: self.free())

    # --- backward ---

    def _before_backward(self, numbers: Sequence[int], gradient: Tensor, *, gathers: bool = True) -> None:
        """Gather for a backward; called in it, when it reaches an output, or needs a parameter that is freed.

        Args:
            numbers: of the parameters that the forward had from here.
            gradient: of an output.
            gathers: whether the backward needs parameters.
        """
        refuse_batched(gradient)
        if with_hooks(self._leaves[n] for n in numbers):
            self._refuse(numbers[0], "has a parameter that got a hook between forward and backward")
        assert self._torch_before_backward is not None
        self.module.set_unshard_in_backward(gathers)
        with without_torch_function():
            self._torch_before_backward(gradient)
        self._engine.begin_backward()  # so that what ends it comes after what torch does at the end
        if (name := self._names[numbers[0]]) not in self._entered:
            self._entered.add(name)
            self._engine.note(f"the backward of {name}")
        if gathers and not self._is_gathered:  # a part of this backward has come through the unit already
            self.module.unshard()

    def _memory(self, number: int) -> Tensor:
        if not self._is_gathered:
            self._before_backward((number,), torch.empty(0))
        found: Tensor = self._wholes[number].detach()
        return found.clone() if torch.is_grad_enabled() else found  # a graph of second derivatives keeps it

    def begin_backward(self) -> None:
        """Note which gradients there are."""
        self._had = [leaf.grad is not None for leaf in self._leaves]
        self._used, self._filled = [False] * len(self._leaves), [False] * len(self._leaves)
        self._entered.clear()

    def end_backward(self) -> None:
        """Forget that a backward came here."""
        self._token = None
        self._entered.clear()

    def complete(
        self, numbers: Sequence[int], gradients: Sequence[Tensor | None], *, copies: bool
    ) -> list[Tensor | None]:
        """Return the gradients for torch to reduce, with zeros for those that are missing here: others may have them.

        Called in a backward, for each forward of the unit. ``copies``: whether that had memory of its own.
        """
        if torch.is_grad_enabled():
            self._refuse(numbers[0], "has parameters whose gradients are differentiated (create_graph=True)")
        for gradient in gradients:
            refuse_sparse(gradient)
            if gradient is not None:
                refuse_batched(gradient)
        if self._names[numbers[0]] not in self._entered:  # through no output of the unit
            self._before_backward(numbers, torch.empty(0), gathers=not copies)
        found = list[Tensor | None]()
        for n, gradient in zip(numbers, gradients, strict=True):
            whole = self._wholes[n]
            if not whole.requires_grad:
                found.append(None)
                continue
            _lay_out(self._leaves[n])
            self._used[n] |= gradient is not None
            self._filled[n] |= gradient is None
            if gradient is None:
                gradient = torch.full_like(whole, -0.0, dtype=self._dtype)  # -0.0 + x is x, in every bit
            elif self._items[n].partial is not None:
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=self._items[n].partial)
            found.append(gradient)
        return found

    def _unused(self) -> list[int]:
        """The parameters that had no gradient before this backward, and got none from this rank's."""
        return [n for n, filled in enumerate(self._filled) if filled and not self._used[n] and not self._had[n]]

    def count_unused(self) -> int:
        """Return of how many parameters this rank has no gradient."""
        return len(self._unused())

    def list_used(self) -> list[bool]:
        """Return of each parameter whether this rank has a gradient of it, or would keep it if others have none."""
        found = [True] * len(self._leaves)
        for n in self._unused():
            gradient = self._leaves[n].grad
            if gradient is not None:
                rows = local_tensor(gradient)
                found[n] = not bool(((rows == 0) & rows.signbit()).all())  # one that came through no unit
        return found

    def take_away_unused(self, used: Any) -> None:
        """Let parameters have no gradient, for which ``used``, an iterator, has a false value."""
        for leaf in self._leaves:
            if not next(used):
                leaf.grad = None

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self._token = None
        self._entered.clear()
        for whole in self._wholes:
            whole.grad = None

    def _refuse(self, number: int, what: str) -> None:
        name = self._names[number]
        where = f"the module {name}" if name else "the module"
        raise UnsupportedCodeError(f"{where} {what}, which fully_shard cannot follow. {REMEDY}")


def _give_memory(wholes: Sequence[Tensor]) -> None:
    """Give memory of their own to whole parameters that outlive a forward, and to what was taken of their data."""
    with torch.no_grad(), without_torch_function():
        for whole in wholes:
            shared = local_tensor(values_of(whole))
            memory = shared.clone().untyped_storage()
            views = [view for one in views_of(whole) if (view := one()) is not None]
            for tensor in (local_tensor(whole), *views):
                if tensor.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr():
                    with keep_version(tensor):
                        tensor.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _lay_out(leaf: ShardedTensor) -> None:
    """Give a gradient that came through no unit the layout of its parameter: torch adds to its memory."""
    gradient = leaf.grad
    if isinstance(gradient, DTensor) and gradient.placements != leaf.placements:
        with without_torch_function(), torch.no_grad():
            leaf.grad = gradient.redistribute(placements=leaf.placements)


class _Whole(torch.autograd.Function):
    """torch's whole parameters → tensors over their memory, or copies, or without memory."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Carrier, numbers: tuple[int, ...], copies: bool, token: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.carrier, ctx.numbers, ctx.copies = carrier, numbers, copies
        setattr(ctx, GATHERED_BY_FSDP, [id(carrier._leaves[n]) for n in numbers])
        ctx.set_materialize_grads(False)
        if carrier.is_cast:
            wholes = [carrier._without_memory(n) for n in numbers]
        else:
            wholes = [carrier._over(n, p, copies=copies) for n, p in zip(numbers, parameters, strict=True)]
        frozen = [whole for whole, p in zip(wholes, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = [gradient_or_none(gradient) for gradient in gradients]
        return None, None, None, None, *ctx.carrier.complete(ctx.numbers, given, copies=ctx.copies)
