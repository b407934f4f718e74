"""What torch.save writes besides values is what torch.load asks for. Oracle: torch's own modules."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lightning_shardckpt.export.torch_archive import Plain


class Versioned(nn.Linear):
    _version = 7
    seen: object = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
        type(self).seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_the_versions_of_a_state_dict_reach_the_module_that_loads_it() -> None:
    module = Versioned(2, 2)
    plain = Plain().of(module.state_dict())
    assert type(plain) is OrderedDict
    module.load_state_dict(OrderedDict(plain))  # a copy has no versions
    assert Versioned.seen is None
    module.load_state_dict(plain)
    assert Versioned.seen == 7
