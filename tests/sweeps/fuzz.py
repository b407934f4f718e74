"""Structure-aware mutations of all that a reader parses: ``python -m tests.sweeps.fuzz --mutations 1000000 --seed 0``.

Indexes, headers and documents of a good checkpoint are changed as JSON (keys dropped, values replaced by odd ones or by
others of the same text, lists repeated) and as bytes, then given to the real parsers; a share is loaded whole, with all
checksums above the change made right. A mutant is refused with a documented error, or what it says is right.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, rank_index_from_json, root_from_json
from lightning_shardckpt.format.plan import check_cover, check_plausible, choose_replicas
from lightning_shardckpt.format.safetensors_header import parse_header
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.state import json_tree
from lightning_shardckpt.state.documents import parse_document
from tests.support import small
from tests.support.pool import run_ranks
from tests.support.small import sealed_text, tensors_in
from tests.support.storages import MemoryStorage

Files = dict[str, bytes]
LIMIT_S = 20  # of one mutation
LOADED = 50  # one in so many is loaded whole
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 64, 4096, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70),
    *(-(1 << 63), 0.5, 1.0, -0.0, 1e308, "", "0", "x", "w", "F32", "BF16", "C128", "../x", "a/b", ".x", "\0", "\ud800"),
    *("é", "$", "0" * 16, "f" * 32, "tuple", "stored", "tensor", [], {}, [0], [[0]], [1, 1], [1 << 62] * 3),
    *({"$": "tuple", "v": [1]}, {"$": "set", "v": [[1]]}, {"$": "stored", "v": "w"}, {"$": "int", "v": "1"}),
    {"$": "tensor", "dtype": "F32"},
)
BYTES = (b"", b"NaN", b"[" * 200, b'{"a":' * 200, b"\xff", b"\\ud800", b"1e999", b"9" * 5000)
BYTES += (b"\0", b'"', b",", b"}", b"-")


def good_files() -> Files:
    """A checkpoint of 2 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, small.save, f"{folder}/a.ckpt")
        return {path.name: path.read_bytes() for path in sorted(Path(folder, "a.ckpt").iterdir())}


# ── mutations ─────────────────────────────────────────────────────────────────────────────────────────────────────


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found = [(value, key) for key in (list(value) if isinstance(value, dict) else range(len(value)))]
    below = [inside[key] for inside, key in found if isinstance(inside[key], dict | list)]
    return found + [place for inside in below for place in places(inside)]


