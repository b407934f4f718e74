"""One state has one digest: on any topology, in any format, recorded or computed. Oracle: equal and unequal states."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc64nvme
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lightning_shardckpt
from lightning_shardckpt.checkpoint.checkpoint import RunInfo, save
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.tensor_bytes import host_bytes
from lightning_shardckpt.tools.diff import diff
from lightning_shardckpt.tools.digest import digest
from lightning_shardckpt.tools.verify import verify
from tests.support import zoo
from tests.support.pool import run_ranks

MEANING = ("tensors", "components", "optimizer_values", "whole")


def meaning(path: Path, **options: Any) -> dict[str, Any]:
    """All but how it was found; tensors by name."""
    found = digest(path, **options)
    tensors = {(t["component"], t["name"]): t for t in found["tensors"]}
    return {**{key: found[key] for key in MEANING}, "tensors": tensors}


def save_zoo(folder: str) -> None:
    zoo.save(f"{folder}/zoo.ckpt")
    zoo.save(f"{folder}/silent.ckpt", digest=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of one state: zoo by 4 ranks, silent by 4 ranks without digests, alone by one."""
    folder = tmp_path_factory.mktemp("digests")
    run_ranks(4, save_zoo, str(folder))
    zoo.save(str(folder / "alone.ckpt"))
    return folder


def test_what_the_save_recorded_is_what_the_tensors_have_on_any_topology(saved: Path) -> None:
    recorded = meaning(saved / "zoo.ckpt")
    assert digest(saved / "zoo.ckpt")["recorded"] and not digest(saved / "silent.ckpt")["recorded"]
    names = {name for component, name in recorded["tensors"] if component == "model"}
    assert names == {*zoo.whole_tensors(), "tied.float64"}
    assert recorded == meaning(saved / "zoo.ckpt", recompute=True) == meaning(saved / "silent.ckpt")
    assert recorded == meaning(saved / "alone.ckpt") == meaning(saved / "alone.ckpt", recompute=True)
    tensors = {**zoo.whole_tensors(), "tied.float64": zoo.whole_tensors()["rows.float64"]}
    expected = {name: f"{crc64nvme(bytes(host_bytes(tensor))):016x}" for name, tensor in tensors.items()}
    assert {t["name"]: t["digest"] for key, t in recorded["tensors"].items() if key[0] == "model"} == expected


