"""Training that begins with weights of other programs. Oracle: transformers' own from_pretrained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_shardckpt import Pretrained, load
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.fabric import ShardedStrategy as OfFabric
from lightning_shardckpt.sources.key_mapping import KeyMapping
from tests.support import hub, tiny
from tests.support.hub import loss_of, model_of
from tests.support.nets import full_state
from tests.support.pool import run_each, run_ranks, selected

OLD = ["gpt2:as on the hub", "bert:as once"]
TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}


class Causal(hub.Causal):
    """Notes its first weights, and its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.first, self.loss = dict[str, Tensor](), 0.0

    def on_train_start(self) -> None:
        self.first = {name: tiny.whole(value) for name, value in self.state_dict().items()}

    def validation_step(self, batch: Any, index: int) -> None:
        loss_of(self.model, batch[0])

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = loss_of(self.model, tokens)
        self.tokens, self.loss = tokens, loss.item()
        return loss


def save_all(folder: str) -> None:
    torch.manual_seed(5)
    for kind in ("llama", "llama-tied", "qwen3", "qwen2-moe", "mixtral"):
        model_of(kind).save_pretrained(f"{folder}/{kind}", max_shard_size="20KB" if kind != "qwen3" else "1GB")
    save_as_once(f"{folder}/gpt2:as on the hub", model_of("gpt2"), {"^transformer.": ""})
    as_single_files(folder)
    old = {r"LayerNorm\.weight$": "LayerNorm.gamma", r"LayerNorm\.bias$": "LayerNorm.beta"}
    save_as_once(f"{folder}/bert:as once", model_of("bert"), old)


def save_as_once(path: str, model: Any, names: dict[str, str]) -> None:
    """As pytorch_model.bin, with names of earlier days; what is tied shares memory in it, under both names."""
    model.config.save_pretrained(path)
    state = model.state_dict()
    found = KeyMapping.of(names).apply(state)
    torch.save({new: state[old] for new, old in found.items()}, f"{path}/pytorch_model.bin")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a directory of Hugging Face's for each kind."""
    folder = str(tmp_path_factory.mktemp("saved"))
    run_ranks(1, save_all, folder, init_process_group=False)
    return folder


def begin(folder: str, kinds: list[str], strategy: dict[str, Any]) -> list[str]:
    """What differs from the oracle, after one step of each kind."""
    wrong = []
    for kind in kinds:
        pl.seed_everything(1)
        run = tiny.trainer({**strategy, "pretrained": f"{folder}/{kind}"}, max_steps=1, limit_val_batches=0)
        run.fit(module := Causal(kind), tiny.loader())
        expected = type(model_of(kind)).from_pretrained(f"{folder}/{kind}")
        whole = {f"model.{name}": value for name, value in expected.state_dict().items()}
        if strategy.get("pipeline_parallel_size", 1) > 1:
            whole = {name: value for name, value in whole.items() if name in module.first}
        wrong += [f"{kind}: {name}" for name in tiny.differences(whole, module.first)]
        loss = loss_of(expected.train(), module.tokens).item()
        if abs(loss - module.loss) > 1e-5 * loss:
            wrong.append(f"{kind}: the loss is {module.loss}, expected {loss}")
    return wrong


