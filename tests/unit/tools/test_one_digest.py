"""One state has one digest, on every topology and in every format. Oracle: a line of xxh3-64 for whole tensors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.format.index import TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, DimShard, Layout, Shape
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.tools.digest import component_digest, digest, values_digest
from tests.support import worlds
from tests.support.worlds import mesh

STATE: dict[str, tuple[str, Shape]] = {
    "embed.weight": ("F32", (257, 96)),  # large enough to be shared by its replicas
    "layers.0.qkv.weight": ("BF16", (9, 7)),
    "layers.0.down.weight": ("F64", (2, 5)),  # fewer rows than ranks
    "layers.0.norm.weight": ("F16", (3,)),  # pinned, as buffers are
    "layers.1.qkv.weight": ("BF16", (9, 7)),
    "layers.1.conv.weight": ("F32", (6, 3, 2)),
    "layers.1.mask": ("U8", (1, 1)),
    "layers.1.steps": ("I64", ()),
    "head.weight": ("F8_E4M3", (40_000,)),
}
Place = tuple[Layout, tuple[tuple[int, int], ...]]
"""A layout, and who holds it."""


def everywhere(world: int, layout: Layout, others: Layout = REPLICATED) -> Callable[[str, int], Place]:
    """Matrices sharded by one layout and vectors by another one, over all ranks."""
    return lambda key, ndim: (layout if ndim > 1 else others if ndim else REPLICATED, ((0, world),))


def stages(count: int, of: int, layout: Layout, others: Layout = REPLICATED) -> Callable[[str, int], Place]:
    """The same on the ranks of pipeline stages, which have neighbours in the state; the last one has what is left."""
    stage_of = {key: min(place * count // len(STATE), count - 1) for place, key in enumerate(STATE)}

    def place(key: str, ndim: int) -> Place:
        return layout if ndim > 1 else others if ndim else REPLICATED, ((stage_of[key] * of, (stage_of[key] + 1) * of),)

    return place


def rows(axis: int = 0) -> DimShard:
    return DimShard(axis, 0)


def columns(axis: int = 0) -> DimShard:
    return DimShard(axis, 1)


PACKED = DimShard(0, 0, 3)  # query, key and value in one
FSDP = mesh(5, cuts=(rows(),))
TOPOLOGIES: dict[str, tuple[int, Callable[[str, int], Place]]] = {
    "FSDP 5": (5, everywhere(5, FSDP, FSDP)),  # uneven: 257, 9, 3 and 2 rows
    "TP 3 packed": (3, everywhere(3, mesh(3, cuts=(PACKED,)))),
    "FSDP 2 x TP 2 strided": (4, everywhere(4, mesh(2, 2, cuts=(rows(1), rows())), mesh(2, 2, cuts=(rows(),)))),
    "ranks in another order": (4, everywhere(4, mesh(2, 2, cuts=(rows(1), rows()), order=(3, 1, 0, 2)))),
    "PP 3 x TP 2 rows": (6, stages(3, 2, mesh(3, 2, cuts=(columns(1),)))),
    "PP 2 x FSDP 2 x TP 2": (8, stages(2, 4, mesh(2, 2, 2, cuts=(rows(2), rows(1))), mesh(2, 2, 2, cuts=(rows(1),)))),
}
MODEL = {"prefix": "", "class": "Net", "adapter": None, "ties": [], "ignored": [], "names": {}}
HUGGING_FACE = {"models": [{**MODEL, "files": {"config.json": '{"model_type": "net"}'}}]}


def table(place: Callable[[str, int], Place]) -> dict[str, TensorSpec]:
    return {
        key: TensorSpec(dtype, shape, *place(key, len(shape)), "norm" in key) for key, (dtype, shape) in STATE.items()
    }


WHOLE = {key: worlds.whole(key, spec).tobytes() for key, spec in table(everywhere(1, REPLICATED)).items()}


def expected() -> tuple[dict[str, str], str]:
    """The digest of each tensor, and of the component, as FORMAT.md defines them."""
    of = {key: xxhash.xxh3_64_hexdigest(data) for key, data in WHOLE.items()}
    lines = [json.dumps([key, *STATE[key], of[key]], separators=(",", ":")) + "\n" for key in sorted(STATE)]
    return of, xxhash.xxh3_64_hexdigest("".join(lines).encode())


def found(path: Path, **options: Any) -> tuple[dict[str, str], str]:
    value = digest(path, **options)
    assert [tensor["component"] for tensor in value["tensors"]] == ["model"] * len(STATE)
    assert value["whole"] == DEFINED["checksum"](DEFINED["line"](value["components"]))
    return {tensor["name"]: tensor["digest"] for tensor in value["tensors"]}, value["components"]["model"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_has_this_digest_on_every_topology_and_in_what_is_exported_from_it(topology: str, tmp_path: Path) -> None:
    world, place = TOPOLOGIES[topology]
    path = tmp_path / "a.ckpt"
    documents = {"huggingface.json": json.dumps(HUGGING_FACE).encode()}
    storage = LocalStorage(sync_files=False)
    worlds.save(storage, {"model": table(place)}, world, path=str(path), documents=documents)
    assert found(path) == expected()
    if topology == "PP 2 x FSDP 2 x TP 2":
        assert found(path, names="huggingface") == expected()
        assert found(Path(consolidate(path, tmp_path / "a.pt"))) == expected()
        assert found(Path(consolidate(path, tmp_path / "a.safetensors", format="safetensors"))) == expected()
        assert found(Path(consolidate(path, tmp_path / "hf", format="huggingface"))) == expected()


@pytest.mark.parametrize(("key", "at"), [("layers.1.qkv.weight", 77), ("head.weight", 0)])
def test_one_other_bit_gives_another_one(key: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, place = TOPOLOGIES["PP 2 x FSDP 2 x TP 2"]
    whole = worlds.whole

    def other(name: str, spec: TensorSpec) -> worlds.Array:
        value = whole(name, spec).copy()
        if name == key:
            value.reshape(-1).view("u1")[at] ^= 4
        return value

    monkeypatch.setattr(worlds, "whole", other)
    worlds.save(LocalStorage(sync_files=False), {"model": table(place)}, world, path=str(tmp_path / "a"))
    tensors, component = found(tmp_path / "a")
    assert {name for name, one in tensors.items() if one != expected()[0][name]} == {key}
    assert component != expected()[1]


def defined() -> dict[str, Any]:
    """The functions in FORMAT.md."""
    specification = (Path(__file__).parents[3] / "lightning_shardckpt" / "FORMAT.md").read_text()
    section = specification.partition("\n## Digests\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    functions: dict[str, Any] = {}
    exec(code, functions)
    return functions


DEFINED = defined()


@pytest.mark.parametrize("name", ["a", "é", 'a"\n["b","F32",[2]]\n'])
def test_a_component_has_the_digest_that_the_specification_computes(name: str) -> None:
    draw = random.Random(name)
    shapes: dict[str, tuple[str, Shape]] = {name: ("F32", (3, 2)), "blocks.9.weight": ("C128", ()), "b": ("BF16", (0,))}
    data = {key: draw.randbytes(prod(shape) * DTYPE_BYTES[dtype]) for key, (dtype, shape) in shapes.items()}
    names = {**{key: key for key in shapes}, "alias": name, "~": "blocks.9.weight"}
    expected = DEFINED["component"](sorted((alias, *shapes[key], data[key]) for alias, key in names.items()))
    rows = [(alias, *shapes[key], DEFINED["checksum"](data[key])) for alias, key in names.items()]
    assert component_digest(rows) == component_digest(rows[::-1]) == expected


def test_values_have_the_digest_that_the_specification_computes() -> None:
    values = [("0", "w", "lr", 0.5), ("0", "é", "state step", {"v": "3", "$": "int"}), ("0", "a\n", "lr", None)]
    expected = DEFINED["checksum"](b"".join(sorted(DEFINED["line"](value) for value in values)))
    assert values_digest(values) == values_digest(values[::-1]) == expected
