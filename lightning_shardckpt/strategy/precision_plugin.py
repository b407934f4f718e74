"""Let Lightning's precision plugins, which look at the gradients of one rank, scale and clip those of all ranks.

What a GradScaler and a norm are over shards is in ``parallel.sharding``; here is who asks for them.
"""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_shardckpt.parallel.pipeline.stage_optimizer import user_code
from lightning_shardckpt.parallel.sharding.clip_grad import RanksOf, clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.sharding.grad_scaler import unscale_over_ranks


def scaler_factor(precision: object) -> float:
    """Return what the gradient scaler of a precision plugin multiplies the loss with; 1 without one."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else 1.0


def autocast_dtype(precision: object) -> torch.dtype | None:
    """Return the dtype to which a precision plugin lets autocast cast parameters in steps; None without autocast."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(getattr(precision, "precision", ""))


def unscale_shards(precision: object, device: torch.device) -> None:
    """Let the gradient scaler of a precision plugin, if there is one, look at the shards of all ranks.

    Args:
        precision: of the Trainer or of Fabric.
        device: where the ranks meet.
    """
    scaler = getattr(precision, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        unscale_over_ranks(scaler, device)


def clip_shards(precision: Precision, device: torch.device, ranks_of: RanksOf) -> None:
    """Let a Trainer's precision plugin, which it asks to clip, do so over all ranks, however parameters are sharded.

    Its ``clip_grad_by_norm`` becomes collective: every rank of the world must call it.

    Args:
        precision: of the Trainer.
        device: where the ranks meet.
        ranks_of: tells how many ranks hold a parameter or a part of it.
    """
    by_norm = partial(_clip_by_norm, precision, device, ranks_of)
    precision.clip_grad_by_norm = by_norm  # type: ignore[method-assign]  # of this plugin alone
    precision.clip_grad_by_value = partial(_clip_by_value, precision)  # type: ignore[method-assign]


def _clip_by_norm(
    precision: Precision, device: torch.device, ranks_of: RanksOf, optimizer: Optimizer, clip_val: float
) -> None:
    with user_code(False):
        parameters = list(precision.main_params(optimizer))
    clip_by_norm(parameters, clip_val, device=device, ranks_of=ranks_of)


def _clip_by_value(precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
    with user_code(False):
        clip_by_value(precision.main_params(optimizer), clip_val)
