"""Messages between stages arrive as they were sent, and all ranks learn of one rank's failure.

The tests of one world share a call of `run_ranks`: each rank returns what it saw, and the oracle is what was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import watch_collectives
from lightning_shardckpt.errors import RankError, UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.agree import agree_on_numbers
from lightning_shardckpt.parallel.pipeline.gates import refuse_world
from lightning_shardckpt.parallel.pipeline.p2p import Message, PeerFailed, Transport
from lightning_shardckpt.parallel.pipeline.schedule import Receive, resolve_schedule
from tests.support.pool import run_ranks

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2),
]


def messages() -> dict[str, Message]:
    """What is sent; made again by the receiver."""
    torch.manual_seed(0)
    x = torch.rand(3, 4)
    found = {str(dtype): Message({0: ((x * 3).to(dtype), dtype.is_floating_point)}) for dtype in DTYPES}
    return found | {
        "nothing": Message({}),
        "only facts": Message({}, (4, -7, 1 << 40)),
        "0-dim": Message({3: (torch.tensor(2.5), True)}),
        "empty": Message({0: (torch.empty(0, 5), False), 2: (torch.empty(2, 0, 3, dtype=torch.int64), False)}),
        "empty between": Message({0: (x, True), 1: (torch.empty(0), False), 5: (x[0], False)}, (9,)),
        "many": Message({i: (torch.full((i % 3, 2), float(i)), i % 2 == 0) for i in range(40)}),
        "not contiguous": Message({0: (x.t(), False), 1: (x[:, ::2], False), 2: (x[:1].expand(4, 4), False)}),
        "with history": Message({0: (x.clone().requires_grad_() * 2, True)}),
        "many dims": Message({0: (torch.rand(1, 2, 1, 2, 1, 2, 1, 2), False)}),
    }


def alike(a: Message, b: Message) -> bool:
    return (
        a.checks == b.checks
        and list(a.tensors) == list(b.tensors)
        and all(
            x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) and flag == other
            for (x, flag), (y, other) in zip(a.tensors.values(), b.tensors.values(), strict=True)
        )
    )


def transport(name: str, stages_per_rank: int = 1) -> Transport:
    group = dist.group.WORLD
    assert group is not None
    schedule = resolve_schedule(name, dist.get_world_size(), stages_per_rank)
    return Transport(schedule, group, group, dist.get_rank(), CPU)


def send_all(this: Transport) -> list[str]:
    """Rank 0 sends everything forward, rank 1 sends it back; returns what did not arrive as it was."""
    sent, lost = messages(), []
    for step in range(2):  # the same channels again
        for number, (name, message) in enumerate(sent.items()):
            if this.rank == 0:
                this.send(Receive("forward", 0, number), message)
            elif not alike(this.receive(Receive("forward", 0, number)), message):
                lost.append(f"{name}, forward, step {step}")
        for number, (name, message) in enumerate(sent.items()):
            if this.rank == 1:
                this.send(Receive("backward", 0, number), message)
            elif not alike(this.receive(Receive("backward", 0, number)), message):
                lost.append(f"{name}, backward, step {step}")
        this.flush()
        dist.barrier()
    return lost


def send_conjugated() -> bool:
    this, x = transport("gpipe"), torch.complex(torch.ones(2), torch.ones(2))
    message = Message({0: (x.conj(), False), 1: (x.conj().imag, False)})
    if this.rank == 0:
        this.send(Receive("forward", 0, 0), message)
        this.flush()
    return this.rank == 0 or alike(this.receive(Receive("forward", 0, 0)), Message(message.tensors))


def receive_in_another_order(this: Transport) -> list[float]:
    """Messages are told apart by microbatch and direction, not by the order in which they are asked for."""
    order = [3, 0, 4, 1, 2]
    if this.rank == 0:
        for microbatch in range(5):
            this.send(Receive("forward", 0, microbatch), Message({0: (torch.tensor(float(microbatch)), False)}))
        found = [this.receive(Receive("backward", 0, m)).tensors[0][0].item() for m in order]
    else:
        found = [this.receive(Receive("forward", 0, m)).tensors[0][0].item() for m in order]
        for microbatch in range(5):
            this.send(Receive("backward", 0, microbatch), Message({0: (torch.tensor(float(microbatch)), False)}))
    this.flush()
    return found


def expect_before_it_is_sent(this: Transport) -> list[float]:
    """Rank 1 expects messages before they are sent, more than once; those of the next step are others."""
    if this.rank == 1:
        for microbatch in (2, 0, 1, 1, 2, 0):
            this.post_header(Receive("forward", 0, microbatch))
    dist.barrier()
    found = []
    for step in range(2):
        for microbatch in range(3):
            if this.rank == 0:
                number = torch.tensor(10.0 * step + microbatch)
                this.send(Receive("forward", 0, microbatch), Message({0: (number, False)}))
            else:
                found.append(this.receive(Receive("forward", 0, microbatch)).tensors[0][0].item())
    this.flush()
    return found


def send_a_failure(this: Transport) -> str:
    """A failed stage says so in place of one message; those around it arrive."""
    seen = []
    for microbatch in range(3):
        if this.rank == 0:
            message = None if microbatch == 1 else Message({0: (torch.ones(2), True)})
            this.send(Receive("forward", 0, microbatch), message)
        else:
            try:
                seen.append(str(tuple(this.receive(Receive("forward", 0, microbatch)).tensors[0][0].shape)))
            except PeerFailed:
                seen.append("failed")
    this.flush()
    return " ".join(seen)


def use_a_pair() -> dict[str, Any]:
    this = transport("gpipe")
    return {
        "lost": send_all(this),
        "order": receive_in_another_order(this),
        "expected": expect_before_it_is_sent(this),
        "failure": send_a_failure(this),
        "after": send_a_failure(this),
        "loops": relay("looped_bfs", 2),
        "in v": relay("zbv_zero_bubble", 2),
    }


def relay(name: str, stages_per_rank: int) -> list[float]:
    """One number through all stages and back, each adding its own; what each stage of this rank received."""
    this = transport(name, stages_per_rank)
    last, seen, sent = this.schedule.stages - 1, [], []
    for stage in this.schedule.stages_of(this.rank):
        value = torch.zeros(())
        if stage > 0:
            value = this.receive(Receive("forward", stage - 1, 0)).tensors[0][0]
            seen.append(value.item())
        if stage < last:
            value = value + 10**stage
            sent.append(ref(value))
            this.send(Receive("forward", stage, 0), Message({0: (value, False)}))
    for stage in reversed(this.schedule.stages_of(this.rank)):
        value = torch.zeros(())
        if stage < last:
            value = this.receive(Receive("backward", stage, 0)).tensors[0][0]
            seen.append(value.item())
        if stage > 0:
            value = value + 10**stage
            sent.append(ref(value))
            this.send(Receive("backward", stage - 1, 0), Message({0: (value, False)}))
    this.flush()
    del value
    assert [one() for one in sent] == [None] * len(sent)  # nothing that arrived is kept
    return seen


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return run_ranks(2, use_a_pair, timeout_s=60)


def test_every_message_arrives_as_it_was_sent(pair: list[dict[str, Any]]) -> None:
    assert [one["lost"] for one in pair] == [[], []]


def test_what_torch_conjugates_lazily_arrives_conjugated() -> None:
    outcomes = run_ranks(2, send_conjugated, timeout_s=30, grace_s=1, expect_errors=True)
    assert [(one.value, one.error) for one in outcomes] == [(True, None)] * 2


def test_messages_are_told_apart_by_microbatch(pair: list[dict[str, Any]]) -> None:
    assert [one["order"] for one in pair] == [[3, 0, 4, 1, 2]] * 2


def test_a_message_that_was_expected_more_than_once_is_received_once(pair: list[dict[str, Any]]) -> None:
    assert pair[1]["expected"] == [0, 1, 2, 10, 11, 12]


def test_a_failure_takes_the_place_of_one_message_and_leaves_the_others(pair: list[dict[str, Any]]) -> None:
    assert pair[1]["failure"] == pair[1]["after"] == "(2,) failed (2,)"


def test_every_stage_hears_from_its_neighbours_wherever_they_are(pair: list[dict[str, Any]]) -> None:
    # stage s receives 10^0 + … + 10^(s-1) going forward, 10^(s+1) + … + 10^3 coming back
    forward, backward = [0, 1, 11, 111], [1110, 1100, 1000, 0]
    assert pair[0]["loops"] == [forward[2], backward[2], backward[0]]
    assert pair[1]["loops"] == [forward[1], forward[3], backward[1]]
    assert pair[0]["in v"] == [forward[3], backward[0]]
    assert pair[1]["in v"] == [forward[1], forward[2], backward[2], backward[1]]


def test_stages_on_one_rank_hand_messages_over_without_communication() -> None:
    """There is no process group here."""
    this = Transport(resolve_schedule("looped_bfs", 1, 3), None, None, 0, CPU)  # type: ignore[arg-type]  # not used
    message = Message({0: (torch.ones(2), True)}, (3,))
    this.send(Receive("forward", 0, 5), message)
    this.send(Receive("forward", 1, 5), None)
    this.send(Receive("backward", 0, 5), Message({}))
    assert alike(this.receive(Receive("forward", 0, 5)), message)
    assert this.receive(Receive("backward", 0, 5)).tensors == {}
    with pytest.raises(PeerFailed):
        this.receive(Receive("forward", 1, 5))
    this.flush()


# ── agreement ───────────────────────────────────────────────────────────────────────────────────────────────────────

OF_THREE: dict[str, list[Exception | None]] = {
    "nobody": [None, None, None],
    "the first": [ValueError("bad row 3"), None, None],
    "the last": [None, None, UnsupportedCodeError("no such layer")],
    "two": [None, KeyError("a"), OSError("disk")],
    "all": [ValueError("0"), UnsupportedCodeError("1"), RankError("2")],
    "a neighbour of the real one": [PeerFailed(), PeerFailed(), RuntimeError("out of memory")],
    "neighbours after the real one": [UnsupportedCodeError("shape (2,)"), PeerFailed(), PeerFailed()],
    "one without a text": [None, ZeroDivisionError(), None],
    "one with several lines": [None, UnsupportedCodeError("first\nsecond: ü"), None],
}


def fail(error: Exception | None) -> list[int]:
    if error is not None:
        raise error
    return [dist.get_rank()]


def agree_on_all() -> list[Any]:
    group = dist.new_group([0, 1, 2])
    found: list[Any] = []
    for name, errors in OF_THREE.items():
        error = errors[dist.get_rank()]
        try:
            found.append(agree_on_numbers(f"testing {name}", partial(fail, error), 1, group).tolist())
        except Exception as raised:
            found.append((type(raised), str(raised), raised is error, type(raised.__cause__)))
    # the group still works
    found.append(agree_on_numbers("testing", lambda: [dist.get_rank(), 7], 2, group).tolist())
    return [found, guard(group)]


WORLD: dict[str, Callable[[Tensor, Any], Any]] = {  # test_torch_distributed has all collectives
    "all_reduce": lambda t, g: dist.all_reduce(t, group=g),
    "broadcast, by position": lambda t, g: dist.broadcast(t, 0, g),
    "barrier": lambda t, g: dist.barrier(group=g),
    "all_gather_object": lambda t, g: dist.all_gather_object([None] * 3, 1, group=g),
}


def guard(group: Any) -> dict[str, Any]:
    """Inside the guard: which calls over the world are refused, and what works."""
    refused, messages = [], set()
    with watch_collectives(refuse_world):
        for name, call in WORLD.items():
            for world in (None, dist.group.WORLD):
                try:
                    call(torch.ones(2), world)
                except UnsupportedCodeError as error:
                    refused.append(name)
                    messages.add(str(error).split(" was called")[0])
        total = torch.ones(2)
        for call in WORLD.values():
            call(torch.ones(2), group)
        dist.all_reduce(total, group=group)
        elsewhere: list[Any] = []

        def meet() -> None:
            dist.barrier()
            elsewhere.append("ran")

        thread = threading.Thread(target=meet)
        thread.start()
        thread.join(30)
        with watch_collectives(refuse_world):
            pass
        try:
            dist.barrier()
        except UnsupportedCodeError:
            elsewhere.append("still refused")
    dist.barrier()
    return {
        "refused": refused,
        "messages": sorted(messages),
        "total": total.tolist(),
        "elsewhere": elsewhere,
    }


@pytest.fixture(scope="module")
def three() -> list[Any]:
    return run_ranks(3, agree_on_all, timeout_s=60)


@pytest.mark.parametrize("name", OF_THREE)
def test_the_first_real_failure_is_raised_on_every_rank(name: str, three: list[Any]) -> None:
    errors = OF_THREE[name]
    real = [rank for rank, e in enumerate(errors) if e is not None and not isinstance(e, PeerFailed)]
    for rank, (found, _) in enumerate(three):
        outcome = found[list(OF_THREE).index(name)]
        if not real:
            assert outcome == [[0], [1], [2]]
            continue
        first = errors[real[0]]
        kind, text, own, cause = outcome
        if rank in real:
            assert (kind, text, own) == (type(errors[rank]), str(errors[rank]), True)
            continue
        assert kind is (UnsupportedCodeError if isinstance(first, UnsupportedCodeError) else RankError)
        assert text == f"rank {real[0]} failed while testing {name}: {type(first).__name__}: {first}"
        assert cause is type(errors[rank])


def test_a_group_can_be_used_after_a_failure(three: list[Any]) -> None:
    assert [found[-1] for found, _ in three] == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_collective_over_all_processes_is_refused_in_a_step(three: list[Any]) -> None:
    for _, found in three:
        assert found["refused"] == [name for name in WORLD for _ in range(2)]
        functions = sorted(name.split(",")[0] for name in WORLD)
        assert found["messages"] == [f"torch.distributed.{name} over all processes" for name in functions]


def test_a_collective_of_a_group_or_of_another_thread_is_not_refused(three: list[Any]) -> None:
    for _, found in three:
        assert found["total"] == [3, 3]
        assert found["elsewhere"] == ["ran", "still refused"]
