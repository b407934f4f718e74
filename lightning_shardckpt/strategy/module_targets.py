"""Turn a live module and its optimizers into the targets of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.match import fitted_to
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.state_dict_views import with_objects
from lightning_shardckpt.state.model import WholeNames, is_value, model_leaves
from lightning_shardckpt.state.module_io import LoadCode, parameter_names
from lightning_shardckpt.state.peft_modules import adapter_tensors
from lightning_shardckpt.system.gc_pause import gc_paused


@gc_paused()
def module_targets(
    module: nn.Module, state_dict: Mapping[str, Any], optimizers: Sequence[Optimizer] | None, whole: WholeNames
) -> LoadTargets:
    """Return what a load fills: the tensors of a state dict, and the state of optimizers.

    Args:
        module: whose state dict it is.
        state_dict: with live tensors, which are filled in place.
        optimizers: of the module's parameters; None to load weights only.
        whole: names over all pipeline stages.
    """
    values = {name for name, value in state_dict.items() if is_value(name, value)}
    tensors = {k: v for k, v in state_dict.items() if k not in values} if values else state_dict
    leaves, _ = model_leaves(tensors, module, whole)
    extra_state = frozenset(map(clean_fqn, values))
    adapters = adapter_tensors(module, leaves.tensors)

    def fitting(source: Source) -> tuple[Source, list[str]]:
        return fitted_to(with_objects(source), module=module, live=leaves, whole=whole)

    names = parameter_names(module, whole) if optimizers is not None else {}
    code = LoadCode.of({"": module})
    return LoadTargets(leaves, extra_state, optimizers, names, whole, adapters, fitting, code=code)
