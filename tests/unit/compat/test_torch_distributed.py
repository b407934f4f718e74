"""Collectives that are watched, objects as bytes, and orders of pipelines mean what this package takes them for."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_shardckpt.compat import torch_tensors as trees
from lightning_shardckpt.compat.torch_distributed import interleaved_order, watch_collectives
from tests.support.pool import run_ranks


def watched_collectives() -> bool:
    seen, original, alone = list[Any](), dist.all_reduce, dist.group.WORLD
    with watch_collectives(lambda name, group: seen.append((name, group))):
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0, alone)
        other = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        other.start()
        other.join()
    dist.all_reduce(torch.ones(1))
    return dist.all_reduce is original and seen == [("all_reduce", None), ("broadcast", alone)]


def test_collectives_are_watched_with_their_group_inside_only() -> None:
    assert run_ranks(1, watched_collectives) == [True]


def test_every_collective_of_this_torch_is_watched() -> None:
    """Oracle: what has a group, but the names of functions that send to one rank, or don't communicate."""
    between_two = {f"{way}{kind}" for way in ("send", "recv", "isend", "irecv") for kind in ("", "_object_list")}
    silent = {"get_", "is_", "new_", "split_", "shrink_", "destroy_", "set_", "supports_", "record_"}
    originals = dict(vars(dist))
    expected = set()
    for name in set(distributed_c10d.__all__) - between_two:
        function = originals.get(name)
        if type(function) is FunctionType and not name.startswith(tuple(silent)):
            expected |= {name} if "group" in inspect.signature(function).parameters else set()
    with watch_collectives(lambda name, group: None):
        watched = {name for name, value in vars(dist).items() if originals.get(name) is not value}
    assert len(expected) > 18 and watched == expected


def test_passes_of_interleaved_stages_are_those_that_torch_shows() -> None:
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8), (4, 3)):
        shown = get_schedule_ops("Interleaved1F1B", ranks, microbatches, num_stages_per_rank=2)
        expected = [[str(action) for action in row if action is not None] for row in shown]
        found = interleaved_order(ranks, 2, microbatches)
        assert [[f"{stage}{kind[0].upper()}{m}" for kind, stage, m in row] for row in found] == expected
    assert interleaved_order(2, 2, 3) == interleaved_order(2, 2, 4)


# ── nested structures are flattened as the pipeline and the build of modules expect ───────────────────────────────────


Pair = namedtuple("Pair", ["first", "second"])


def test_containers_are_walked_in_order_and_other_objects_are_leaves() -> None:
    tensor, thing = torch.zeros(2), object()
    tree = {"b": [tensor, (1, None)], "a": Pair(thing, "text")}
    leaves, spec = trees.tree_flatten(tree)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in (tensor, 1, None, thing, "text")]
    assert trees.tree_leaves(tree) == leaves and trees.tree_unflatten(leaves, spec) == tree
    assert isinstance(trees.tree_unflatten(leaves, spec)["a"], Pair)
    same, other = (trees.tree_flatten({"b": [2, (3, 4)], name: Pair(5, 6)})[1] for name in "ac")
    assert same == spec != other and hash(same) == hash(spec)


def test_calls_with_the_same_leaves_and_nesting_have_one_key() -> None:
    tensor, nested = torch.zeros(2), {"b": [torch.ones(1)]}
    for args, kwargs in (((tensor, 1), {"k": None}), ((tensor, nested), {"k": (2,)})):
        leaves, key = trees.flatten_call(args, kwargs)
        expected = trees.tree_leaves((args, kwargs))
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert trees.flatten_call(args, kwargs)[1] == key
        assert key not in (trees.flatten_call(args, {})[1], trees.flatten_call(args[:1], kwargs)[1])
        assert key != trees.flatten_call(args, {"other": kwargs["k"]})[1]


def test_tensors_are_replaced_and_containers_keep_their_types_where_torch_knows_them() -> None:
    tree = OrderedDict(a=[torch.ones(2), other := object()], b=Pair((torch.zeros(1),), "text"))
    found = trees.map_tensors(lambda tensor: tensor + 1, tree)
    assert isinstance(found, OrderedDict) and isinstance(found["b"], Pair)
    assert found["a"][0].tolist() == [2, 2] and found["a"][1] is other and tree["a"][0].tolist() == [1, 1]
    assert found["b"].first[0].tolist() == [1] and found["b"].second == "text"
    unknown = UserDict(a=torch.ones(1))
    assert trees.map_tensors(lambda tensor: tensor, tree) is tree and trees.map_tensors(torch.neg, unknown) is unknown
    assert trees.tree_map(lambda leaf: leaf * 2, {"a": [1, (2,)]}) == {"a": [2, (4,)]}


@dataclass(frozen=True)
class Hidden:
    x: torch.Tensor
    inner: Any
    depth: int = 0


@dataclass
class Settings:
    rate: float = 0.1


def test_a_dataclass_of_tensors_is_a_container_and_comes_back_as_it_was_and_another_is_a_leaf() -> None:
    leaves, spec = trees.tree_flatten([Hidden(torch.ones(2), Hidden(torch.zeros(1), None), 3)])
    assert [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves] == [[1, 1], [0], None, 0, 3]
    (found,) = trees.tree_unflatten([leaf * 2 if leaf is not None else None for leaf in leaves], spec)
    assert isinstance(found, Hidden) and isinstance(found.inner, Hidden)
    assert (found.x.tolist(), found.inner.x.tolist(), found.depth) == ([2, 2], [0], 6)
    plain = Settings()
    assert trees.tree_flatten([plain])[0] == [plain]
