"""What a step changes is undone on this stage, and made again on another. Oracle: a clone that ran the step."""

from __future__ import annotations

import enum
import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder, in_stage_run
from lightning_shardckpt.parallel.pipeline.side_effects import ChangeRecorder, ModuleSnapshot, apply_changes

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
        self.array, self.phase = np.zeros(2), Phase.WARM
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("lazy", None)
        self.steps, self.note, self.nothing = 0, "start", None
        self.losses: list[Any] = [1.0, torch.tensor(2.0)]
        self.table: dict[str, Any] = {"x": 1, "y": torch.ones(2)}
        self.lists_in_tuple = ([1], [2])
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list)
        self.total = torch.zeros(2)
        self.first = self.second = [1]
        self.thing = Thing()
        self.window: deque[int] = deque([1], maxlen=3)
        self.metric, self.cats = MeanMetric(), CatMetric()
        scores = {"accuracy": MulticlassAccuracy(3), "precision": MulticlassPrecision(3)}
        self.scores = MetricCollection(scores, prefix="val_")


Step = Callable[[Any], Any]
ANSWERS = (torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([0, 1]))


def _item(m: Any) -> None:
    m.table["x"], m.table["z"] = 2, [3]
    m.table.pop("y", None)


STEPS: dict[str, Step] = {
    "nothing": lambda m: None,
    "a number": lambda m: setattr(m, "steps", m.steps + 1),
    "append with history": lambda m: m.losses.append((m.weight * 2).sum().detach()),
    "clear a list": lambda m: m.losses.clear(),
    "a tensor in a list": lambda m: m.losses[1].add_(1),
    "dict": _item,
    "list in a tuple": lambda m: m.lists_in_tuple[1].append(3),
    "defaultdict": lambda m: m.by_name["loss"].append(1.5),
    "a part of a tensor": lambda m: m.total[:1].add_(3),
    "buffer in place": lambda m: m.seen.add_(1),
    "buffer that is not saved": lambda m: m.scratch.add_(1),
    "buffer bound anew": lambda m: setattr(m, "seen", m.seen + 1),
    "buffer of another shape": lambda m: setattr(m, "mean", torch.ones(5)),
    "buffer filled": lambda m: setattr(m, "lazy", torch.ones(2)),
    "buffer emptied": lambda m: setattr(m, "mean", None),
    "a new buffer": lambda m: hasattr(m, "late") or m.register_buffer("late", torch.ones(1)),
    "a new attribute": lambda m: setattr(m, "fresh", {"a": [torch.ones(2)]}),
    "no attribute": lambda m: hasattr(m, "note") and delattr(m, "note"),
    "aliases": lambda m: (m.first.append(2), m.second.append(3)),
    "object to None": lambda m: setattr(m, "thing", None),
    "metric update": lambda m: m.metric.update(torch.tensor([1.0, 3.0])),
    "metric of a list": lambda m: (m.cats.update(torch.ones(2)), m.cats(torch.zeros(1))),
    "metrics twice": lambda m: (m.scores.update(*ANSWERS), m.scores(*ANSWERS)),
    "deque": lambda m: m.window.append(2),
    "array in place": lambda m: m.array.__iadd__(1),
    "enum": lambda m: setattr(m, "phase", Phase.HOT),
}


# such changes before the layers are outside of the contract
SENT_ONLY = {"a tensor in a list", "list in a tuple", "defaultdict", "metrics twice"}


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
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, int | float | str | enum.Enum | None) else type(value).__name__


def state(module: nn.Module) -> list[Any]:
    """All attributes and buffers of all modules."""
    skipped = {"_modules", "_parameters", "_non_persistent_buffers_set"}
    of_each = (vars(m).items() for m in module.modules())
    return [{k: look(v) for k, v in of if k not in skipped and "_hooks" not in k} for of in of_each]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_undone_to_the_same_objects_and_made_again_elsewhere(name: str) -> None:
    here, there, oracle = Module(), Module(), Module()
    before, objects = state(here), {**vars(here), **here._buffers}
    snapshot = ModuleSnapshot(here.modules())
    for _ in range(2 if name not in SENT_ONLY else 0):  # one snapshot serves many passes
        STEPS[name](here)
        snapshot.restore()
        assert state(here) == before
        assert all(value is objects[key] for key, value in {**vars(here), **here._buffers}.items())
    for _ in range(2):
        recorder = ChangeRecorder(parts(here))
        STEPS[name](oracle)
        STEPS[name](here)
        apply_changes(parts(there), pickle.loads(pickle.dumps(recorder.changes())), CPU)
        assert state(here) == state(there) == state(oracle)
    assert (state(there) == before) == (name == "nothing")


def test_parameters_are_left_alone_and_an_attribute_that_becomes_an_object_stays_on_other_stages() -> None:
    here, there = Module(), Module()
    snapshot, recorder = ModuleSnapshot(here.modules()), ChangeRecorder(parts(here))
    with torch.no_grad():
        here.weight += 1
    assert recorder.changes() == []
    here.nothing = Thing()  # type: ignore[assignment]
    apply_changes(parts(there), pickle.loads(pickle.dumps(recorder.changes())), CPU)
    snapshot.restore()
    assert there.nothing is here.nothing is None and here.weight.tolist() == [2, 2]


@pytest.mark.parametrize("attribute", ["mean", "total"])
def test_state_that_something_unknown_was_written_into_is_an_error_and_gets_its_value_back(attribute: str) -> None:
    module: Any = Module()
    tensor = getattr(module, attribute)
    before, snapshot, recorder = tensor.clone(), ModuleSnapshot(module.modules()), ChangeRecorder(parts(module))
    with in_stage_run():
        tensor[:] = Placeholder.like(tensor, "net.embed", CPU)
    module.losses.append(Placeholder.like(torch.ones(2), "net.head", CPU))
    with pytest.raises(UnsupportedCodeError, match=rf"({attribute}.*net\.embed|losses.*net\.head)"):
        pickle.dumps(recorder.changes())
    snapshot.restore()
    assert type(tensor) is Tensor and getattr(module, attribute) is tensor and torch.equal(tensor, before)
