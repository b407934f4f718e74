"""An order is dealt to ranks step by step, whatever their number. Oracle: all ranks put together again."""

from __future__ import annotations

import itertools

import pytest

from lightning_shardckpt.state.data_position import GlobalBatches

CASES = [
    GlobalBatches(*case) for case in itertools.product((1, 2, 3, 5), (1, 2, 3, 4), (False, True), (False, True))
]


@pytest.mark.parametrize("division", CASES, ids=str)
def test_every_sample_comes_once_in_order(division: GlobalBatches) -> None:
    size = division.ranks * division.batch_size
    for count in range(1, 45):
        order = list(range(100, 100 + count))
        ranks = [list(division.deal(order, rank)) for rank in range(division.ranks)]
        steps = list(zip(*ranks, strict=True))  # the same number on every rank
        assert len(steps) == division.steps(count)
        read = [part[i] for parts in steps for i in range(division.batch_size) for part in parts if i < len(part)]
        repeated = division.repeats(count)
        once = read[: len(read) - repeated]
        assert once == order[: len(once)] and set(read) == set(once)
        lengths = [[len(part) for part in parts] for parts in steps]
        assert all(1 <= length <= division.batch_size for step in lengths for length in step)
        assert all(max(step) - min(step) <= (number == len(steps) - 1) for number, step in enumerate(lengths))
        left_out = count - len(once)
        if division.drop_last:
            assert left_out == count % size
        elif division.drop_uneven:
            assert left_out == count % division.ranks
        else:
            assert left_out == 0
        enough = count >= division.ranks and (division.batch_size > 1 or count % division.ranks == 0)
        assert not repeated or not (enough or division.drop_last or division.drop_uneven)
        used = [division.used(count, number) for number in range(len(steps) + 1)]
        sizes = [len({*itertools.chain(*parts)}) for parts in steps]
        assert used == [0, *itertools.accumulate(sizes)]


def test_steps_that_are_left_are_those_of_a_whole_epoch_less_those_before() -> None:
    """While the global batch is the same, an epoch in two parts has the steps of one in a single part."""
    for division, count in itertools.product(CASES, range(1, 45)):
        steps = division.steps(count)
        for number in range(steps + 1):
            left = count - division.used(count, number)
            full = number * division.ranks * division.batch_size == count - left
            if full and number < steps:
                assert division.steps(left) == steps - number
