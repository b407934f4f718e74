"""The names of buffers that a state dict does not have are those that were registered so."""

from __future__ import annotations

import torch
from torch import nn

from lightning_shardckpt.compat.module_slots import non_persistent_buffers


def test_buffers_that_are_not_saved_are_named_while_they_are_there() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    module.register_buffer("empty", None, persistent=False)
    assert non_persistent_buffers(module) == {"derived", "empty"} and module.state_dict().keys() == {"kept"}
    module.register_buffer("derived", torch.zeros(1))
    assert non_persistent_buffers(module) == {"empty"} and module.state_dict().keys() == {"kept", "derived"}
