"""The parameters that only other stages of a pipeline have, as code between steps meets them.

``parameters()`` has them all on every stage, in the order of the whole module. Those of other stages are placeholders:
they have a shape and say whether they have a gradient; what is done to one alone is done where it is, and who needs its
value is told so. Hooks run on the stage that has the parameter, so they may do nothing but change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    version_of,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.agree import gathered
from lightning_shardckpt.parallel.pipeline.attribute_owners import is_installed
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder
from lightning_shardckpt.parallel.tensors.unreduced_gradients import UnreducedGradients

_BITS = 62  # of an int64 that carries flags
_OURS = ("lightning_shardckpt.parallel.", "lightning_shardckpt.compat.")  # modules whose hooks may note things down


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
        self.note_gradients(gathered(self.own_gradients(has_gradient), self._group))

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
            UnsupportedCodeError: for one that was given another stage's memory, which torch doesn't report; in the
                backward, for a hook that changes neither gradient nor parameter.
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
            _guard(own, gradient_hooks(own), _GradientHook)
            _guard(own, accumulation_hooks(own), _AccumulatedHook)


class _GuardedHook:
    """A hook of the user's that must change what it sees."""

    def __init__(self, hook: Callable[[Any], Any], of: str) -> None:
        self._hook, self._of = hook, of


class _GradientHook(_GuardedHook):
    """A hook of a gradient that must return another one, or change it."""

    def __call__(self, gradient: Tensor | None) -> Any:
        if gradient is None:  # other parameters that were gathered together have one
            return self._hook(gradient)
        part = local_tensor(gradient)
        before = version_of(part)
        found = self._hook(gradient)
        if found is None and version_of(part) == before:
            raise _watches(self._hook, self._of)
        return found


class _AccumulatedHook(_GuardedHook):
    """A hook of an accumulated gradient that must change it, or the parameter."""

    def __call__(self, parameter: Tensor) -> None:
        before = _versions(parameter)
        self._hook(parameter)
        if before is not None and _versions(parameter) == before:
            raise _watches(self._hook, self._of)


def _versions(parameter: Tensor) -> tuple[int, int, int] | None:
    """What changes with a parameter or its gradient; None if only others that were gathered with it have one."""
    with without_torch_function():
        if parameter.grad is None:
            return None
        gradient = local_tensor(parameter.grad)
        return id(gradient), version_of(gradient), version_of(local_tensor(parameter))


def _guard(parameter: nn.Parameter, hooks: MutableMapping[int, Any] | None, kind: type[_GuardedHook]) -> None:
    if not hooks:
        return
    for number, hook in hooks.items():
        if not isinstance(hook, _GuardedHook) and not getattr(hook, "__module__", "").startswith(_OURS):
            hooks[number] = kind(hook, f"a parameter of shape {tuple(parameter.shape)}")


def guarded_hook(tensor: Tensor, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook that does what ``hook`` does, and must change the gradient, if ``tensor`` is an activation.

    Those of parameters are looked at between steps.
    """
    function = hook.func if isinstance(hook, partial) else hook
    owner = getattr(function, "__module__", "")
    if isinstance(tensor, nn.Parameter) or owner.startswith(_OURS) or is_installed(owner):
        return hook
    return _GradientHook(hook, f"an activation of shape {tuple(tensor.shape)}")


def _watches(hook: Any, of: str) -> UnsupportedCodeError:
    name = getattr(hook, "__qualname__", repr(hook))
    return UnsupportedCodeError(
        f"{name}, a hook of {of}, changes nothing: what it notes down is known to one stage of "
        "the pipeline only, the one that has the tensor. A hook may return another gradient, or change it; read "
        "gradients in on_before_optimizer_step of a run with pipeline_parallel_size=1."
    )


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient, reduced or not yet. No communication."""
    if parameter in UnreducedGradients.of_leaf:
        return True
    with without_torch_function():
        return parameter.grad is not None


def _packed(flags: Sequence[bool]) -> Iterator[int]:
    """The flags as numbers of 62 bits, the first flag lowest.

    >>> list(_packed([True, False, True])), len(list(_packed([True] * 63)))
    ([5], 2)
    """
    for start in range(0, len(flags), _BITS):
        yield sum(flag << place for place, flag in enumerate(flags[start : start + _BITS]))
