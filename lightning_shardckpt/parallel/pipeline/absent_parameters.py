"""What only other stages of a pipeline have: their parameters, and copies of their modules without values.

``parameters()`` has them all on every stage, in the order of the whole module. Those of other stages are placeholders:
they have a shape and say whether they have a gradient. A change of one alone is made where it is. Using its value is an
error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_modules import clear_hooks, parameter_slots, unregister_tensors, withhold_state
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    with_hooks,
    without_torch_function,
)
from lightning_shardckpt.distributed.host_numbers import gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.user_hooks import is_of_user
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder

_BITS = 62  # of an int64 that carries flags


class AbsentParameters:
    """All parameters of a pipelined module: those of this rank, and what stands for the others.

    Args:
        places: for each parameter of the whole module, in the same order on all ranks, its name, this rank's part, and
            what stands for it elsewhere; None for what there isn't.
        group: the ranks of the pipeline, on gloo.
    """

    def __init__(
        self,
        places: Iterable[tuple[str, nn.Parameter | None, Placeholder | None]],
        group: dist.ProcessGroup,
    ) -> None:
        self._places, self._group = list(places), group

    def share_gradients(self) -> None:
        """Let every stage know which parameters have a gradient now.

        Collective: every rank of the pipeline must call it.
        """
        words = torch.tensor(self.own_gradients(has_gradient), dtype=torch.int64)
        self.note_gradients(gather_numbers(words, self._group).tolist())

    def own_gradients(self, has_gradient: Callable[[nn.Parameter], bool]) -> list[int]:
        """Return which parameters of this rank have a gradient now, as numbers; as many on every rank."""
        return list(_packed([own is not None and has_gradient(own) for _, own, _ in self._places]))

    @property
    def gradient_words(self) -> int:
        """How many numbers ``own_gradients`` gives."""
        return -(-len(self._places) // _BITS)

    def note_gradients(self, every: Sequence[Sequence[int]]) -> None:
        """Remember what every rank of the pipeline said by ``own_gradients``."""
        for place, (_, own, absent) in enumerate(self._places):
            if own is None and absent is not None:
                word, bit = divmod(place, _BITS)
                absent.has_gradient = any(words[word] >> bit & 1 for words in every)

    def check_own(self) -> None:
        """Check what was done to this rank's parameters since the step before.

        Raises:
            UnsupportedCodeError: for one that was given another stage's memory, of which torch tells nobody.
        """
        for name, own, _ in self._places:
            if own is None:
                continue
            part = local_tensor(own)
            if part.untyped_storage().nbytes() < part.numel() * part.itemsize and part.numel() > 1:
                raise UnsupportedCodeError(
                    f"{name} was given the data of a parameter that only another pipeline stage has (by .data = …, or "
                    "torch.nn.utils.vector_to_parameters). Change each parameter by itself, or use "
                    "pipeline_parallel_size=1."
                )

    def check_hooks(self) -> None:
        """Check the hooks of this rank's parameters.

        Raises:
            UnsupportedCodeError: for one of the user's.
        """
        here = [(name, own) for name, own, _ in self._places if own is not None]
        with without_torch_function():
            hooked = set(map(id, with_hooks([own for _, own in here])))
        for name, own in here:
            if id(own) not in hooked:
                continue
            hooks = [*(gradient_hooks(own) or {}).values(), *(accumulation_hooks(own) or {}).values()]
            if any(map(is_of_user, hooks)):
                raise UnsupportedCodeError(f"{name} {_HOOKED}")


_HOOKED = (
    "has a hook (register_hook, register_post_accumulate_grad_hook), which in a pipeline sees gradients of "
    "microbatches, on one stage. Change gradients in on_before_optimizer_step, or use pipeline_parallel_size=1."
)


def refuse_hook(tensor: Tensor, hook: Callable[[Any], Any]) -> None:
    """Check a hook that a step registers on a tensor.

    Raises:
        UnsupportedCodeError: for a hook of the user's.
    """
    if not is_of_user(hook):
        return
    if isinstance(tensor, nn.Parameter):
        raise UnsupportedCodeError(f"a parameter of shape {tuple(tensor.shape)} {_HOOKED}")
    raise UnsupportedCodeError(
        f"a pipelined step registers the hook {getattr(hook, '__qualname__', hook)} on a tensor of shape "
        f"{tuple(tensor.shape)}, whose gradient one stage has, and for microbatches. Change the gradient in a "
        "torch.autograd.Function, or use pipeline_parallel_size=1."
    )


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient. No communication."""
    with without_torch_function():
        return parameter.grad is not None


def _packed(flags: Sequence[bool]) -> Iterator[int]:
    """The flags as numbers of 62 bits, the first flag lowest.

    >>> list(_packed([True, False, True])), len(list(_packed([True] * 63)))
    ([5], 2)
    """
    for start in range(0, len(flags), _BITS):
        yield sum(flag << place for place, flag in enumerate(flags[start : start + _BITS]))


# ── modules of other stages ───────────────────────────────────────────────────────────────────────────────────────────


def weightless_copy(module: nn.Module, fqn: str, device: torch.device, known: dict[int, Placeholder]) -> nn.Module:
    """A copy of ``module`` without values: same classes and attributes, no parameters, no buffers, no hooks.

    Weights are there as unknown attributes, so that its parts can be called, indexed and asked for their shapes;
    `register_placeholders` makes them parameters of the copy.

    Args:
        known: what stands for parameters and buffers already, by ``id``; those of this module are added. A parameter
            that modules share is one in their copies, too.

    Raises:
        UnsupportedCodeError: if it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for named in (module.named_parameters(fqn), module.named_buffers(fqn)):
        for name, tensor in named:
            memo[id(tensor)] = known.setdefault(id(tensor), Placeholder.like(tensor, name, device))
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedCodeError(
            f"{fqn} ({type(module).__name__}) is on another pipeline stage for some ranks, and cannot be copied "
            f"without its weights: {type(error).__name__}: {error}"
        ) from error
    for name, part in found.named_modules(prefix=fqn):
        _strip(part, name)
    return found


def register_placeholders(weightless: nn.Module, here: Container[int]) -> None:
    """Make the weights of a weightless copy its parameters, so that code which goes over all parameters meets them.

    Args:
        here: by ``id``, those that this rank has under another name; the code meets that one.
    """
    for part in weightless.modules():
        for name, weight in list(vars(part).items()):
            if isinstance(weight, Placeholder) and isinstance(weight, nn.Parameter) and id(weight) not in here:
                del part.__dict__[name]
                parameter_slots(part)[name] = weight


def _strip(module: nn.Module, fqn: str) -> None:
    def asked() -> None:
        raise UnsupportedCodeError(
            f"the state_dict of {fqn} is asked for, which only another pipeline stage has. Read it from a saved "
            "checkpoint, or use pipeline_parallel_size=1."
        )

    unregister_tensors(module)
    clear_hooks(module)
    withhold_state(module, asked)  # the stage that has the module saves it, and loads what is given
