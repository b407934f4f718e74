"""Replicas share what they read: the same result as alone, each byte read once, no failure on one of them alone.

The oracle of a load is what torch distributes; that of who reads what are the ranged reads that the storage saw.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shardckpt.checkpoint import checkpoint, replica_reads
from lightning_shardckpt.checkpoint.checkpoint_options import LoadOptions
from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.checkpoint.replica_reads import PlannedReads, choose, deal, split_tensor
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.tuning import TUNING, Tuning
from tests.support import tiny
from tests.support.counting import Counting
from tests.support.pool import run_ranks

T = TypeVar("T")
R = TypeVar("R")

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "big": ((480, 256), torch.float32),
    "half": ((96, 1024), torch.bfloat16),
    "norm": ((301,), torch.float32),
    "single": ((1, 37, 5), torch.float64),
    "flags": ((7, 3), torch.bool),
    "waves": ((5, 3), torch.complex64),
    "thin": ((3, 2), torch.int64),
    "none": ((0, 4), torch.float32),
    "number": ((), torch.float32),
}
MESHES: dict[str, tuple[tuple[int, ...], str, str]] = {
    # sizes of the axes; what they do to matrices, and to the rest: r replicate, 0 and 1 the dim that they cut
    "replicated on 2": ((2,), "r", "r"),
    "HSDP 2x1": ((2, 1), "r0", "r0"),
    "HSDP 2x2": ((2, 2), "r0", "r0"),
    "HSDP 4x1": ((4, 1), "r0", "r0"),
    "FSDP 2 x TP 2": ((2, 2), "01", "0r"),
    "replicated on 2x2": ((2, 2), "rr", "rr"),
    "FSDP 4": ((4,), "0", "0"),
}


SMALL = Tuning(shared_piece_bytes=48 << 10, exchange_buffer_bytes=10007, held_tensor_bytes=1 << 20)
"""Pieces and buffers that split these tensors as the real ones split large tensors; though all count as small."""
MUCH = replace(SMALL, shared_read_bytes=1)


class Noting(Ranks):
    """Notes what the steps of a load are."""

    phases: list[str]

    def step(self, phase: str, work: Callable[[], T], lead: Callable[[list[T]], R], **more: Any) -> R:
        self.phases.append(phase.split(" ")[0])
        return super().step(phase, work, lead, **more)


def noting() -> Noting:
    ranks = Noting.of_default_group(60)
    assert isinstance(ranks, Noting)
    ranks.phases = []
    return ranks


def drawn(name: str, salt: int = 0) -> Tensor:
    shape, dtype = TENSORS[name]
    bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(len(name) + salt))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + salt))
    return bits.to(dtype) if not dtype.is_floating_point else values.to(dtype)


def placed(case: str, values: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """All tensors as DTensors on the mesh of a case; one more is plain, and one not contiguous."""
    sizes, matrices, rest = MESHES[case]
    replicated = "r" in matrices + rest
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"axis{i}" for i in range(len(sizes))))
    found: dict[str, Tensor] = {}
    for name, (shape, _) in TENSORS.items():
        if not shape and not replicated:  # FSDP leaves it as it is
            found[name] = values(name)
            continue
        chars = matrices if len(shape) > 1 else rest if shape else "r" * len(sizes)
        cuts = [Replicate() if c == "r" else Shard(int(c)) for c in chars]
        found[name] = distribute_tensor(values(name), mesh, cuts, src_data_rank=None)
    turned = values("thin").t()
    found["turned"] = DTensor.from_local(turned, mesh, [Replicate()] * len(sizes), run_check=False)
    found["plain"] = values("norm")
    return found


def save(path: str, case: str) -> None:
    """The drawn values as model and optimizer state, as this case's mesh cuts them."""
    ranks = Ranks.of_default_group(60)
    io = ShardCkptIO(sync_files=False)
    io.attach(ranks, torch.nn.Module(), {"data_parallel_shard": ranks.world})
    tensors, moments = placed(case, drawn), placed(case, lambda n: drawn(n, 50))
    state = {n: {"exp_avg": moments[n], "step": torch.tensor(7.0)} for n in floating(tensors)}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "params": floating(tensors)}
    io.save_checkpoint({"state_dict": tensors, "optimizer_states": [{"state": state, "param_groups": [group]}]}, path)


