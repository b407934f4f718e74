"""Messages between stages arrive as they were sent, and all ranks learn of one rank's failure.

Each rank returns what it saw, and the oracle is what was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

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

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.int64, torch.complex64, torch.float8_e5m2]


def messages() -> dict[str, Message]:
    """What is sent; made again by the receiver."""
    torch.manual_seed(0)
    x, lazy = torch.rand(3, 4), torch.complex(torch.ones(2), torch.ones(2)).conj()
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
        "conjugated lazily": Message({0: (lazy, False), 1: (lazy.imag, False)}),
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


def use_a_pair() -> list[str]:
    """Rank 0 sends everything forward, then rank 1 sends it back; returns what did not arrive as it was."""
    group, rank = dist.group.WORLD, dist.get_rank()
    this = Transport(resolve_schedule("gpipe", 2, 1), group, group, rank, torch.device("cpu"))
    sent, lost = messages(), []
    for step in range(2):  # the same channels again
        for direction, sender in (("forward", 0), ("backward", 1)):
            for place, message in enumerate(sent.values()):
                if rank == sender:
                    this.send(Receive(direction, 0, place), message)
            for place, (name, message) in enumerate(reversed(sent.items())):  # in another order
                if rank != sender and not alike(
                    this.receive(Receive(direction, 0, len(sent) - 1 - place)), message
                ):
                    lost.append(f"{name}, {direction}, step {step}")
        this.flush()
        dist.barrier()
    return lost


def test_every_message_arrives_as_it_was_sent() -> None:
    assert run_ranks(2, use_a_pair, timeout_s=60) == [[], []]


# ── agreement ───────────────────────────────────────────────────────────────────────────────────────────────────────

OF_THREE: dict[str, list[Exception | None]] = {
    "nobody": [None, None, None],
    "the first": [ValueError("bad row 3"), None, None],
    "two": [None, KeyError("a"), OSError("disk")],
    "all": [ValueError("0"), UnsupportedCodeError("1"), RankError("2")],
    "a neighbour of the real one": [PeerFailed(), PeerFailed(), RuntimeError("out of memory")],
    "neighbours after the real one": [UnsupportedCodeError("shape (2,)"), PeerFailed(), PeerFailed()],
    "one without a text": [None, ZeroDivisionError(), None],
}


def fail(error: Exception | None) -> list[int]:
    if error is not None:
        raise error
    return [dist.get_rank()]


def agree_on_all() -> None:
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    for name, errors in OF_THREE.items():
        mine = errors[rank]
        real = [rank for rank, e in enumerate(errors) if e is not None and not isinstance(e, PeerFailed)]
        if not real:
            assert agree_on_numbers("testing", partial(fail, mine), 1, group).tolist() == [[0], [1], [2]]
            continue
        with pytest.raises(Exception) as raised:  # on a rank that failed its own
            agree_on_numbers("testing", partial(fail, mine), 1, group)
        if rank in real:
            assert raised.value is mine, name
            continue
        first = errors[real[0]]
        assert type(raised.value) is (UnsupportedCodeError if isinstance(first, UnsupportedCodeError) else RankError)
        assert str(raised.value) == f"rank {real[0]} failed while testing: {type(first).__name__}: {first}"
        assert raised.value.__cause__ is mine
    assert agree_on_numbers("testing", lambda: [rank, 7], 2, group).tolist() == [[0, 7], [1, 7], [2, 7]]


def test_the_first_real_failure_is_raised_on_every_rank_and_the_group_works_on() -> None:
    run_ranks(3, agree_on_all, timeout_s=60)


WORLD: dict[str, Callable[[Tensor, Any], Any]] = {  # compat's test_torch_distributed has all collectives
    "all_reduce": lambda t, g: dist.all_reduce(t, group=g),
    "broadcast": lambda t, g: dist.broadcast(t, 0, g),
    "barrier": lambda t, g: dist.barrier(group=g),
    "all_gather_object": lambda t, g: dist.all_gather_object([None] * 2, 1, group=g),
}


def guard() -> None:
    group, total, met = dist.new_group([0, 1]), torch.ones(2), list[str]()

    def meet() -> None:
        dist.barrier()
        met.append("another thread")

    with watch_collectives(refuse_world):
        for name, call in WORLD.items():
            for world in (None, dist.group.WORLD):
                with pytest.raises(UnsupportedCodeError, match=f"distributed.{name} over all processes was called"):
                    call(torch.ones(2), world)
            call(torch.ones(2), group)
        dist.all_reduce(total, group=group)
        thread = threading.Thread(target=meet)
        thread.start()
        thread.join(30)
        with watch_collectives(refuse_world):
            pass
        with pytest.raises(UnsupportedCodeError):
            dist.barrier()
    dist.barrier()
    assert (total.tolist(), met) == ([2, 2], ["another thread"])


def test_a_collective_over_all_processes_is_refused_in_a_step_unless_it_is_of_a_group_or_another_thread() -> None:
    run_ranks(2, guard, timeout_s=60)
