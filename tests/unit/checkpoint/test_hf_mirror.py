"""Whole tensors that ranks write together. Oracles: the tensors that were cut, and the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors

from lightning_shardckpt.checkpoint.hf_mirror import HFMirror, plan_mirror
from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import TensorSpec
from lightning_shardckpt.format.layout import REPLICATED
from lightning_shardckpt.format.plan import plan_save
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from tests.support import worlds
from tests.support.memory_storage import MemoryStorage
from tests.unit.format.test_plan import TOPOLOGIES, table

LIMIT = 1 << 20


def written(mirror: list[OutputFile], tensors: dict[str, TensorSpec], world: int) -> dict[str, bytes]:
    """The files that the ranks of a world make, with what each one has in its memory."""
    storage = MemoryStorage()
    draft = storage.draft("/x", worlds.SAVE_ID)
    for rank in reversed(range(world)):
        mirroring = HFMirror(mirror, {"config.json": b"{}"} if rank == 0 else {})
        mirroring.write(
            draft,
            plan_save(tensors, rank),
            lambda p, rank=rank: worlds.content(worlds.local(p.key, p.spec, rank)[worlds.at(p.part.local)]),
        )
        if rank == 0:
            listed = mirroring.finish(draft)
    draft.publish()
    found = storage.checkpoints["/x"]
    assert {name: info.nbytes for name, info in listed.items()} == {name: len(data) for name, data in found.items()}
    return found


def whole(key: str, spec: TensorSpec) -> OutputTensor:
    return OutputTensor(key.removeprefix("model."), spec.dtype, spec.shape, ("model", key))


def tensors_of(topology: str) -> dict[str, TensorSpec]:
    return {f"model.{key}": spec for key, spec in table(topology).items() if spec.dtype != "C128"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("limit", [1 << 30, 50_000])
def test_ranks_of_any_topology_fill_whole_tensors(topology: str, limit: int, tmp_path: Path) -> None:
    tensors = tensors_of(topology)
    exported = [whole(key, spec) for key, spec in tensors.items() if key != "model.qkv"]
    qkv = tensors["model.qkv"]
    boxes = {"q": Box((0, 0), (3, 7)), "k": Box((3, 0), (6, 7)), "v": Box((6, 2), (9, 5))}
    exported += [
        OutputTensor(name, qkv.dtype, (box.numel,), ("model", "model.qkv"), box) for name, box in boxes.items()
    ]
    mirror = plan_mirror(exported, limit)
    found = written(mirror, tensors, TOPOLOGIES[topology][2])
    assert found.pop("config.json") == b"{}"
    index = found.pop("model.safetensors.index.json", None)
    assert (len(found) > 1) == (limit == 50_000) == (index is not None)
    loaded: dict[str, bytes] = {}
    for name, content in found.items():
        (tmp_path / name).write_bytes(content)
        parsed = dict(safetensors.deserialize(content))
        loaded |= {key: bytes(value["data"]) for key, value in parsed.items()}
        assert len(parsed) == 1 or sum(len(value["data"]) for value in parsed.values()) <= limit
        if index is not None:
            assert {json.loads(index)["weight_map"][key] for key in parsed} == {name}
    expected = {w.name: worlds.whole(w.source[1], tensors[w.source[1]]) for w in exported if w.box is None}
    packed = worlds.whole("model.qkv", qkv)
    expected |= {name: packed[worlds.at(box)] for name, box in boxes.items()}
    assert loaded == {name: value.tobytes() for name, value in expected.items()}
    if index is not None:
        total = sum(map(len, loaded.values()))
        assert json.loads(index)["metadata"] == {"total_size": total}
        assert sorted(found)[0].startswith("model-00001-of-0000")


def test_every_tensor_is_aligned_to_its_elements() -> None:
    tensors = tensors_of("single")
    mirror = plan_mirror([whole(key, spec) for key, spec in tensors.items()], LIMIT)
    (file,) = mirror
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
    places = zip(file.tensors, file.begins, strict=True)
    assert [tensor.name for tensor, begin in places if begin % sizes[tensor.dtype]] == []


def test_complex_numbers_that_safetensors_does_not_have_are_refused() -> None:
    spec = TensorSpec("C128", (2,), REPLICATED, ((0, 1),))
    with pytest.raises(FormatError, match="is complex128, which safetensors lacks"):
        plan_mirror([whole("model.x", spec)], LIMIT)


def test_pieces_of_a_file_on_disk_come_together_in_any_order(tmp_path: Path) -> None:
    storage = LocalStorage()
    drafts = [storage.draft(str(tmp_path / "x.ckpt"), worlds.SAVE_ID) for _ in range(2)]
    drafts[0].begin()
    drafts[1].write_pieces("shared", [(6, b"67"), (2, memoryview(b"23"))])
    drafts[0].write_pieces("shared", [(4, b"45"), (0, b"01")])
    drafts[0].write("checkpoint.index.json", [b"{}"])
    drafts[0].publish()
    assert (tmp_path / "x.ckpt" / "shared").read_bytes() == b"01234567"
