"""A DTensor's local tensor and spec, and the placement of a dim that is sharded twice.

Checked with torch 2.12 to 2.15. ``DTensor.to_local`` and ``DTensor.from_local`` record history and check shapes over
all ranks; what is here does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""The shard of a dim that inner axes split into ``split_factor`` parts before: FSDP over tensor parallelism."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a DTensor's local tensor itself, without history; a plain one as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""The mesh, the placements and the global shape, strides and dtype of a DTensor, in one hashable value.

No ``def``: optimizers ask thousands of times in a step.
"""


def shape_of(tensor: Tensor) -> Size:
    """Return a tensor's shape; a DTensor would make another one of the same numbers, which takes longer."""
    meta = tensor._spec.tensor_meta if isinstance(tensor, DTensor) else None
    return tensor.shape if meta is None else meta.shape


def new_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over the memory of ``local``, without history. No communication, no checks.

    Leaves out ``DTensor.__init__``, which does nothing, in a wrapper for compilers that takes longer than all the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def look_for_anomalies_in_rows() -> Callable[[], None]:
    """Let ``torch.autograd.detect_anomaly`` look at this rank's part of a DTensor, for which torch has no strategy.

    Relies on the handlers of DTensor's dispatcher. A rank that finds NaN raises alone, as autograd does.

    Returns:
        A function that ends it.
    """

    def handler(op: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return op(local_tensor(args[0]))

    handlers: dict[object, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]  # typed later
    operation = torch.ops.aten._is_any_true.default
    if operation in handlers:  # torch's own, some day
        return lambda: None
    handlers[operation] = handler
    return lambda: handlers.pop(operation, None) and None


def replace_local(tensor: DTensor, other: DTensor) -> None:
    """Make a DTensor have the local tensor and the spec of another one; its own tensor fields stay as they are."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec
