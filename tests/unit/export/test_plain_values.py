"""The values of a file for torch.load. Oracle: numpy, and torch's own modules."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from lightning_shardckpt.export.torch_export import to_plain
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, TORCH_NAMES
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES


def test_every_dtype_of_the_format_has_the_name_that_torch_gives_it() -> None:
    assert TORCH_NAMES.keys() == DTYPE_BYTES.keys()
    for name, dtype in TORCH_DTYPES.items():
        assert (str(dtype), dtype.itemsize) == (f"torch.{TORCH_NAMES[name]}", DTYPE_BYTES[name])


def test_a_tensor_gets_a_storage_of_its_own() -> None:
    whole = torch.arange(6.0).view(2, 3)
    for part in (whole.t(), whole[1:], whole):
        found = to_plain([part], "", [])[0]
        assert torch.equal(found, part) and found.untyped_storage().nbytes() == part.nbytes
    assert found is whole


class Versioned(nn.Linear):
    _version = 7
    seen: object = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
        type(self).seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_the_versions_of_a_state_dict_reach_the_module_that_loads_it() -> None:
    module = Versioned(2, 2)
    plain = to_plain(module.state_dict(), "", [])
    assert type(plain) is OrderedDict
    module.load_state_dict(OrderedDict(plain))  # a copy has no versions
    assert Versioned.seen is None
    module.load_state_dict(plain)
    assert Versioned.seen == 7