def floating(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load(
    path: str,
    case: str,
    share: bool | None,
    storage: Counting,
    ranks: Ranks,
    moments: tuple[str, ...] = (),
    tuning: Tuning = SMALL,
) -> None:
    """Into tensors of zeros; what they and the optimizer are then must be the drawn values, bit for bit.

    After an error they must be as they were. ``moments``: of which parameters there is optimizer state already.
    """
    tensors = placed(case, lambda n: torch.zeros(*TENSORS[n][:1], dtype=TENSORS[n][1]))
    trained = {n: torch.nn.Parameter(tensors[n]) for n in floating(tensors)}
    optimizer = torch.optim.AdamW(trained.values())
    for name in moments:
        optimizer.state[trained[name]] = {"exp_avg": torch.zeros_like(trained[name], requires_grad=False)}
    live = LoadTargets(Leaves({**tensors, **trained}), frozenset(), [optimizer], _by_id(trained), WholeNames())
    try:
        options = LoadOptions(share_reads=share, tuning=tuning)
        checkpoint.load(path, live, ranks=ranks, options=options, storage=storage)
    except BaseException:
        assert not any(local(t).any() for t in [*tensors.values(), *trained.values()]), "a failed load changed tensors"
        there = [values["exp_avg"] for values in optimizer.state.values()]
        assert len(there) == len(moments) and not any(local(t).any() for t in there), "a failed load changed them"
        raise
    for name, expected in placed(case, drawn).items():
        assert torch.equal(local(live.model.tensors[name]), local(expected)), name
    for name, expected in placed(case, lambda n: drawn(n, 50)).items():
        if name in trained:
            assert torch.equal(local(optimizer.state[trained[name]]["exp_avg"]), local(expected)), name


def _by_id(trained: dict[str, torch.nn.Parameter]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in trained.items()}


# ── the result ────────────────────────────────────────────────────────────────────────────────────────────────────


def _loads(folder: str, saved: str, cases: list[str]) -> dict[str, list[tuple[int, list[str]]]]:
    path, found = f"{folder}/a.ckpt", dict[str, list[tuple[int, list[str]]]]()
    save(path, saved)
    for case in cases:
        found[case] = []
        for share in (False, True, None):
            storage, ranks = Counting(), noting()
            load(path, case, share, storage, ranks, ("big", "norm"))
            found[case].append((storage.nbytes, ranks.phases))
    return found


ALONE = ["opening", "comparing", "planning", "verifying", "reading"]
SHARED = [*ALONE, "exchanging"]


def test_two_replicas_load_the_same_together_as_alone(tmp_path: Path) -> None:
    cases = ["replicated on 2", "HSDP 2x1"]
    by_rank = run_ranks(2, _loads, str(tmp_path), "replicated on 2", cases)
    for case in cases:
        stored = data_bytes(tmp_path / "a.ckpt")
        alone, shared, small = (sum(found[case][i][0] for found in by_rank) for i in range(3))
        assert 2 * stored <= alone == small <= 2.01 * stored
        assert stored <= shared <= 1.1 * stored
        for found in by_rank:
            assert [phases for _, phases in found[case]] == [ALONE, SHARED, ALONE]
            assert 0.4 * stored < found[case][1][0] < 0.6 * stored


def data_bytes(path: Path) -> int:
    return sum(
        file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors")
    )


@pytest.mark.parametrize(
    "cases",
    [
        ["HSDP 2x2", "FSDP 2 x TP 2", "FSDP 4"],
        pytest.param(["HSDP 4x1", "replicated on 2x2"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_four_ranks_share_what_their_mesh_replicates_and_nothing_else(cases: list[str], tmp_path: Path) -> None:
    by_rank = run_ranks(4, _loads, str(tmp_path), "FSDP 4", cases)
    stored = data_bytes(tmp_path / "a.ckpt")
    bounds = {"HSDP 2x2": (2, 1.1), "HSDP 4x1": (4, 1.1), "replicated on 2x2": (4, 2.1)}  # the last: along one axis
    for case in cases:
        alone, shared = (sum(found[case][i][0] for found in by_rank) / stored for i in range(2))
        least, most = bounds.get(case, (0, 4))
        assert alone >= least and shared <= most, case
        assert shared < alone or case == "FSDP 4", case  # of FSDP 2 x TP 2: the norms
    for found in by_rank:
        for case in cases:
            wanted = ALONE if case == "FSDP 4" else SHARED
            assert [phases for _, phases in found[case]] == [ALONE, wanted, ALONE], case
        assert "FSDP 4" not in cases or len({read for read, _ in found["FSDP 4"]}) == 1


def _plain_file(path: str) -> None:
    for share in (True, None):
        tensors = placed("HSDP 2x1", lambda n: torch.zeros(TENSORS[n][0], dtype=TENSORS[n][1]))
        live = LoadTargets(Leaves(tensors), frozenset(), None, {}, WholeNames())
        options = LoadOptions(share_reads=share, tuning=SMALL)
        checkpoint.load(path, live, ranks=Ranks.of_default_group(60), options=options)
        for name, expected in placed("HSDP 2x1", drawn).items():
            assert torch.equal(local(tensors[name]), local(expected)), name


def test_a_plain_file_loads_the_same_too(tmp_path: Path) -> None:
    state = {name: drawn(name) for name in TENSORS} | {"turned": drawn("thin").t(), "plain": drawn("norm")}
    torch.save({"state_dict": state}, tmp_path / "plain.ckpt")
    run_ranks(2, _plain_file, f"{tmp_path}/plain.ckpt")


# ── by default ────────────────────────────────────────────────────────────────────────────────────────────────────


def rank(read_bytes: int, received_bytes: int, host: str = "a") -> PlannedReads:
    return {"read_bytes": read_bytes, "received_bytes": received_bytes, "host": host}


ENOUGH = TUNING.shared_read_bytes


@pytest.mark.parametrize(
    ("expected", "planned", "high_latency"),
    [
        (False, [rank(ENOUGH, 1)] * 2, False),  # one page cache
        (True, [rank(ENOUGH, 1)] * 2, True),
        (True, [rank(ENOUGH, 1), rank(ENOUGH, 1, "b")], False),
        (True, [rank(ENOUGH, 1), rank(0, 0, "b")], True),  # who has nothing to share has no say
        (False, [rank(ENOUGH, 1), rank(ENOUGH - 1, 1, "b")], True),
        (False, [rank(ENOUGH, 0), rank(ENOUGH, 0, "b")], True),
        (False, [], True),
    ],
)
def test_much_that_would_cross_a_network_twice_is_shared(
    expected: bool, planned: list[PlannedReads], high_latency: bool
) -> None:
    assert choose(None, planned, high_latency=high_latency) is expected
    assert choose(False, planned, high_latency=high_latency) is False
    shareable = any(one["received_bytes"] for one in planned)
    assert choose(True, planned, high_latency=high_latency) is shareable


class Remote(Counting):
    """Says that its reads cross a network."""

    def _noting(self, reader: Reader) -> Reader:
        found = super()._noting(reader)
        found.high_latency = True
        return found


def _by_default(folder: str) -> list[tuple[int, list[str]]]:
    save(f"{folder}/a.ckpt", "HSDP 2x1")
    found = []
    for storage, tuning in ((Remote(), MUCH), (Remote(), SMALL), (Counting(), MUCH)):
        ranks = noting()
        load(f"{folder}/a.ckpt", "HSDP 2x1", None, storage, ranks, tuning=tuning)
        found.append((storage.nbytes, ranks.phases))
    return found


def test_by_default_replicas_share_what_is_far_and_much(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _by_default, str(tmp_path))
    stored = data_bytes(tmp_path / "a.ckpt")
    shared, few, near = (sum(found[i][0] for found in by_rank) for i in range(3))
    assert stored <= shared <= 1.1 * stored
    assert few >= 2 * stored <= near
    for found in by_rank:
        assert [phases for _, phases in found] == [SHARED, ALONE, ALONE]


def _not_held(folder: str) -> list[int]:
    save(f"{folder}/a.ckpt", "HSDP 2x1")
    found = []
    for share in (True, False):
        storage = Counting()
        load(f"{folder}/a.ckpt", "HSDP 2x1", share, storage, noting(), tuning=replace(SMALL, held_bytes=100_000))
        found.append(storage.nbytes)
    return found


def test_what_is_not_held_from_verifying_is_read_again_in_both_ways(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _not_held, str(tmp_path))
    stored = data_bytes(tmp_path / "a.ckpt")
    shared, alone = (sum(found[i] for found in by_rank) for i in range(2))
    assert 1.2 * stored < shared < 1.8 * stored, "the optimizer's state is read once"
    assert 2.4 * stored < alone < 3.8 * stored


# ── who reads what ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(50))
def test_pieces_cover_a_tensor_in_contiguous_runs_and_are_dealt_evenly(seed: int) -> None:
    draw = random.Random(seed)
    piece_bytes = draw.choice((1, 8, 100))
    shapes = [tuple(draw.choice((1, 1, 2, 3, 7, 12)) for _ in range(draw.randint(0, 4))) for _ in range(20)]
    count, sizes = draw.randint(1, 9), []
    for shape in shapes:
        boxes = split_tensor(shape, 4, count, piece_bytes)
        assert 1 <= len(boxes) <= count
        runs = [run for box in boxes for run in box.runs(shape)]
        assert len(runs) == len(boxes), "each is contiguous"
        assert [0, *(stop for _, stop in runs)] == [*(start for start, _ in runs), prod(shape)]
        lengths = [stop - start for start, stop in runs]
        row = prod(shape[next((d for d, n in enumerate(shape) if n > 1), 0) + 1 :])
        assert max(lengths) - min(lengths) <= row
        sizes += [4 * n for n in lengths]
    owners = deal(sizes, count)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == i) for i in range(count)]
    assert max(loads) - min(loads) <= max(sizes)


def _cannot_share() -> list[bool]:
    """Whether replicas of a mesh with this process group share tensors in host memory."""
    tensors = placed("replicated on 2", drawn)
    return [replica_reads.group_of(tensor) is not None for tensor in tensors.values()]


def test_only_contiguous_dtensors_with_elements_are_shared() -> None:
    (found, same) = run_ranks(2, _cannot_share)
    expected = [name for name in [*TENSORS, "turned", "plain"] if name not in ("none", "turned", "plain")]
    assert [name for name, shares in zip([*TENSORS, "turned", "plain"], found, strict=True) if shares] == expected
    assert found == same


def _of_the_other_device() -> None:
    """A mesh whose groups serve CUDA tensors only, as NCCL's do, and tensors in host memory: cpu_offload."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore("store", world)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world)
    store.set(f"connected/{rank}", "")  # a rank that returned at once would break connections that the others make
    store.wait([f"connected/{other}" for other in range(world)])
    mesh = init_device_mesh("cpu", (world,))
    tensor = DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
    assert tensor.to_local().device.type == "cpu"
    assert replica_reads.group_of(tensor) is None


def test_tensors_in_host_memory_are_not_shared_over_groups_of_another_device() -> None:
    run_ranks(2, _of_the_other_device, init_process_group=False)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _refused(folder: str, changes: list[tuple[str, int]]) -> list[str]:
    """What a shared load with one byte of the data changed raises, for each of the changes."""
    found, ranks = [], noting()
    for name, offset in changes:
        path = Path(folder, "a.ckpt", name)
        intact = path.read_bytes()
        begin = 8 + int.from_bytes(intact[:8], "little")
        at = begin + offset % (len(intact) - begin)
        dist.barrier()
        if ranks.rank == 0:
            path.write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
        dist.barrier()
        with pytest.raises(CorruptionError, match=r"failed while verifying.*corrupted data") as caught:
            load(f"{folder}/a.ckpt", "HSDP 2x1", True, Counting(), ranks)
        found.append(str(caught.value))
        dist.barrier()
        if ranks.rank == 0:
            path.write_bytes(intact)
    dist.barrier()
    load(f"{folder}/a.ckpt", "HSDP 2x1", True, Counting(), ranks)
    return found


def test_a_corrupted_byte_that_one_replica_reads_is_an_error_on_all_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, save, f"{tmp_path}/a.ckpt", "replicated on 2")
    files = sorted(path.name for path in (tmp_path / "a.ckpt").glob("*.safetensors"))
    assert len(files) == 4
    mine, same = run_ranks(2, _refused, str(tmp_path), [(name, at) for name in files for at in (0, 70_001, -1)])
    assert mine == same
    assert {message.partition(" failed")[0] for message in mine} >= {"rank 0", "rank 1"}


# ── through the Trainer ───────────────────────────────────────────────────────────────────────────────────────────


def _resumed(folder: str, by_default: bool) -> list[Any]:
    hsdp, path = {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}, f"{folder}/a.ckpt"
    tiny.fit(
        {"data_parallel_shard_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}, 3, save=path
    )
    exchanged: list[int] = []
    found, exchange_of = dict[bool | None, Any](), replica_reads.exchange

    def noted(group: dist.ProcessGroup, shares: Any, tuning: Tuning) -> None:
        exchanged.append(group.size())
        exchange_of(group, shares, tuning)

    replica_reads.exchange = noted  # type: ignore[attr-defined]
    for share in (False, None, True) if by_default else (False, True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "resuming after 3 batches of an epoch")  # on more data-parallel ranks
            found[share] = tiny.fit(hsdp, 5, resume=path, plugins=[ShardCkptIO(share_reads=share)])
        assert exchanged == ([2] if share else [])
    alone, shared = found[False], found[True]
    assert all(tiny.differences(alone["state"], one["state"]) == [] for one in found.values())
    assert alone["losses"] == shared["losses"]
    return [shared["step"], shared["lr"]]


@pytest.mark.slow
@pytest.mark.parametrize("by_default", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_run_resumes_the_same_when_replicas_share_the_reading(by_default: bool, tmp_path: Path) -> None:
    """With ``by_default``, also the same as where nobody says whether they share it."""
    found = run_ranks(4, _resumed, str(tmp_path), by_default)
    assert all(one == found[0] and one[0] == 5 for one in found)
