"""What a step changes is undone on this stage, and made again on another. Oracle: a clone that ran the step."""

from __future__ import annotations

import datetime
import enum
import pickle
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder, in_stage_run
from lightning_shardckpt.parallel.pipeline.side_effects import ModuleSnapshot

CPU = torch.device("cpu")


class Thing:
    """Neither a number nor a container, and it cannot be pickled."""

    def __init__(self) -> None:
        self.work = lambda: None


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(3)
        self.array, self.count, self.phase = np.zeros(2), np.int64(0), Phase.WARM
        self.day, self.folder, self.dtype_of = datetime.date(2026, 1, 1), Path("a"), torch.float32
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("lazy", None)
        self.steps, self.rate, self.note, self.nothing = 0, 0.5, "start", None
        self.losses: list[Any] = [1.0, torch.tensor(2.0)]
        self.pair = (1, 2)
        self.kinds = {"a", "b"}
        self.table: dict[str, Any] = {"x": 1, "y": torch.ones(2)}
        self.nested = {"train": [1], "val": {"deep": [2]}}
        self.lists_in_tuple = ([1], [2])
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list)
        self.words = Counter({"a": 2, "b": 1})
        self.total = torch.zeros(2)
        self.first = self.second = [1]
        self.hparams = AttributeDict(rate=0.1, sizes=[1, 2])
        self.thing = Thing()
        self.things = [Thing()]
        self.window: deque[int] = deque([1], maxlen=3)
        self.metric = MeanMetric()
        self.cats = CatMetric()
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(3), "precision": MulticlassPrecision(3)}, prefix="val_"
        )


Step = Callable[[Any], Any]
ANSWERS = (torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([0, 1]))


def _increment(m: Any) -> None:
    m.steps += 1


def _set(name: str, value: Callable[[], Any]) -> Step:
    return lambda m: setattr(m, name, value())


def _item(m: Any) -> None:
    m.table["x"], m.table["z"] = 2, [3]
    del m.table["y"]


def _both(m: Any) -> None:
    m.first.append(2)
    m.second.append(3)


def _several(m: Any) -> None:
    for step in ("a number", "append", "nested", "buffer in place", "a new attribute", "metric update"):
        STEPS[step](m)


STEPS: dict[str, Step] = {
    "nothing": lambda m: None,
    "a number": _increment,
    "a number to None": _set("rate", lambda: None),
    "append": lambda m: m.losses.append(torch.tensor(3.0)),
    "append with history": lambda m: m.losses.append((m.weight * 2).sum().detach()),
    "clear a list": lambda m: m.losses.clear(),
    "tuple": _set("pair", lambda: (3, 4)),
    "set": lambda m: m.kinds.add("c"),
    "dict": _item,
    "nested": lambda m: (m.nested["train"].append(torch.ones(1)), m.nested["val"]["deep"].clear()),
    "list in a tuple": lambda m: m.lists_in_tuple[1].append(3),
    "counter": lambda m: m.words.update("ac"),
    "defaultdict": lambda m: m.by_name["loss"].append(1.5),
    "tensor in place": lambda m: m.total.add_(1),
    "a part of a tensor": lambda m: m.total[:1].fill_(3),
    "buffer in place": lambda m: m.seen.add_(1),
    "buffer bound anew": lambda m: setattr(m, "seen", m.seen + 1),
    "buffer of another shape": _set("mean", lambda: torch.ones(5)),
    "buffer filled": _set("lazy", lambda: torch.ones(2)),
    "buffer emptied": _set("mean", lambda: None),
    "a new buffer": lambda m: m.register_buffer("late", torch.ones(1)),
    "a new attribute": _set("fresh", lambda: {"a": [torch.ones(2)]}),
    "no attribute": lambda m: delattr(m, "note"),
    "hparams": lambda m: m.hparams.update(rate=0.2),
    "aliases": _both,
    "object to None": _set("thing", lambda: None),
    "metric update": lambda m: m.metric.update(torch.tensor([1.0, 3.0])),
    "metric of a list": lambda m: (m.cats.update(torch.ones(2)), m.cats(torch.zeros(1))),
    "metrics twice": lambda m: (m.scores.update(*ANSWERS), m.scores(*ANSWERS)),
    "generator": lambda m: m.draw.random(),
    "deque": lambda m: m.window.append(2),
    "array in place": lambda m: m.array.__iadd__(1),
    "a number of numpy": lambda m: setattr(m, "count", m.count + 1),
    "enum": _set("phase", lambda: Phase.HOT),
    "date": _set("day", lambda: datetime.date(2027, 1, 1)),
    "path": _set("folder", lambda: Path("b")),
    "dtype": _set("dtype_of", lambda: torch.float64),
    "everything": _several,
}


ONCE = {"dict", "no attribute", "buffer emptied", "a new buffer"}


def parts(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules())