def through_other_doors(folder: str, kind: str) -> list[str]:
    """What differs from the oracle, by each way to load that is no start of training."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric())
    fabric.launch()
    path = f"{folder}/{kind}"
    (inside := Causal(kind)).configure_model()
    modules = {"load": model_of(kind), "load into a module with it": inside}
    modules |= {name: fabric.setup(model_of(kind)) for name in ("load of shards", "Fabric.load", "load_raw")}
    for name in ("load", "load into a module with it", "load of shards"):
        load(path, {"anything": modules[name]})
    fabric.load(path, {"a": modules["Fabric.load"]})
    fabric.load_raw(path, modules["load_raw"])
    expected, wrong = type(model_of(kind)).from_pretrained(path).state_dict(), []
    for door, module in modules.items():
        state = full_state(module.model if isinstance(module, Causal) else module)
        wrong += [f"{door}: {name}" for name in tiny.differences(expected, state)]
    return wrong


def begin_from_weights(folder: str) -> list[str]:
    """What differs where the weights are validated with, by stages, too, and why training cannot go on from them."""
    plain = type(model_of("llama")).from_pretrained(f"{folder}/llama").state_dict()
    wrong = []
    for name, stages in (("llama.safetensors", 1), ("llama.bin", 1), ("llama", 2)):
        run, module = tiny.trainer({"pipeline_parallel_size": stages}), Causal("llama")
        run.validate(module, tiny.loader(shuffle=False), ckpt_path=f"{folder}/{name}", verbose=False)
        found = full_state(module)
        whole = {f"model.{key}": value for key, value in plain.items() if stages == 1 or f"model.{key}" in found}
        wrong += [f"{name}: {key}" for key in tiny.differences(whole, found)]
        with pytest.raises(MismatchError, match=r"weights only, .* ShardedStrategy\(pretrained=path\)"):
            tiny.train(Causal("llama"), {}, 1, resume=f"{folder}/{name}")
    return wrong


def as_single_files(folder: str) -> None:
    import safetensors.torch

    state = type(model_of("llama")).from_pretrained(f"{folder}/llama").state_dict()
    safetensors.torch.save_file(state, f"{folder}/llama.safetensors")
    torch.save({name: value.clone() for name, value in state.items()}, f"{folder}/llama.bin")


def begin_fabric(folder: str, kind: str) -> list[str]:
    """What differs from the oracle, of a module that is set up first and of one that is set up after it."""
    strategy = OfFabric(pretrained=Pretrained(f"{folder}/{kind}", strict=True))
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model, other = model_of(kind), torch.nn.Linear(4, 8)
    found = full_state(fabric.setup_module(model)) | full_state(fabric.setup_module(other))
    torch.manual_seed(1)
    drawn = [model_of(kind), torch.nn.Linear(4, 8)][1].state_dict()
    return tiny.differences(type(model_of(kind)).from_pretrained(f"{folder}/{kind}").state_dict() | drawn, found)


# ── what does not fit ─────────────────────────────────────────────────────────────────────────────────────────────


class Classifier(Causal):
    """The base model of what was saved, built on the meta device, with a head of its own."""

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        with torch.device("meta"):
            self.model = model_of("llama").model
        self.head = torch.nn.Linear(16, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = self.model(input_ids=batch[0]).last_hidden_state
        return torch.nn.functional.cross_entropy(self.head(hidden[:, -1]), batch[0][:, 0] % 3)


def begin_with_differences(folder: str) -> list[str]:
    path = f"{folder}/llama"
    expected = type(model_of("llama")).from_pretrained(path).model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.train(module := Classifier("llama"), {"pretrained": path}, 1)
    told = [str(w.message) for w in caught if "left as they are: 3 differences" in str(w.message)]
    assert len(told) == (module.global_rank == 0)
    expected_lines = ("head.weight  in model only", "head.bias  in model only", "lm_head.weight  in checkpoint only")
    assert all(each in line for line in told for each in expected_lines)
    assert 0 < module.first["head.weight"].abs().max() <= 1 / 4  # of nn.Linear's own first values
    assert torch.equal(module.model.rotary_emb.inv_freq, expected.rotary_emb.inv_freq), "which is not stored"
    with pytest.raises(MismatchError, match=r"(?s)head.bias.*lm_head.weight.*strict=False in Pretrained"):
        tiny.train(Classifier("x"), {"pretrained": Pretrained(path, strict=True)}, 1)
    whole = {f"model.{name}": value for name, value in expected.state_dict().items()}
    head = {name: module.first[name] for name in ("head.weight", "head.bias")}
    return tiny.differences(whole | head, module.first)


# ── other ways ────────────────────────────────────────────────────────────────────────────────────────────────────


def first_of(module: Causal, precision: Any = "32-true", **options: Any) -> dict[str, Tensor]:
    pl.seed_everything(1)
    tiny.train(module, options, 1, precision=precision)
    return module.first


def without_head(name: str) -> str | None:
    return None if name.startswith("lm_head") else name


def begin_in_other_ways(folder: str) -> list[str]:
    path, save = f"{folder}/llama", f"{folder}/own.ckpt"
    expected = type(model_of("llama")).from_pretrained(path).state_dict()
    whole = {f"model.{name}": value for name, value in expected.items()}
    half = {name: value.bfloat16() for name, value in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the head that it leaves out
        mapped = first_of(Causal("llama"), pretrained=Pretrained(path, without_head))
    head = {"model.lm_head.weight": first_of(Causal("llama"))["model.lm_head.weight"]}
    tiny.train(trained := Causal("llama"), {}, 1, save=save)
    tiny.train(resumed := Causal("llama"), {"pretrained": "/nowhere"}, 2, resume=save)
    found = {
        "bf16-true": tiny.differences(half, first_of(Causal("llama"), "bf16-true", pretrained=path)),
        "mapped": tiny.differences(whole | head, mapped),
        "our checkpoint": tiny.differences(full_state(trained), first_of(Causal("llama"), pretrained=save)),
        "a ckpt_path, which has the weights": tiny.differences(full_state(trained), resumed.first),
    }
    with pytest.raises(CheckpointNotFoundError, match=r"no pretrained weights: .*'/nowhere'.*hf download"):
        first_of(Causal("llama"), pretrained="/nowhere")
    return [f"{way}: {name}" for way, names in found.items() for name in names]


WAYS: dict[str, tuple[Any, ...]] = {
    "FSDP2": (begin, [*OLD, "mixtral"], {}),
    "TP": (begin, ["qwen3"], TP),
    "PP": (begin, ["llama-tied"], {"pipeline_parallel_size": 2}),
    "other doors": (through_other_doors, "qwen2-moe"),
    "a ckpt_path": (begin_from_weights,),
    "Fabric": (begin_fabric, "llama-tied"),
    "differences": (begin_with_differences,),
    "precisions, mappings": (begin_in_other_ways,),
}
"""What returns the names of tensors that differ from those of transformers, after the folder of its directories."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, saved: str) -> dict[str, list[list[str]]]:
    """What each of two ranks found of the selected ways."""
    return run_each({way: (2, WAYS[way][0], saved, *WAYS[way][1:]) for way in selected(request, "way")})


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w == "TP" else pytest.mark.slow) for w in WAYS])
def test_every_rank_begins_with_its_slices_of_what_transformers_loads(
    way: str, found: dict[str, list[list[str]]]
) -> None:
    assert found[way] == [[], []]


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

