"""Every MUST of FORMAT.md: one malformed checkpoint and one error per rule; and the example, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Axis, DimShard, Layout
from lightning_shardckpt.format.plan import plan_save, split_into_files
from lightning_shardckpt.format.safetensors_header import plan_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, checksum
from lightning_shardckpt.state.documents import parse_document
from lightning_shardckpt.state.json_tree import TAGS, decode
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import worlds
from tests.support.storages import MemoryStorage
from tests.support.worlds import PATH, TOPOLOGIES, mesh, table

SPECIFICATION = (Path(__file__).parents[3] / "lightning_shardckpt" / "FORMAT.md").read_text()
SHARD, INDEX, OTHER_INDEX = (
    "model-dist-00000-shard-00001.safetensors",
    "model-meta-dist-00000.index.json",
    "model-meta-dist-00001.index.json",
)
FSDP = Layout((Axis("shard", 2, 1),), (DimShard(0, 0),))
TENSORS = {
    "weight": TensorSpec("F32", (3, 2), FSDP, ((0, 2),)),
    "bias": TensorSpec("BF16", (5,), REPLICATED, ((0, 2),)),
}

Files = dict[str, bytes]


def saved() -> Files:
    storage = MemoryStorage()
    table = dict(sorted(TENSORS.items()))
    about = {"step": 3, "epoch": 0, "topology": {"data_parallel_shard": 2}, "software": {"torch": "2.13.0"}}
    worlds.save(storage, {"model": table}, 2, **about)  # type: ignore[arg-type]
    return storage.checkpoints[PATH]


def load(files: Files) -> None:
    """Everything, as a model of one process would."""
    storage = MemoryStorage()
    storage.checkpoints[PATH] = files
    with Checkpoint(storage, PATH) as checkpoint:
        for key in TENSORS:
            worlds.load(checkpoint, key, REPLICATED, 0)


# ── edits that keep everything else right: the checksums above the edited place are computed anew ────────────────────


def edited(content: bytes, path: str, new: Any) -> bytes:
    value = inside = json.loads(content)
    *above, last = path.split("/")
    for part in above:
        inside = inside[int(part) if isinstance(inside, list) else part]
    if new is None:
        del inside[last]
    else:
        inside[int(last) if isinstance(inside, list) else last] = new
    return json.dumps(value).encode()


def sealed(content: bytes) -> bytes:
    rest = json.dumps({k: v for k, v in json.loads(content).items() if k != "checksum"}).encode()[1:]
    return b'{"checksum":"' + checksum(rest).encode() + b'",\n' + rest


Change = Callable[[Files], Any]


def with_root(path: str, new: Any) -> Change:
    return lambda files: files.update({ROOT_NAME: sealed(edited(files[ROOT_NAME], path, new))})


def put_index(files: Files, content: bytes, name: str = INDEX) -> None:
    files[name] = content
    number = "0" if name == INDEX else "1"
    with_root(f"components/model/indexes/{number}", [name, len(content), checksum(content)])(files)


def with_index(path: str, new: Any, name: str = INDEX) -> Change:
    return lambda files: put_index(files, edited(files[name], path, new), name)


def with_bytes(old: bytes, new: bytes) -> Change:
    return lambda files: put_index(files, files[INDEX].replace(old, new, 1))


def with_more(more: bytes) -> Change:
    return lambda files: put_index(files, files[INDEX][:-1] + b',"x":' + more + b"}")


def flip(name: str, at: int) -> Change:
    return lambda files: files.update({name: files[name][:at] + bytes([files[name][at] ^ 4]) + files[name][at + 1 :]})


def drop(name: str) -> Change:
    return lambda files: files.pop(name)


def with_twins(files: Files) -> None:
    """Forty tensors in the same bytes: more than the file has."""
    shards = json.loads(files[INDEX])["metadata"]
    with_index("metadata", {**shards, **{f"{i}": shards["bias"] for i in range(40)}})(files)


LAYOUT = "layouts/1"
TENSOR = "components/model/tensors/weight"
AXES, CUTS, HOLDERS, ALIASES = f"{LAYOUT}/axes", f"{LAYOUT}/cuts", f"{LAYOUT}/holders", "components/model/aliases"
BIAS = "metadata/bias"
BROKEN: list[tuple[str, Change, type[ShardCkptError], str]] = [
    ("F1", drop(ROOT_NAME), CheckpointNotFoundError, "no checkpoint.index.json"),
    ("F2", flip(ROOT_NAME, 100), CorruptionError, "checkpoint.index.json: the root index is damaged"),
    ("F3", with_root("format", "other"), FormatError, "not an index of lightning-shardckpt"),
    ("F3", with_root("version", "1.1"), FormatError, "format version '1.1', .* use the lightning-shardckpt that wrote"),
    ("F3", with_index("version", 1), FormatError, f"{INDEX}: format version 1"),
    ("F4", with_root("save_id", "0" * 32), CorruptionError, f"{INDEX}: belongs to save 5afe"),
    ("F4", with_index("save_id", "0" * 32), CorruptionError, f"{INDEX}: belongs to save 0000"),
    ("F4", with_root("save_id", "5AFE" * 8), FormatError, "is not a save id"),
    ("F5", with_root("components/model/indexes/0/0", "../x"), FormatError, "'../x' is not a file name"),
    ("F5", with_index(f"{BIAS}/file", "/etc/passwd"), FormatError, "'/etc/passwd' is not a file name"),
    ("F7", lambda f: f.update({SHARD: f[SHARD][:-1]}), CorruptionError, f"{SHARD}: 353 bytes, expected 354"),
    ("F7", drop(SHARD), CorruptionError, f"{SHARD}: the file is missing"),
    ("F8", flip(INDEX, 200), CorruptionError, f"{INDEX}: damaged, or of another save"),
    ("F9", with_bytes(b'"rank":0,', b'"rank":0,"rank":0,'), FormatError, f"{INDEX}: .*: duplicate key 'rank'"),
    ("F9", with_bytes(b'"rank":0', b'"rank":NaN'), FormatError, "NaN is not JSON"),
    ("F9", with_bytes(b"{", b"\xff{"), FormatError, f"{INDEX}: not valid JSON"),
    ("F9", with_bytes(b"{", b" " * (1 << 26) + b"{"), FormatError, "bytes, more than the limit of 67108864"),
    ("F9", with_more(b"[" + b"0," * (1 << 21) + b"0]"), FormatError, f"{INDEX}: JSON of more than 2097152 values"),
    ("F9", with_more(b"[" * 128 + b"]" * 128), FormatError, f"{INDEX}: .*: nested deeper than 128 levels"),
    ("F9", with_root("software", {"\ud800": "1"}), FormatError, "is not text that UTF-8 can hold"),
    ("F10", flip(SHARD, 50), CorruptionError, f"{SHARD}: the header of the shard file is damaged"),
    ("F10", flip(SHARD, 6), CorruptionError, f"{SHARD}: the header claims"),
    ("F11", flip(SHARD, 353), CorruptionError, f"data of 'bias' in {SHARD}, written by rank 0, bytes 344 to 354"),
    ("F11", with_index(f"{BIAS}/block", 5 << 20), FormatError, "checksums of 5242880 bytes each, expected 1 to 4"),
    ("F11", with_index(f"{BIAS}/block", 4), FormatError, "16 digits of checksums, expected 16 for each of 3"),
    ("F11", with_index(f"{BIAS}/checksums", "XYZ"), FormatError, "'XYZ' is not a string of checksums"),
    ("F13", with_root(f"{TENSOR}/0", "F31"), FormatError, "unknown dtype 'F31'"),
    ("F14", with_index(f"{BIAS}/offsets", [1]), FormatError, r"box \(1,\)\.\.\(6,\) lies outside shape \(5,\)"),
    ("F15", with_index(f"{BIAS}/begin", 350), FormatError, f"'bias' ends at byte 360 of {SHARD}, which has 354"),
    ("F15", with_twins, FormatError, rf"'\w+' and the tensors before it share bytes of {SHARD}"),
    ("F16", with_root(f"{TENSOR}/1", [1] * 65), FormatError, "65 dims, more than 64"),
    ("F16", with_root(f"{TENSOR}/1", [0, 1 << 62]), FormatError, "more than 2\\^63 bytes"),
    ("F16", with_root("step", "3"), FormatError, "'3' is not a size"),
    ("F17", with_root(AXES, [["a", 0, 1]]), FormatError, "without size"),
    ("F17", with_root(AXES, [["a", 2, 1], ["b", 2, 1]]), FormatError, "not a layout: its axes overlap"),
    ("F17", with_root(CUTS, [[1, 0, 1]]), FormatError, "along no axis"),
    ("F17", with_root(CUTS, [[0, 0, 0]]), FormatError, "into no blocks"),
    ("F17", with_root(CUTS, [[0, 0, 1], [0, 1, 1]]), FormatError, "not a layout: two cuts along one axis"),
    ("F17", with_root(CUTS, [[0, 0, 1 << 17]]), FormatError, "not a layout: more than 65536 blocks"),
    ("F17", with_root(f"{LAYOUT}/order", [1, 1]), FormatError, "two positions"),
    ("F18", with_root(HOLDERS, [[0, 3]]), FormatError, "in a world of 2"),
    ("F18", with_root("world_size", 1 << 21), FormatError, "a world of 2097152 ranks"),
    ("F19", with_root(CUTS, [[0, 2, 1]]), FormatError, r"cuts dim 2 of shape \(3, 2\)"),
    ("F20", with_root(HOLDERS, [[0, 1]]), FormatError, r"the boxes of 'weight'.*\(2, 0\)\.\.\(3, 2\)"),
    ("F21", with_index("metadata", {}, OTHER_INDEX), FormatError, r"rank 1 has no box \(2, 0\)\.\.\(3, 2\) of"),
    ("F21", with_root("components/model/indexes/1", None), FormatError, "rank 1 should have written some of"),
    ("F21", with_root(f"{TENSOR}/1", [4, 2]), FormatError, "of 'weight', F32 "),
    ("F21", with_root(f"{TENSOR}/1", [1 << 40, 2]), FormatError, "the checksums of 'weight'.* do not fit into indexes"),
    ("F21", with_root("components/model/indexes/2", [INDEX, 1, "0" * 16]), FormatError, "ranks .*'2'.* in a world"),
    ("F22", with_root(ALIASES, {"tied": "none"}), FormatError, "alias 'tied' of 'none'"),
    ("F23", with_root("components/other", {}), FormatError, "unknown component 'other'"),
    # what has another structure than the text shows
    ("F16", with_root("world_size", 0), FormatError, "world of 0"),
    ("F16", with_root("topology", {"a": -1}), FormatError, "-1 is not a size"),
    ("F17", with_root(f"{AXES}/0", ["a", 2]), FormatError, "ValueError"),
    ("F17", with_root(f"{LAYOUT}/order", 7), FormatError, "TypeError"),
    ("F13", with_root(f"{TENSOR}/0", ["F32"]), FormatError, "unknown dtype"),
    ("F17", with_root(f"{TENSOR}/2", 9), FormatError, "IndexError"),
    ("F8", with_root("components/model/indexes/0/2", "0123456789ABCDEF"), FormatError, "is not a checksum"),
    ("F21", with_root("components/model/indexes", {"one": ["x", 1, "0" * 16]}), FormatError, "ValueError"),
    ("F5", with_root("documents", {"..": [1, "0" * 16]}), FormatError, "is not a file name"),
    ("F5", with_root("prefix", "../"), FormatError, "prefix"),
    ("F5", with_root("prefix", "0" * 16 + "-"), FormatError, "prefix"),  # of another save
    ("F5", with_index("files", {"../x": [1, "0" * 16]}), FormatError, "not a file name"),
    ("F16", with_index(f"{BIAS}/lengths", [1 << 62]), FormatError, "lies outside"),
    ("F3", with_root("software", None), FormatError, "software"),
    ("F3", with_index(f"{BIAS}/more", 5), FormatError, "TypeError"),
]


@pytest.mark.parametrize(("rule", "change", "kind", "words"), BROKEN, ids=[f"{r}-{w[:40]}" for r, _, _, w in BROKEN])
def test_a_broken_rule_is_one_error(rule: str, change: Change, kind: type[ShardCkptError], words: str) -> None:
    files = saved()
    load(files)
    change(files)
    with pytest.raises(kind, match=f"(?s){words}"):
        load(files)


def test_f6_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    for name, content in saved().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / SHARD).rename(tmp_path.parent / "elsewhere")
    (tmp_path / SHARD).symlink_to(tmp_path.parent / "elsewhere")
    with (
        Checkpoint(LocalStorage(), str(tmp_path)) as checkpoint,
        pytest.raises(FormatError, match=rf"{SHARD}: .* regular files only"),
    ):
        worlds.load(checkpoint, "bias", REPLICATED, 0)


def test_f12_a_file_holds_one_box_of_a_tensor_and_no_tensor_called_metadata() -> None:
    packed = {"qkv": TensorSpec("F32", (12, 2), mesh(2, cuts=(DimShard(0, 0, 3),)), ((0, 2),))}
    assert [len(found) for found in split_into_files(plan_save(packed, 0), 1 << 30)] == [1, 1, 1]
    with pytest.raises(FormatError, match="__metadata__"):
        plan_header([("__metadata__", "F32", (1,), (0,))])


def test_f24_an_unknown_tag_is_refused() -> None:
    with pytest.raises(FormatError, match=r"'os\.system' is malformed"):
        decode({"callbacks": [{"$": "os.system", "v": "true"}]}, dict[str, torch.Tensor]().__getitem__)


@pytest.mark.parametrize(
    ("role", "value", "words"),
    [
        ("trainer", [], "the document is not an object"),
        ("optimizer", {"1": {}}, "the document has keys \\['1'\\], expected 0 to 0"),
        ("optimizer", {"0": {"groups": {}, "values": {}}}, "0 is not an object with groups, numbered, values"),
        ("frozen", {"w": ["F33", [2]]}, "w/0: unknown dtype 'F33'"),
        ("frozen", {"w": ["F32", [-2]]}, "w/1: -2 is not a size"),
        ("peft", {"adapters": {}}, "adapters is not a list"),
        ("peft", {"adapters": [{"name": "a/b", "prefix": "", "root": "", "config": ""}]}, "adapters/0/name: 'a/b' is"),
    ],
)
def test_f24_a_document_has_the_structure_of_its_role(role: str, value: Any, words: str) -> None:
    with pytest.raises(FormatError, match=f"file x: {words}"):
        parse_document(role, json.dumps(value).encode(), "file x")


def test_every_rule_has_a_test() -> None:
    rules = re.findall(r"^- \*\*(F\d+)\*\*", SPECIFICATION, re.M)
    assert rules == [f"F{i}" for i in range(1, len(rules) + 1)]
    apart = {name.split("_")[1].upper() for name in globals() if re.match(r"test_f\d", name)}
    assert {rule for rule, *_ in BROKEN} | apart == set(rules)


def test_the_example_is_what_is_written() -> None:
    root, index = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", SPECIFICATION, re.S))
    files = saved()
    line, _, rest = files[ROOT_NAME].partition(b"\n")
    assert line == b'{"checksum":"' + checksum(rest).encode() + b'",'
    assert json.loads(b"{" + rest) == root
    assert json.loads(files[OTHER_INDEX]) == index


def test_the_bytes_of_version_1_0_never_change() -> None:
    digests = {name: checksum(content) for name, content in saved().items()}
    assert digests == {
        "checkpoint.index.json": "57cffd94ca0b94ea",
        "model-dist-00000-shard-00001.safetensors": "34c5d0b86aefe1e2",
        "model-dist-00001-shard-00001.safetensors": "bae8c82c857c6038",
        "model-meta-dist-00000.index.json": "fc560b57dcac2878",
        "model-meta-dist-00001.index.json": "e96452148a21d605",
    }


def test_the_writers_of_version_1_0_never_change() -> None:
    """A reader computes who wrote what: with another rule, it would not find the boxes of older checkpoints."""
    found = []
    for name, (_, _, world) in sorted(TOPOLOGIES.items()):
        layout = table(name)["embed"].layout
        more = {f"more{i}": TensorSpec("F32", (7 * i, 33 + i), layout, ((0, world),)) for i in range(40)}
        planned = [piece for rank in range(world) for piece in plan_save({**table(name), **more}, rank)]
        found += sorted((name, p.key, p.part.box.start, p.part.box.stop, p.writer) for p in planned)
    assert (len(found), checksum(json.dumps(found).encode())) == (2017, "26aa780dd8aabeea")


def test_the_tables_name_every_dtype_and_every_tag() -> None:
    (listed,) = re.findall(r"Names of dtypes are those of safetensors: `(.*?)`", SPECIFICATION)
    assert {*listed.split(), "C128"} == DTYPE_BYTES.keys()
    rows = SPECIFICATION.partition("| tag | `v` |")[2].partition("\n\n")[0].splitlines()
    assert {tag for row in rows if "|" in row for tag in re.findall(r"`([a-z]+)`", row.split("|")[1])} == TAGS


def test_unknown_keys_are_passed_over() -> None:
    files = saved()
    with_index("later", {"addition": 1})(files)
    with_root("later", {"addition": 1})(files)
    load(files)
