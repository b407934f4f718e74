"""``ShardedStrategy`` and ``ShardCkptIO`` of Fabric, with hooks in the order in which a script calls them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shardckpt.checkpoint.checkpoint import check_loaded
from lightning_shardckpt.checkpoint.describe import WRAPPED, NestedObjects, checkpoint_of
from lightning_shardckpt.checkpoint.nested_load import NestedLoad
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.checkpoint_io import ShardCkptIO as TrainerCkptIO
from lightning_shardckpt.compat import lightning_runs
from lightning_shardckpt.compat.torch_autograd import accumulates_gradient_of
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.distributed.world import raise_if_lost
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import rebind_optimizer
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.clip_grad import clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.sharding.fsdp import reshard
from lightning_shardckpt.parallel.sharding.shared_values import share_optimizer_rng
from lightning_shardckpt.parallel.tensors.values import broadcast_rng, reset_numbers
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.state_dicts import states_of_checkpoint
from lightning_shardckpt.storage.router import file_path
from lightning_shardckpt.strategy.mesh_strategy import MeshStrategy
from lightning_shardckpt.strategy.steps import PipelinedSteps, StepCall, scaler_factor, unscale_shards
from lightning_shardckpt.system.host import drain_all

__all__ = ["ShardCkptIO", "ShardedStrategy"]


class ShardCkptIO(TrainerCkptIO):
    """``lightning_shardckpt.ShardCkptIO`` for states of Fabric with state dicts in the places of objects."""

    _is_fabric = True

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the saved state. Collective with ``use_async``: every rank must call it."""
        if self.is_async and dist.is_available() and dist.is_initialized():  # only rank 0 may have pending saves
            drain_all()
            any_rank(False)
        return super().load_checkpoint(path, map_location, weights_only)