LAYERS, WIDTH = 16, 1448  # of 8 MiB each


class Large(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def validation_step(self, batch: Any, index: int) -> None:
        self.used_bytes = used_bytes()
        self.sums = [tiny.whole(layer.weight).view(torch.int32).sum().item() for layer in self.layers]


def used_bytes() -> int:
    """The most resident memory so far."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


def load_large(path: str, plan: dict[str, Any]) -> tuple[int, int, list[int]]:
    """How much memory loading took more than before, and how much was read."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    before, read = used_bytes(), bytes_read()
    run = tiny.trainer({**plan, "pretrained": path}, limit_val_batches=1)
    run.validate(module := Large(), tiny.loader(shuffle=False), verbose=False)
    return module.used_bytes - before, bytes_read() - read, module.sums


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def save_large(path: str) -> list[int]:
    from safetensors.torch import save_file

    weights = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(LAYERS)}
    save_file(weights, path)
    return [weight.view(torch.int32).sum().item() for weight in weights.values()]


@pytest.mark.slow
def test_a_rank_needs_the_memory_and_reads_the_bytes_of_its_slices(tmp_path: Path) -> None:
    path = str(tmp_path / "large.safetensors")
    (sums,) = run_ranks(1, save_large, path, init_process_group=False)
    whole = LAYERS * WIDTH * WIDTH * 4
    plan = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.*": "rowwise"}}
    for strategy in ({}, plan):  # rows, columns
        for memory, read, found in run_ranks(2, load_large, path, strategy):
            assert found == sums
            assert memory < whole // 2 + (32 << 20), "half of the layers, and some of 8 MiB"
            assert read < 1.1 * whole // 2 + (4 << 20), "and a few files of Python"