def test_other_formats_of_the_same_state_have_the_same(saved: Path, tmp_path: Path) -> None:
    expected = meaning(saved / "zoo.ckpt")
    file = tmp_path / "zoo.pt"
    consolidate(saved / "zoo.ckpt", file)
    assert meaning(file) == expected
    content = torch.load(file)
    in_dcp = {name: value for name, value in content["state_dict"].items() if value.numel()}
    with warnings.catch_warnings(action="ignore"):  # of one process
        dcp.save({"model": in_dcp}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    of_dcp = meaning(tmp_path / "dcp")["tensors"]
    assert {("model", name) for name in in_dcp} == of_dcp.keys()
    assert all(of_dcp[key] == expected["tensors"][key] for key in of_dcp)


def test_safetensors_have_the_same(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    lightning_shardckpt.save(tmp_path / "a.ckpt", {"model": model})
    consolidate(tmp_path / "a.ckpt", tmp_path / "files", format="safetensors", split="one_file_per_tensor")
    found = digest(tmp_path / "files")
    assert found["components"] == digest(tmp_path / "a.ckpt")["components"]
    assert found["whole"] == digest(tmp_path / "a.ckpt")["whole"]


@pytest.mark.slow
def test_a_hugging_face_export_has_them_by_its_own_names(tmp_path: Path) -> None:
    """Of a model whose experts are stacked, which an export takes apart, and whose embeddings are tied."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=20, num_hidden_layers=1, num_local_experts=3, tie_word_embeddings=True, **sizes)
    wrapped = torch.nn.ModuleDict({"net": MixtralForCausalLM(config)})
    lightning_shardckpt.save(tmp_path / "a.ckpt", {"model": wrapped})
    consolidate(tmp_path / "a.ckpt", tmp_path / "hf", format="huggingface")
    stored, named, exported = (
        digest(tmp_path / "a.ckpt"),
        digest(tmp_path / "a.ckpt", names="huggingface"),
        digest(tmp_path / "hf"),
    )
    assert len({t["name"] for t in named["tensors"]} - {t["name"].removeprefix("net.") for t in stored["tensors"]}) >= 9
    key = lambda t: t["name"]  # noqa: E731
    assert sorted(named["tensors"], key=key) == sorted(exported["tensors"], key=key)
    assert named["whole"] == exported["whole"] != stored["whole"]


def save_stages(path: str) -> None:
    """Each rank has tensors that the others lack, as pipeline stages have, and all have one."""
    ranks = Ranks.of_default_group(60)
    own = {f"layer{ranks.rank}": torch.full((3, 5), float(ranks.rank)), "shared": torch.arange(7)}
    snapshot = Snapshot({"model": Leaves(own)}, {}, {})
    save(path, lambda: snapshot, ranks=ranks, about=RunInfo(), options=SaveOptions())


def test_pipeline_stages_have_that_of_one_process(tmp_path: Path) -> None:
    run_ranks(3, save_stages, str(tmp_path / "stages.ckpt"))
    state = {**{f"layer{i}": torch.full((3, 5), float(i)) for i in range(3)}, "shared": torch.arange(7)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, tmp_path / "whole.ckpt")
    found = digest(tmp_path / "stages.ckpt")
    assert found["recorded"]
    assert found["components"] == digest(tmp_path / "whole.ckpt")["components"]


def save_at_odds(path: str) -> None:
    ranks = Ranks.of_default_group(60)
    snapshot = Snapshot({"model": Leaves({f"layer{ranks.rank}": torch.arange(9.0)})}, {}, {})
    save(path, lambda: snapshot, ranks=ranks, about=RunInfo(), options=SaveOptions(digest=ranks.rank == 0))


def test_nothing_is_recorded_that_only_some_ranks_know(tmp_path: Path) -> None:
    run_ranks(2, save_at_odds, str(tmp_path / "odd.ckpt"))
    assert not digest(tmp_path / "odd.ckpt")["recorded"]


def edit(path: Path, change: dict[str, str]) -> None:
    """Change texts in the index of rank 1, and make the root index vouch for it."""
    index, root = path / "model-meta-dist-00001.index.json", path / ROOT_NAME
    text = index.read_text()
    was = f'{len(text.encode())},"{checksum(text.encode())}"'
    for old, new in change.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    index.write_text(text)
    body = root.read_text().partition("\n")[2].replace(was, f'{len(text.encode())},"{checksum(text.encode())}"')
    root.write_text(f'{{"checksum":"{checksum(body.encode())}",\n{body}')


def test_verify_computes_them_anew_and_names_the_tensor(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(saved / "zoo.ckpt", tmp_path / "zoo.ckpt"))
    assert main(["verify", str(path), "--digest"]) == 0
    assert verify(saved / "silent.ckpt", digest=True).findings[0].problem.startswith("no digests were recorded")
    index = json.loads((path / "model-meta-dist-00001.index.json").read_text())
    digits, first = index["crc64"], next(iter(index["metadata"]))
    edit(path, {f'"{digits}"': f'"{int(digits[:16], 16) ^ 1:016x}{digits[16:]}"'})
    assert not verify(path).findings
    (finding,) = verify(path, digest=True).findings
    assert "add up to another" in finding.problem
    with pytest.raises(CorruptionError, match=r"'model'.*add up to another"):
        digest(path)
    assert digest(path, recompute=True)["whole"] == digest(saved / "zoo.ckpt")["whole"]
    unknown = Path(shutil.copytree(saved / "zoo.ckpt", tmp_path / "unknown.ckpt"))
    edit(unknown, {'"columns.large":{': '"columns.other":{'})
    with pytest.raises(CorruptionError, match="add up to another"):
        digest(unknown)
    capsys.readouterr()
    with pytest.raises(ValueError, match="choose one"):
        verify(path, quick=True, digest=True)
    for text, problem in [
        (f"F{digits[1:]}", f"crc64 has {f'F{digits[1:16]}'!r} for {first!r}, and not lower-case hex digits"),
        (digits[1:], f"crc64 has not 16 digits for each of {len(digits) // 16} boxes"),
        (f"{digits}{digits[:16]}", "crc64 has not 16 digits"),
    ]:
        wrong = Path(shutil.copytree(saved / "zoo.ckpt", tmp_path / f"{len(text)}{text[0]}.ckpt"))
        edit(wrong, {f'"{digits}"': f'"{text}"'})
        (finding,) = [f for f in verify(wrong).findings if "crc64" in f.problem]
        assert problem in finding.problem and finding.file == "model-meta-dist-00001.index.json"
        with pytest.raises(FormatError, match=r"model-meta-dist-00001\.index\.json: crc64 has"):
            digest(wrong)


def test_what_an_earlier_version_recorded_is_not_taken_for_digests(saved: Path, tmp_path: Path) -> None:
    """It was never in a release, but directories have it."""
    path = Path(shutil.copytree(saved / "zoo.ckpt", tmp_path / "zoo.ckpt"))
    digits = json.loads((path / "model-meta-dist-00001.index.json").read_text())["crc64"]
    edit(path, {f'"crc64":"{digits}"': f'"digests":{{"columns.large":["{"0" * 32}"]}}'})
    with pytest.raises(CorruptionError, match="add up to another"):  # as the root index has one
        digest(path)
    root = path / ROOT_NAME
    body = re.sub(r'"crc64":"[0-9a-f]{16}"', '"digest":"' + "0" * 32 + '"', root.read_text().partition("\n")[2])
    root.write_text(f'{{"checksum":"{checksum(body.encode())}",\n{body}')
    assert not verify(path).findings
    found = digest(path)
    assert not found["recorded"] and found["whole"] == digest(saved / "zoo.ckpt")["whole"]


def test_a_quick_comparison_decides_across_topologies_where_both_recorded_them(saved: Path, tmp_path: Path) -> None:
    found = diff(saved / "zoo.ckpt", saved / "alone.ckpt", quick=True)["tensors"]
    assert not found["different"] and {t["component"] for t in found["undecided"]} <= {"trainer"}
    assert diff(saved / "silent.ckpt", saved / "alone.ckpt", quick=True)["tensors"]["undecided"]
    run_ranks(2, save_changed, str(tmp_path / "two.ckpt"), False)
    run_ranks(3, save_changed, str(tmp_path / "three.ckpt"), True)
    changed = diff(tmp_path / "two.ckpt", tmp_path / "three.ckpt", quick=True)["tensors"]
    assert [t["name"] for t in changed["different"]] == ["w"]
    assert (changed["same"], changed["undecided"]) == (1, [])


def save_changed(path: str, is_changed: bool) -> None:
    ranks, io = Ranks.of_default_group(60), ShardCkptIO(sync_files=False, digest=True)
    mesh = init_device_mesh("cpu", (ranks.world,))
    state = {name: torch.arange(35.0).view(7, 5) for name in ("v", "w")}
    if is_changed:
        state["w"][[2, 5]] = state["w"][[5, 2]]
    io.attach(ranks, torch.nn.Module(), {})
    state = {name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for name, t in state.items()}
    io.save_checkpoint({"state_dict": state}, path)


def test_the_command_shows_them(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = digest(saved / "zoo.ckpt")
    assert main(["digest", str(saved / "zoo.ckpt"), "--tensors", "rows.*"]) == 0
    output = capsys.readouterr().out
    assert "as the save recorded them" in output and expected["whole"] in output and "columns.large" not in output
    assert main(["digest", str(saved / "silent.ckpt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"] == expected["components"]
    assert main(["digest", str(saved / "alone.ckpt"), "--names", "huggingface"]) == 1
    assert "model of transformers" in capsys.readouterr().err
    assert main(["digest", str(saved / "zoo.ckpt"), "--tensors", "row.*"]) == 1
    assert "no tensor whose name matches 'row.*'" in capsys.readouterr().err
    assert main(["digest", str(saved / "none.ckpt")]) == 1
    assert "none.ckpt" in capsys.readouterr().err
