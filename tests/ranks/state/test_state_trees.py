"""Random state comes back equal or is refused at the save; ``python -m tests.sweeps.state_trees`` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pool import run_ranks
from tests.sweeps.state_trees import run


@pytest.mark.slow
@pytest.mark.parametrize(("world", "trees"), [(1, 200), (3, 40)])
def test_every_tree_comes_back_equal_or_is_refused(world: int, trees: int, tmp_path: Path) -> None:
    found = run_ranks(world, run, list(range(trees)), str(tmp_path), init_process_group=world > 1, timeout_s=200)
    assert all(rank == found[0] for rank in found)
    assert found[0]["equal"] > trees // 2 and found[0]["refused"] > 0
    assert found[0].total() == trees
