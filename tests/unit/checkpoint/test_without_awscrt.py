"""Where awscrt can't be imported, saves say so before they begin, or record no digests; everything else goes on."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from tests.support.pool import run_ranks

REMEDY = 'Run `pip install "awscrt>=0.31"`, or save without digests, by digest=False'


def hide_awscrt() -> None:
    sys.modules |= dict.fromkeys(("awscrt", "awscrt.checksums"))  # type: ignore[arg-type]  # what an import finds


def save_load_and_look(path: str) -> None:
    """In a process that has imported nothing of the package."""
    hide_awscrt()
    import torch

    import lightning_shardckpt
    from lightning_shardckpt.cli import main

    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    lightning_shardckpt.ShardCkptIO(digest=False)
    for incremental in (False, True):
        lightning_shardckpt.save(path, {"model": model}, digest=False, incremental=incremental, overwrite=True)
    torch.nn.init.zeros_(model.weight)
    lightning_shardckpt.load(path, {"model": model})
    assert torch.equal(model.weight, weight)
    assert [main([tool, path]) for tool in ("inspect", "verify")] == [0, 0]


def test_saves_without_digests_and_loads_and_tools_do_without_it(tmp_path: Path) -> None:
    run_ranks(1, save_load_and_look, str(tmp_path / "a.ckpt"), init_process_group=False, bare=True)


def ask_for_digests(path: str) -> list[str]:
    hide_awscrt()
    import lightning_shardckpt
    from lightning_shardckpt.cli import main

    said = []
    for ask in (lightning_shardckpt.ShardCkptIO, lambda: lightning_shardckpt.save(path, {})):
        with pytest.raises(ImportError) as error:
            ask()
        said.append(str(error.value))
    with contextlib.redirect_stderr(io.StringIO()) as written:
        assert main(["digest", path]) == 1
    return [*said, written.getvalue()]


def test_what_needs_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    (found,) = run_ranks(1, ask_for_digests, str(tmp_path / "a.ckpt"), init_process_group=False, bare=True)
    for said in found:
        assert "awscrt 0.31" in said and REMEDY in said
    assert not list(tmp_path.iterdir())