class ShardedStrategy(MeshStrategy, ParallelStrategy):  # type: ignore[misc]  # gives ShardCkptIO, takes any CheckpointIO
    """Trains Fabric's modules under any mix of replicated and sharded data parallel, tensor and pipeline parallel.

    ``fabric.setup`` shards an ordinary module. The parameters of an optimizer that was built before are replaced by the
    sharded ones, which act as whole tensors. Initial weights are the same on every topology.

    ``fabric.save`` writes the format of the Trainer's ``ShardedStrategy`` and of ``lightning_shardckpt.save``: each
    loads the other's model and optimizers. ``fabric.load`` matches keys as ``lightning_shardckpt.load`` does.

    Takes the arguments of the Trainer's ``ShardedStrategy``.
    """

    @override
    def _prepare(self) -> None:
        self._num_nodes = 1  # Fabric's connector overwrites it
        self._running: ShardedModule | None = None
        self._stepped: PipelinedSteps | None = None  # whose backward has not run yet
        self._backward_sync_control = weakref.proxy(self)  # Fabric calls no_backward_sync of it

    # --- processes ---

    @property
    def num_nodes(self) -> int:  # type: ignore[override]  # the Trainer's strategy sets it
        return self._num_nodes

    @override
    def _configure_launcher(self) -> None:
        self._choose_environment()
        assert self.cluster_environment is not None
        is_alone = self.num_processes * self._num_nodes == 1  # a notebook, say
        if not is_alone and not self.cluster_environment.creates_processes_externally:
            self._launcher = lightning_runs.FabricScriptLauncher(
                self.cluster_environment, self.num_processes, self._num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._meshes is not None:
            return
        self._setup_distributed()
        lightning_runs.keep_samplers_of(self)
        self._meshes, self._ranks = self._new_meshes(), self._new_ranks()
        self._enable_async()
        reset_numbers()
        if self.topology.tensor > 1:
            broadcast_rng(self.meshes.tensor_group)
        if self.meshes.data_parallel_group.size() < self.world_size:  # metrics would count replicas of samples, too
            undo = lightning_runs.gather_metrics_over(self.meshes.data_parallel_group, nn.Module())
            weakref.finalize(self, undo).atexit = False  # Fabric has no teardown
        unscale_shards(self.precision, self.root_device)

    # --- modules and optimizers ---

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the CPU; with ``empty_init``, with values on rank 0 alone until setup, which count there."""
        with self._build.building(self._ranks, on_one_rank=bool(empty_init)), self.precision.module_init_context():
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: sharding the module places parameters and buffers."""

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Collective: every rank of the world must call it."""
        pretrained, self._pretrained = self._pretrained, None
        sharded = self._shard_module(module, self._build, pretrained, precision=self.precision, is_called=True)
        if self.topology.tensor > 1 and self._build.only_first:
            broadcast_rng(self.meshes.tensor_group)  # the script may have initialised what rank 0 alone has
        self._sharded.append(sharded)
        return ShardedForward(sharded, lambda: self._running)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replace the parameters of the modules that were set up by the sharded ones."""
        if not self._sharded:
            raise UnsupportedCodeError(
                f"{type(optimizer).__name__} is set up before any module: call fabric.setup(model, optimizer), or "
                "fabric.setup_module(model) first"
            )
        rebind_optimizer(optimizer, *self._sharded)
        if not self._recipe.fsdp.cpu_offload:
            lightning_runs.optimizer_to_device(optimizer, self.root_device)
        return optimizer

    # --- steps ---

    @override
    @wraps(ParallelStrategy.backward)  # hides the override: for one, Fabric forbids derivatives outside of it
    def backward(  # type: ignore[override]  # mypy doesn't regard the result of wraps as a method
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward; gradients are final on return. Collective: every rank of the world must call it."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        stepped, self._stepped = self._stepped, None
        if not self._is_alone and any(not sharded.gradients.is_blocked for sharded in self._sharded):
            self._agreement.should_stop(False, self.meshes, self.tuning)
        with self._reducing(stepped):
            super().backward(tensor, module, *args, **kwargs)
        raise_if_lost()  # the outputs of an aborted collective are invalid

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure, group = kwargs.get("closure"), None if self._is_alone else self.meshes.data_parallel_group
        with share_optimizer_rng(optimizer, closure or (lambda: None), group) as gradients:
            return super().optimizer_step(optimizer, **kwargs | ({} if closure is None else {"closure": gradients}))

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients of replicated parameters are not reduced, if ``enabled``."""
        sharded: ShardedModule = module.__dict__["sharded"]  # of a ShardedForward
        return sharded.gradients.no_sync() if enabled else nullcontext()

    def run_step(
        self, step: Callable[[Any], Any], batch: Any, module: nn.Module | None = None, *, scale: float = 1.0
    ) -> Any:
        """Run a step function on a batch, in a pipeline on all of its stages.

        Collective: every rank of the world must call it, with the same batch on all ranks of a pipeline. With gradients
        enabled, ``step`` must return a loss tensor or a dict with a "loss", for ``fabric.backward``. Steps that can't
        be pipelined are errors on every rank; see "Pipelines" in the docs.

        Args:
            step: calls the module and computes the loss. In a pipeline it runs several times.
            batch: its argument, which a pipeline splits into microbatches along the first dim of its tensors.
            module: the result of ``fabric.setup``, if several modules were set up.
            scale: the factor by which the loss is multiplied before backward, for schedules that run backward at once.

        Returns:
            The result of ``step``; in a pipeline the last stage's, on every rank.
        """
        if self.topology.pipeline == 1:
            return step(batch)
        inside = self._sharded
        if module is not None:
            inside = [one.__dict__["sharded"] for one in module.children() if isinstance(one, ShardedForward)]
        if len(inside) != 1:
            count = len(self._sharded)
            raise UnsupportedCodeError(
                f"run_step must know which of the {count} modules runs: pass the result of fabric.setup as module="
            )
        sharded = inside[0]
        assert sharded.pipeline is not None
        pipeline, factor = sharded.pipeline, scaler_factor(self.precision) * scale
        steps = PipelinedSteps(sharded.root, pipeline, self.root_device, lambda: factor)
        call = StepCall("the step function", step, pipeline, batch, train=torch.is_grad_enabled())
        self._running, self._stepped = sharded, None
        try:
            with lightning_runs.disable_backward_guard() if pipeline.backward_early else nullcontext():
                output = steps.run(call)
        except BaseException:
            steps.reset()
            raise
        finally:
            self._running = None
        if call.train and output is not None:
            self._stepped = steps
        return output

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks and shards. Collective: every rank of the world must call it."""
        self.precision.unscale_gradients(optimizer)
        holders = {parameter: ranks for sharded in self._sharded for parameter, ranks in sharded.holders.items()}
        return clip_by_norm(
            list(self.precision.main_params(optimizer)),
            max_norm,
            device=self.root_device,
            ranks_of=lambda p: holders.get(p, self.world_size),
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), clip_val)

    # --- checkpoints ---

    def wait(self) -> None:
        """Wait for asynchronous saves, and raise their errors. Collective: every rank must call it."""
        self.checkpoint_io.wait()

    @override
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save this rank's slices, at the path of rank 0. Collective: every rank must call it."""
        self.reshard()

        def look() -> dict[str, Any]:
            objects = NestedObjects.of(state)
            check_loaded(objects.filled)
            self._refuse_stored_metrics(objects.root)
            return {"path": file_path(path), "order": objects.keys}

        first: dict[str, Any] = self._ranks.step("describing what to save", look, itemgetter(0))
        objects = NestedObjects.of(state, first["order"])
        whole, holder = self._names(objects)
        self._compare_ranks(parameters=False)
        self.checkpoint_io.attach(self._ranks, objects.root, self._sizes_by_axis, names=whole)

        def collect() -> dict[str, Any]:
            return checkpoint_of(state, objects, objects.parameter_names(holder, whole), filter)

        self.checkpoint_io.save(collect, first["path"], RunInfo.of(state, self._sizes_by_axis), storage_options)

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill objects in place; without a state, return the whole checkpoint. Collective: every rank must call it."""
        path, io = self.broadcast(path), self.checkpoint_io
        self.reshard()
        if not state and not isinstance(state, nn.Module | Optimizer):
            return states_of_checkpoint(io.load_whole(path, weights_only=weights_only))
        drain_all()
        states = state if isinstance(state, dict) else {"state": state}
        options = replace(io.load_options, strict=strict, weights_only=weights_only is not False)
        nested = NestedLoad(states, key_mapping=io.key_mapping, name=self._names, keep_parameters=True)
        remainder, result = nested.run(file_path(path), self._ranks, options=options, storage=io.storage)
        for note in result.notes:
            rank_zero_warn(note)
        return remainder if isinstance(state, dict) else {}

    def _names(self, objects: NestedObjects) -> tuple[WholeNames, nn.Module]:
        """Return the names of a state's modules, and a module that holds the parameters of its optimizers.

        A pipeline stage has a part of a module: the names are those of the whole. Without modules in the state, they
        are those of the modules whose parameters its optimizers have; the names of several start with numbers.
        """
        self._refuse_stored_metrics(objects.root)
        ids = {id(p) for one in objects.optimizers.values() for group in one.param_groups for p in group["params"]}
        roots = [one.root for one in self._sharded if any(id(p) in ids for p in one.root.parameters())]
        holders = NestedObjects({(number,): root for number, root in enumerate(roots)})
        named = objects if objects.modules else holders
        by_root = {id(sharded.root): sharded for sharded in self._sharded}
        names, ties = set[str](), list[tuple[str, ...]]()
        for path, prefix in named.prefixes.items():
            sharded = by_root.get(id(named.modules[path]))
            own = named.modules[path].state_dict() if sharded is None else sharded.state_names
            names |= {prefix + name for name in own}
            ties += [tuple(prefix + name for name in tie) for tie in (() if sharded is None else sharded.state_ties)]
        return WholeNames(frozenset(names), tuple(ties)), holders.root


# ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _refuse_other_backward(root: weakref.ref[nn.Module], gradient: Tensor) -> None:
    """Raise an UnsupportedCodeError in a backward that accumulates gradients outside of ``fabric.backward``."""
    module = root()
    if lightning_runs.is_in_backward() or module is None:
        return
    if any(accumulates_gradient_of(p) for p in module.parameters() if p.requires_grad):
        raise UnsupportedCodeError(
            f"loss.backward() would not average the gradients of {type(module).__name__} over the ranks: call "
            "fabric.backward(loss). torch.autograd.grad may be called anywhere, but under mixed precision."
        )


class ShardedForward(nn.Module):
    """Runs the forward of a sharded module in FSDP's hooks; ``running`` returns the one whose pipeline runs a step."""

    def __init__(self, sharded: ShardedModule, running: Callable[[], ShardedModule | None]) -> None:
        super().__init__()
        self.__dict__["sharded"] = sharded  # not a submodule: Fabric has the module itself
        self.__dict__[WRAPPED] = sharded.root
        self._running = running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sharded: ShardedModule = self.__dict__["sharded"]
        if sharded.pipeline is not None:
            if self._running() is not sharded:
                raise UnsupportedCodeError(
                    f"{type(sharded.root).__name__} is a pipeline, of which this rank has a part: call it in a "
                    "function of the batch, by fabric.strategy.run_step(function, batch)"
                )
            return sharded.root(*args, **kwargs)
        output = sharded.run(partial(sharded.root, *args, **kwargs))
        if not torch.is_grad_enabled():  # no backward will follow
            reshard(sharded.root)

        refuse = partial(_refuse_other_backward, weakref.ref(sharded.root))

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(refuse)  # type: ignore[no-untyped-call]
            return tensor

        apply_to_collection(output, Tensor, watch)  # as Fabric does
        return output