def mutate(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value in which one to three things are different."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        known = places(value)
        if not known:
            return draw.choice(ODD)
        inside, key = draw.choice(known)
        old = inside[key]
        match draw.randrange(8):
            case 0:
                del inside[key]
            case 1:
                other, name = draw.choice(known)
                with_other = other[name] if name in other or (isinstance(other, list) and name < len(other)) else None
                inside[key] = copy.deepcopy(with_other)
            case 2 if isinstance(old, int) and type(old) is int:
                inside[key] = old + draw.choice((-1, 1, 8, -8, old, 1 << 32))
            case 3 if isinstance(old, list) and old:
                inside[key] = old * draw.choice((2, 3, 100))
            case 4 if isinstance(old, list) and old:
                inside[key] = draw.sample(old, draw.randrange(len(old) + 1))
            case 5 if isinstance(inside, dict):
                inside[str(draw.choice(ODD))] = copy.deepcopy(old)
            case 6 if isinstance(old, str) and old:
                at = draw.randrange(len(old))
                inside[key] = old[:at] + draw.choice("0fx/.$\0é9A") + old[at + 1 :]
            case _:
                inside[key] = copy.deepcopy(draw.choice(ODD))
    return value


def scramble(text: bytes, draw: random.Random) -> bytes:
    """The same with some bytes replaced, taken out or repeated."""
    at, length = draw.randrange(len(text) + 1), draw.choice((0, 1, 1, 2, 8, 64))
    middle = draw.choice((draw.choice(BYTES), draw.randbytes(length), text[at : at + length] * 2))
    return text[:at] + middle + text[at + draw.choice((0, length)) :]


class Target:
    """One file of the good checkpoint: how a mutant of it is made, parsed and put in its place."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.is_header = name.endswith(".safetensors")
        self.length = int.from_bytes(content[:8], "little") if self.is_header else 0
        self.text = content[8 : 8 + self.length] if self.is_header else content
        self.value = json.loads(self.text)
        self.value.pop("checksum", None)

    def mutant(self, draw: random.Random) -> bytes:
        """The text of a mutant, sealed if it is a root index."""
        if draw.randrange(5) == 0:
            text = scramble(self.text.partition(b"\n")[2] if self.name == ROOT_NAME else self.text, draw)
        else:
            text = json.dumps(mutate(self.value, draw)).encode()
            text = text[1:] if self.name == ROOT_NAME else text
        return sealed_text(text) if self.name == ROOT_NAME else text

    def parse(self, text: bytes) -> None:
        """With the real parser, as far as one file goes."""
        if self.is_header:
            parse_header(len(text).to_bytes(8, "little") + text, self.name)
        elif self.name == ROOT_NAME:
            for name, component in root_from_json(text, self.name).components.items():
                check_plausible(component, name)
                check_cover(name, component.tensors)
                choose_replicas(component.tensors)
        elif self.name.endswith(".index.json"):
            rank_index_from_json(text, self.name)
        else:
            role = self.name.partition("-")[0]
            value = parse_document("rank" if "-dist-" in self.name and role == "trainer" else role, text, self.name)
            json_tree.decode(value, dict[str, torch.Tensor]().__getitem__)

    def placed(self, files: Files, text: bytes) -> Files:
        """All files with the mutant among them, and the checksums above it made right."""
        files = dict(files)
        if self.is_header:
            padded = text + b" " * (-len(text) % 8)
            header = struct.pack("<Q", len(padded)) + padded
            files[self.name] = header + files[self.name][8 + self.length :]
            index = self.name.partition("-shard-")[0].replace("-dist-", "-meta-dist-") + ".index.json"
            value = json.loads(files[index])
            value["files"][self.name] = [len(files[self.name]), checksum(header)]
            return resealed(files, index, json.dumps(value).encode())
        return resealed(files, self.name, text)


def resealed(files: Files, name: str, content: bytes) -> Files:
    files[name] = content
    if name != ROOT_NAME:
        files[ROOT_NAME] = small.named(json.loads(files[ROOT_NAME]), name, content)
    return files


# ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────


def weights(files: Files) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer in a whole load, by path."""
    storage = MemoryStorage()
    storage.checkpoints["x"] = files
    found = load_full("x", storage=storage)
    return dict(tensors_in({k: found[k] for k in ("state_dict", "optimizer_states") if k in found}))


def wrong_tensors(found: dict[str, torch.Tensor], good: dict[str, torch.Tensor]) -> list[str]:
    """Names under which a mutant has other values, not merely fewer, empty, renamed or reinterpreted tensors."""
    known = {(t.shape, t.numpy().tobytes()) for t in good.values()}
    flat = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in good.values()]
    return [
        name
        for name, tensor in found.items()
        if tensor.dim() and tensor.numel() and (tensor.shape, tensor.numpy().tobytes()) not in known
        if tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() not in flat
    ]


def run(mutations: int, seed: int, *, loaded: int = LOADED, files: Files | None = None) -> Counter[str]:
    """Count how mutants end. Raises what no reader may raise, with the seed that makes it again."""
    files = files or good_files()
    targets = [Target(name, content) for name, content in files.items()]
    good, counts = weights(files), Counter[str]()
    previous = signal.signal(signal.SIGALRM, _too_slow)
    try:
        for number in range(mutations):
            draw = random.Random(f"{seed}/{number}")
            target = draw.choice(targets)
            role = target.name.partition(".")[0].rpartition("-dist-")[0]
            kind = "header" if target.is_header else role or target.name
            text = target.mutant(draw)
            signal.alarm(LIMIT_S)
            counts[f"{kind}: {_attempt(lambda text=text, target=target: target.parse(text), number)}"] += 1
            if number % loaded == 0:

                def whole(target: Target = target, text: bytes = text) -> None:
                    wrong = wrong_tensors(weights(target.placed(files, text)), good)
                    assert not wrong, f"loaded other values: {wrong}"

                counts[f"{kind}, loaded whole: {_attempt(whole, number)}"] += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return counts


def _attempt(work: Callable[[], None], number: int) -> str:
    try:
        work()
    except ShardCkptError as error:
        return type(error).__name__
    except Exception as error:
        raise AssertionError(f"mutation {number}: {type(error).__name__}: {str(error)[:500]}") from error
    return "accepted"


def _too_slow(number: int, frame: Any) -> None:
    raise TimeoutError(f"a mutation took more than {LIMIT_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = run(arguments.mutations, arguments.seed)
    for kind, count in sorted(counts.items()):
        print(f"{count:9,}  {kind}")
    print(f"{arguments.mutations:,} mutations, none of them an undocumented error")


if __name__ == "__main__":
    main()
