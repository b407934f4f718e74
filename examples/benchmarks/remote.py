"""Section remote: the time and the requests of a save to an object store, and of a load from there."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import fsspec
import limits
import ours
import peers
import torch.distributed as dist
from s3server import Server, serving
from state import llama
from turns import MB, Facts, Missing, Row, Way, case, on_ranks, take_turns, timed

_RANKS = 2
_GB = 0.25  # at most: a server in Python gets slow, and keeps it in memory a few times
_BUCKET = "s3://benchmark"


def remote(options: Namespace, folder: str) -> list[Row]:
    """Saves to a server on this machine that speaks S3, and loads from there."""
    return case("remote", _case(options), _served, options)


def _case(options: Namespace) -> str:
    return f"{_RANKS} ranks, {_gb(options):g} GB, with moto's server on the same cores, whose time is in all of this"


def _gb(options: Namespace) -> float:
    return min(options.gb, _GB)


def _served(options: Namespace) -> list[Row]:
    try:
        import s3fs  # noqa: F401  # before ranks are forked
    except ImportError as error:
        raise Missing(f"not installed: pip install -e '.[bench]' ({error})") from None
    with serving() as server:
        return on_ranks(_RANKS, _remote, options, server)


def _remote(options: Namespace, server: Server) -> list[Row]:
    state, url = llama(_gb(options)), f"{_BUCKET}/checkpoint"
    if dist.get_rank() == 0:
        fsspec.filesystem("s3").mkdir(_BUCKET)
    dist.barrier()

    def turn(way: Way) -> Facts:
        """Every one is checked: that takes little beside the rest."""
        peers.prepare(state)
        try:
            saved = _counted(server, lambda: way.save(state, url))
            state.spoil()
            loaded = _counted(server, lambda: way.load(state, url))
            state.check()
        finally:
            state.fill()
            _clear(url)
        facts = {"save": saved, "load": loaded}
        return {f"{act}_{key}": value for act, found in facts.items() for key, value in found.items()}

    ways = limits.REMOTE + ours.REMOTE + peers.REMOTE
    return take_turns(ways, options.rounds, turn, turn, section="remote", case=_case(options))


def _counted(server: Server, work: Callable[[], Any]) -> Facts:
    """What ``timed`` finds, and what all ranks together asked the server for."""
    before = server.counts()
    found = timed(work)
    dist.barrier()
    counts = server.counts() - before
    moved = {"sent_mb": counts["sent"] / MB, "received_mb": counts["received"] / MB}
    return {"s": found["seconds"], "extra_mb": found["extra_mb"], "requests": counts["requests"], **moved}


def _clear(url: str) -> None:
    """Delete all that is below. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        store = fsspec.filesystem("s3")
        store.invalidate_cache()
        if store.exists(url):
            store.rm(url, recursive=True)
    dist.barrier()