def look(value: Any) -> Any:
    """``value`` to compare: tensors by their bits, containers by their contents."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.detach().tolist())
    if isinstance(value, list | tuple | deque):
        return (type(value).__name__, [look(item) for item in value])
    if isinstance(value, dict):
        return (type(value).__name__, {key: look(item) for key, item in value.items()})
    if isinstance(value, set):
        return set(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.generic | enum.Enum | datetime.date | Path | torch.dtype):
        return value
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def state(module: nn.Module) -> list[Any]:
    """All attributes and buffers of all modules."""
    skipped = {"_modules", "_parameters", "_non_persistent_buffers_set"}
    of_each = (vars(m).items() for m in module.modules())
    return [{k: look(v) for k, v in of if k not in skipped and "_hooks" not in k} for of in of_each]


@pytest.mark.parametrize("name", STEPS)
def test_restoring_leaves_everything_as_it_was_the_objects_too(name: str) -> None:
    module: Any = Module()
    before = state(module)
    objects = {k: v for m in module.modules() for k, v in {**vars(m), **m._buffers}.items()}
    tensors = {k: id(v) for k, v in {**vars(module), **module._buffers}.items()}
    snapshot = ModuleSnapshot(parts(module))
    for _ in range(2):  # one snapshot serves many passes
        STEPS[name](module)
        snapshot.restore()
        assert state(module) == before
    assert {k: id(v) for k, v in {**vars(module), **module._buffers}.items()} == tensors
    assert objects  # kept alive, so that no id is used twice
    other = Module()
    ModuleSnapshot(parts(other)).apply(snapshot.changes(), CPU)
    assert state(other) == before


@pytest.mark.parametrize("name", STEPS)
def test_changes_make_another_stage_as_if_it_had_run_the_step(name: str) -> None:
    here, there, oracle = Module(), Module(), Module()
    before = state(oracle)
    for _ in range(1 if name in ONCE else 2):
        snapshot, other = ModuleSnapshot(parts(here)), ModuleSnapshot(parts(there))
        STEPS[name](oracle)
        STEPS[name](here)
        other.apply(pickle.loads(pickle.dumps(snapshot.changes())), CPU)
        assert state(here) == state(oracle)  # looking changes nothing
        assert state(there) == state(oracle)
        assert (state(there) == before) == (name == "nothing")


def test_what_was_sent_shares_no_memory_and_no_history_with_the_module() -> None:
    module: Any = Module()
    snapshot = ModuleSnapshot(parts(module))
    module.total = module.weight * 2
    module.losses.append(module.weight * 3)
    module.mean += 1
    found = {change.name: change.value for change in snapshot.changes()}
    module.mean += 1
    assert not found["total"].requires_grad
    assert not found["losses"][0].requires_grad
    assert found["mean"].tolist() == [1, 1, 1]


def test_a_list_that_grows_is_sent_by_what_is_new() -> None:
    module: Any = Module()
    module.losses = [torch.ones(1)] * 1000
    snapshot = ModuleSnapshot(parts(module))
    module.losses.append(2.0)
    (change,) = snapshot.changes()
    assert (change.kind, change.name, change.value) == ("extend", "losses", [2.0])


def test_parameters_are_left_alone_and_buffers_that_are_not_saved_are_not() -> None:
    module: Any = Module()
    snapshot = ModuleSnapshot(parts(module))
    with torch.no_grad():
        module.weight += 1
    assert snapshot.changes() == []
    module.scratch += 1
    assert [change.name for change in snapshot.changes()] == ["scratch"]
    snapshot.restore()
    assert module.scratch.tolist() == [0, 0, 0]
    assert module.weight.tolist() == [2, 2]


def test_an_attribute_that_becomes_an_object_is_not_deleted_on_other_stages() -> None:
    here: Any = Module()
    there: Any = Module()
    snapshot, other = ModuleSnapshot(parts(here)), ModuleSnapshot(parts(there))
    here.nothing = Thing()
    other.apply(pickle.loads(pickle.dumps(snapshot.changes())), CPU)
    assert there.nothing is None
    snapshot.restore()
    assert here.nothing is None


def test_a_change_in_a_module_that_other_stages_lack_is_refused() -> None:
    here: Any = Module()
    snapshot = ModuleSnapshot({**parts(here), "late": (late := Module())})
    late.scratch.add_(1)
    with pytest.raises(UnsupportedCodeError, match=r"changes scratch of late, a module that a step has registered"):
        ModuleSnapshot(parts(here)).apply(snapshot.changes(), CPU)


def test_a_tensor_in_a_list_that_is_changed_in_place_is_sent() -> None:
    here: Any = Module()
    there: Any = Module()
    snapshot, other = ModuleSnapshot(parts(here)), ModuleSnapshot(parts(there))
    here.table["y"] += 2
    here.losses[1].mul_(3)
    other.apply(pickle.loads(pickle.dumps(snapshot.changes())), CPU)
    assert state(there) == state(here)


@pytest.mark.parametrize("attribute", ["mean", "total"])
@pytest.mark.parametrize("write", ["+=", "[:]", "copy_"])
def test_state_that_something_unknown_was_written_into_gets_its_value_back(attribute: str, write: str) -> None:
    module: Any = Module()
    tensor = getattr(module, attribute)
    before, snapshot = tensor.clone(), ModuleSnapshot(parts(module))
    unknown = Placeholder.like(tensor, "net.embed", CPU)
    with in_stage_run():
        if write == "+=":
            tensor += unknown
        elif write == "[:]":
            tensor[:] = unknown
        else:
            tensor.copy_(unknown)
    with pytest.raises(UnsupportedCodeError, match=rf"{attribute}.*net\.embed"):
        snapshot.changes()
    snapshot.restore()
    assert type(tensor) is Tensor
    assert getattr(module, attribute) is tensor
    assert torch.equal(tensor, before)


def test_an_attribute_that_became_unknown_is_an_error_that_names_it() -> None:
    module: Any = Module()
    snapshot = ModuleSnapshot(parts(module))
    module.losses.append(Placeholder.like(torch.ones(2), "net.embed", CPU))
    with pytest.raises(UnsupportedCodeError, match=r"losses.*net\.embed"):
        pickle.dumps(snapshot.changes())
