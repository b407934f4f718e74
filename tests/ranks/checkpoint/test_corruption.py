"""No damaged byte loads: whatever is changed in whichever file, a load refuses it and ``verify`` names the file.

The oracle is the change itself. Each is made in a copy of a checkpoint of 2 ranks and undone again.
``python -m tests.sweeps.faults`` flips a bit of every byte.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_shardckpt.cli import main
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.tools.verify import verify
from tests.support import small
from tests.support.pool import run_ranks
from tests.support.small import ROOT

UNREAD = {"trainer-state-dist-00001.json"}  # of rank 1, which a load in one process has no use for


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves of the same state, one beside the other; tests must not change them."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, small.save, str(folder / "a.ckpt"), str(folder / "b.ckpt"))
    return folder / "a.ckpt"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "a.ckpt"))


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def refusal(path: Path) -> ShardCkptError | None:
    """How a load into live tensors ends; one that succeeds must fill them with what was saved."""
    try:
        found = small.load(str(path))
    except (CorruptionError, FormatError, CheckpointNotFoundError) as error:
        return error
    assert all(torch.equal(found[n], small.drawn(shape, i)) for i, (n, shape) in enumerate(small.SHAPES.items()))
    return None


def check_found(path: Path, name: str, *, quick: bool = False) -> None:
    """``verify`` and a load both name the file, and of a shard file the rank; of its data the tensor, too."""
    lines = [str(finding) for finding in verify(path, quick=quick).findings]
    rank = re.search(r"-dist-(\d+)-shard", name)
    assert lines and all(line.startswith(name + (f" (rank {int(rank[1])})" if rank else "")) for line in lines), lines
    error = refusal(path)
    assert error is not None or name in UNREAD, f"loaded in spite of a change in {name}"
    assert error is None or name in str(error), error
    if error is not None and "corrupted data" in str(error):
        assert rank and f"written by rank {int(rank[1])}" in str(error)
        tensors = {"o": [f"0/{n}/exp_avg" for n in small.SHAPES], "m": list(small.SHAPES), "t": ["callbacks/EMA/mean"]}
        assert any(repr(tensor) in str(error) for tensor in tensors[name[0]]), error
        assert any(": corrupted data, bytes" in line and "'" in line for line in lines)


def with_content(path: Path, name: str, content: bytes, *, quick: bool = False) -> bool:
    """Check that a file with other content is found; then it has its own again. False: it is the same content."""
    before = (path / name).read_bytes()
    if content == before:
        return False
    (path / name).write_bytes(content)
    check_found(path, name, quick=quick)
    (path / name).write_bytes(before)
    return True


def flipped(content: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


def damaged(number: int, content: bytes) -> Iterator[bytes]:
    """Flipped bits and ranges of zeros."""
    for at in range(number % 111, len(content), 111):
        yield flipped(content, at, (at * 5 + number) % 8)
    for at in range(0, len(content), 1024):
        yield content[:at] + bytes(len(content[at : at + 1024])) + content[at + 1024 :]


def test_flipped_bits_and_zeroed_ranges_of_any_file_are_found(copy: Path) -> None:
    count = 0
    for number, name in enumerate(names(copy)):
        for content in damaged(number, (copy / name).read_bytes()):
            count += with_content(copy, name, content)
    assert count > 90
    assert refusal(copy) is None and not verify(copy).findings


def test_truncated_files_are_found_even_quickly(copy: Path) -> None:
    """The root index tells the sizes of the others, so that a few of theirs will do."""
    for number, name in enumerate(names(copy)):
        content, step = (copy / name).read_bytes(), 19 if name == ROOT else 191
        for length in {0, 1, 7, 8, 9, len(content) - 1, *range(number, len(content), step)}:
            with_content(copy, name, content[:length], quick=True)


@pytest.mark.parametrize("extra", [b"\0", b"}", b"\n", bytes(4096)], ids=repr)
def test_appended_bytes_are_found_even_quickly(copy: Path, extra: bytes) -> None:
    for name in names(copy):
        with_content(copy, name, (copy / name).read_bytes() + extra, quick=True)


def test_files_of_two_ranks_cannot_change_places(copy: Path) -> None:
    pairs = [(n, n.replace("dist-00000", "dist-00001")) for n in names(copy) if "dist-00000" in n]
    pairs = [(a, b) for a, b in pairs if (copy / b).exists() and (copy / a).read_bytes() != (copy / b).read_bytes()]
    assert len(pairs) == 5
    for a, b in pairs:
        first, second = (copy / a).read_bytes(), (copy / b).read_bytes()
        (copy / a).write_bytes(second)
        (copy / b).write_bytes(first)
        found = {finding.file for finding in verify(copy).findings}
        assert {a, b} <= found and refusal(copy) is not None, (a, found)
        (copy / a).write_bytes(first)
        (copy / b).write_bytes(second)


def test_a_file_of_another_save_of_the_same_state_is_found(saved: Path, copy: Path) -> None:
    other = saved.with_name("b.ckpt")
    found = [with_content(copy, n, (other / n).read_bytes(), quick=True) for n in names(copy) if n != ROOT]
    assert sum(found) >= 10  # documents are the same bytes in both saves
    shutil.copy(other / ROOT, copy / ROOT)
    assert "of another save" in str(refusal(copy))
    assert {f.file for f in verify(copy, quick=True).findings} == {n for n in names(copy) if "-meta-" in n}


def test_a_missing_file_is_named_even_quickly(copy: Path) -> None:
    for name in names(copy):
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        if name == ROOT:
            with pytest.raises(CheckpointNotFoundError, match="is not a complete checkpoint"):
                verify(copy)
            assert isinstance(refusal(copy), CheckpointNotFoundError)
        else:
            check_found(copy, name, quick=True)
        (copy / name).write_bytes(content)


def test_a_header_that_describes_other_tensors_than_the_index_is_found(copy: Path) -> None:
    """As a program could write it: its checksum is right, and a load reads what the index says."""
    content = (copy / small.SHARD).read_bytes().replace(b'"F32"', b'"I32"', 1)
    start = content[: 8 + int.from_bytes(content[:8], "little")]
    (copy / small.SHARD).write_bytes(content)
    small.edit(copy, small.INDEX, lambda index: index["files"].update({small.SHARD: [len(content), checksum(start)]}))
    assert [f.file for f in verify(copy, quick=True).findings] == [small.SHARD] and refusal(copy) is None


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_verify_prints_a_line_for_each_finding_and_ends_with_status_1(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for quick in ([], ["--quick"]):
        assert main(["verify", str(copy), *quick]) == 0
        assert f"is {'complete' if quick else 'whole'}: {len(names(copy))} files" in capsys.readouterr().out
    damaged = [small.SHARD, small.OTHER_SHARD, "optimizer-dist-00001-shard-00001.safetensors"]
    for name in damaged:
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(flipped(content, len(content) - 1, 3))
    (copy / "a\nname\x1b[2J").write_text("not ours")
    assert main(["verify", str(copy)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[:-1]] == damaged
    assert lines[-1].startswith(r"a\nname\x1b[2J: extra")  # one line, and nothing that a terminal would obey
    assert last.startswith("4 problems in ")
