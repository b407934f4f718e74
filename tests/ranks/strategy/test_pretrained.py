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

from lightning_shardckpt import ShardCkptIO, load, load_from_checkpoint
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.fabric import ShardedStrategy as OfFabric
from lightning_shardckpt.format.clean_fqn import without_peft_layers
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
        self.log("val", loss_of(self.model, batch[0]), sync_dist=True)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = loss_of(self.model, tokens)
        self.tokens, self.loss = tokens, loss.item()
        return loss


def save_all(folder: str) -> None:
    torch.manual_seed(5)
    for kind in ("llama", "llama-tied", "qwen3", "qwen2-moe", "mixtral", "vit"):
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


def inside(kind: str) -> Causal:
    module = Causal(kind)
    module.configure_model()
    return module


def by_validate(kind: str, path: str) -> Causal:
    run = tiny.trainer({}, limit_val_batches=0)
    run.validate(module := Causal(kind), tiny.loader(), ckpt_path=path, verbose=False)
    return module


def through_other_doors(folder: str, kinds: list[str]) -> list[str]:
    """What differs from the oracle, of each kind and way to load it that is no start of training."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric())
    fabric.launch()
    sharded: dict[str, Any] = {
        "load": lambda module, path: load(path, {"a": module}),
        "Fabric.load": lambda module, path: fabric.load(path, {"a": module}),
        "load_raw": lambda module, path: fabric.load_raw(path, module),
    }
    built: dict[str, Any] = {"the model": model_of, "a module with it": inside}
    wrong = []
    for kind in kinds:
        path, found = f"{folder}/{kind}", dict[str, Any]()
        expected = type(model_of(kind)).from_pretrained(path).state_dict()
        for what, build in built.items():
            found[f"load, {what}"] = module = build(kind)
            load(path, {"anything": module})
            for door, load_it in sharded.items():
                load_it(fabric.setup(module := build(kind)), path)
                found[f"{door} of shards, {what}"] = module
        found["load_from_checkpoint"] = load_from_checkpoint(Causal, path, kind=kind)
        found["validate"] = by_validate(kind, path)
        for door, module in found.items():
            inner = module.model if isinstance(module, Causal) else module
            state = {name: tiny.whole(value) for name, value in inner.state_dict().items()}
            wrong += [f"{kind}, {door}: {name}" for name in tiny.differences(expected, state)]
    return wrong


def begin_from_weights(folder: str) -> list[str]:
    """What differs where the weights are validated with, and why training cannot go on from them."""
    plain = type(model_of("llama")).from_pretrained(f"{folder}/llama").state_dict()
    expected = {f"model.{name}": value for name, value in plain.items()}
    wrong = []
    names: set[str] = set()
    for name in ("llama", "llama.safetensors", "llama.bin", "llama"):
        path, stages = f"{folder}/{name}", 2 if names else 1
        run = tiny.trainer({"pipeline_parallel_size": stages})
        run.validate(module := Causal("llama"), tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
        found = {name: tiny.whole(value) for name, value in module.state_dict().items()}
        whole = {name: value for name, value in expected.items() if name in found or stages == 1}
        wrong += [f"{path} on {stages}: {name}" for name in tiny.differences(whole, found)]
        names |= {name} if name == "llama.bin" else set()
        with pytest.raises(MismatchError, match=r"weights only, .* ShardedStrategy\(pretrained=path\)"):
            tiny.trainer({}, max_steps=1).fit(Causal("llama"), tiny.loader(), ckpt_path=path)
    return wrong


def as_single_files(folder: str) -> None:
    import safetensors.torch

    state = type(model_of("llama")).from_pretrained(f"{folder}/llama").state_dict()
    safetensors.torch.save_file(state, f"{folder}/llama.safetensors")
    torch.save({name: value.clone() for name, value in state.items()}, f"{folder}/llama.bin")


def begin_fabric(folder: str, kinds: list[str], strategy: dict[str, Any]) -> list[str]:
    """What differs from the oracle, of a module that is set up first and of one that is set up after it."""
    wrong = []
    for kind in kinds:
        options = {**strategy, "pretrained": f"{folder}/{kind}", "pretrained_strict": True}
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric(**options))
        fabric.launch()
        torch.manual_seed(1)
        with fabric.init_module(empty_init=True):
            model, other = model_of(kind), torch.nn.Linear(4, 8)
        first = fabric.setup_module(model)
        expected = type(model_of(kind)).from_pretrained(f"{folder}/{kind}").state_dict()
        found = full_state(first)
        if strategy.get("pipeline_parallel_size", 1) > 1:
            expected = {name: value for name, value in expected.items() if name in found}
        if not strategy:
            torch.manual_seed(1)
            drawn = [model_of(kind), torch.nn.Linear(4, 8)][1].state_dict()
            found |= full_state(fabric.setup_module(other))
            expected |= drawn
        wrong += [f"{kind}: {name}" for name in tiny.differences(expected, found)]
    return wrong


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
    wrong = []
    path = f"{folder}/llama"
    expected = type(model_of("llama")).from_pretrained(path).model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = tiny.trainer({"pretrained": path}, max_steps=1, limit_val_batches=0)
        run.fit(module := Classifier("llama"), tiny.loader())
    told = [str(w.message) for w in caught if "pretrained weights" in str(w.message)]
    if (module.global_rank == 0) != (len(told) == 1) or not all(
        "not in it, so with first values: 2 tensors\n  head.bias\n  head.weight" in line
        and "not in the model: 1 tensor\n  lm_head.weight" in line
        for line in told
    ):
        wrong.append(f"told {told}")
    whole = {f"model.{name}": value for name, value in expected.state_dict().items()}
    whole |= {name: module.first[name] for name in ("head.weight", "head.bias")}
    wrong += tiny.differences(whole, module.first)
    bound = 1 / 4  # of nn.Linear's own first values
    if not 0 < module.first["head.weight"].abs().max() <= bound:
        wrong.append("the head has no first values")
    rotary = module.model.rotary_emb.inv_freq
    if not torch.equal(rotary, expected.rotary_emb.inv_freq):
        wrong.append("buffers that are not stored were not computed")
    with pytest.raises(MismatchError, match=r"(?s)head.bias.*lm_head.weight.*pretrained_strict=False"):
        tiny.trainer({"pretrained": path, "pretrained_strict": True}, max_steps=1).fit(Classifier("x"), tiny.loader())
    with pytest.raises(MismatchError, match=r"(?s)cannot begin .* 3 differences.*\(64, 16\) in checkpoint, \(64, 5\)"):
        tiny.trainer({"pretrained": path}, max_steps=1).fit(Odd(), tiny.loader())
    return wrong


class Odd(pl.LightningModule):
    """Some names of Llama, with other shapes and a dtype of integers."""

    def configure_model(self) -> None:
        self.lm_head = torch.nn.Linear(5, 64, bias=False)
        self.model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(7, bias=False)})
        inner = torch.nn.Module()
        inner.register_buffer("weight", torch.zeros(64, 16, dtype=torch.int64))
        self.model["embed_tokens"] = inner

    def training_step(self, batch: Any, index: int) -> None:
        raise AssertionError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ── other ways ────────────────────────────────────────────────────────────────────────────────────────────────────


class Adapted(Causal):
    def configure_model(self) -> None:
        import peft

        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # transformers, of PEFT
        if hasattr(self, "model"):
            return
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], r=2)
        self.model = peft.get_peft_model(model_of(self.kind), config)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ShardsItself(Causal):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            self.model = model_of(self.kind)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class AdaptersAlone(Adapted):
    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if ".lora_" in name}


def of_adapters_alone(path: str, save: str, expected: dict[str, Tensor]) -> tuple[str, dict[str, Tensor], Any]:
    """What a run begins with that has the base from one place and adapters from a checkpoint, and what it should."""
    run = tiny.trainer({"pretrained": path}, max_steps=1, limit_val_batches=0)
    run.fit(trained := AdaptersAlone("llama"), tiny.loader())
    run.save_checkpoint(save)
    names = {name: without_peft_layers(name).removeprefix("model.base_model.model.") for name in trained.first}
    lora = {name: tiny.whole(value) for name, value in trained.state_dict().items() if ".lora_" in name}
    resumed = AdaptersAlone("llama")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* differences between")
        again = tiny.trainer({"pretrained": path}, max_steps=2, limit_val_batches=0)
        again.fit(resumed, tiny.loader(), ckpt_path=save)
    return "adapters alone", resumed.first, {n: expected[names[n]] for n in trained.first if n not in lora} | lora


def of_adapters_only(path: str, save: str, expected: dict[str, Tensor]) -> tuple[str, dict[str, Tensor], Any]:
    """The same of a module that is loaded strictly, and a checkpoint that says what it leaves out."""
    options = {"max_steps": 1, "limit_val_batches": 0, "plugins": [ShardCkptIO(adapters_only=True)]}
    run = tiny.trainer({"pretrained": path}, **options)
    run.fit(trained := Adapted("llama"), tiny.loader())
    run.save_checkpoint(save)
    kept = {name for name in trained.first if ".lora_" in name or ".modules_to_save." in name}
    end = {name: tiny.whole(value) for name, value in trained.state_dict().items() if name in kept}
    tiny.trainer({"pretrained": path}, **options | {"max_steps": 2}).fit(
        resumed := Adapted("llama"), tiny.loader(), ckpt_path=save
    )
    names = {name: without_peft_layers(name).removeprefix("model.base_model.model.") for name in trained.first}
    return "adapters_only", resumed.first, {n: expected[names[n]] for n in trained.first if n not in kept} | end


def first_of(module: Causal, **options: Any) -> dict[str, Tensor]:
    pl.seed_everything(1)
    precision = options.pop("precision", "32-true")
    run = tiny.trainer(options, max_steps=1, limit_val_batches=0, precision=precision)
    run.fit(module, tiny.loader())
    return module.first


def without_head(name: str) -> str | None:
    return None if name.startswith("lm_head") else name


def begin_in_other_ways(folder: str) -> list[str]:
    path = f"{folder}/llama"
    expected = type(model_of("llama")).from_pretrained(path).state_dict()
    wrong = []

    def compare(what: str, found: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
        wrong.extend(f"{what}: {name}" for name in tiny.differences(whole, found))

    adapted = first_of(Adapted("llama"), pretrained=path)
    untouched = first_of(Adapted("llama"))
    names = {name: without_peft_layers(name).removeprefix("model.base_model.model.") for name in adapted}
    lora = {name: untouched[name] for name in adapted if ".lora_" in name}
    compare("LoRA", adapted, lora | {n: expected[names[n]] for n in adapted if n not in lora})
    if len(lora) != 8:
        wrong.append(f"{len(lora)} adapters")

    whole = {f"model.{name}": value for name, value in expected.items()}
    compare("a model that shards itself", first_of(ShardsItself("llama"), pretrained=path), whole)
    half = {f"model.{name}": value.bfloat16() for name, value in expected.items()}
    compare("HSDP", first_of(Causal("llama"), pretrained=path, data_parallel_replicate_size=2), whole)
    compare("bf16-true", first_of(Causal("llama"), pretrained=path, precision="bf16-true"), half)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapped = first_of(Causal("llama"), pretrained=path, pretrained_key_mapping=without_head)
    fresh = first_of(Causal("llama"))
    compare("mapped", mapped, whole | {"model.lm_head.weight": fresh["model.lm_head.weight"]})

    save = f"{folder}/own.ckpt"
    (run := tiny.trainer({}, max_steps=1, limit_val_batches=0)).fit(trained := Causal("llama"), tiny.loader())
    run.save_checkpoint(save)
    end = {name: tiny.whole(value) for name, value in trained.state_dict().items()}
    compare("a checkpoint of this package", first_of(Causal("llama"), pretrained=save), end)
    resumed = Causal("llama")
    nowhere = tiny.trainer({"pretrained": "/nowhere"}, max_steps=2, limit_val_batches=0)
    nowhere.fit(resumed, tiny.loader(), ckpt_path=save)
    compare("a ckpt_path, which has the weights", resumed.first, end)
    compare(*of_adapters_alone(path, f"{folder}/adapters.ckpt", expected))
    compare(*of_adapters_only(path, f"{folder}/only.ckpt", expected))
    with pytest.raises(CheckpointNotFoundError, match=r"no pretrained weights: .*'/nowhere'.*hf download"):
        first_of(Causal("llama"), pretrained="/nowhere")
    return wrong


WAYS: dict[str, tuple[Any, ...]] = {
    "FSDP2": (begin, [*OLD, "mixtral"], {}),
    "TP": (begin, ["llama", "qwen3"], TP),
    "PP": (begin, ["qwen3", "llama-tied"], {"pipeline_parallel_size": 2}),
    "other doors": (through_other_doors, ["qwen2-moe", "vit"]),
    "a ckpt_path": (begin_from_weights,),
    "Fabric, FSDP2": (begin_fabric, ["llama-tied"], {}),
    "Fabric, PP": (begin_fabric, ["qwen3"], {"pipeline_parallel_size": 2}),
    "differences": (begin_with_differences,),
    "adapters, precisions, mappings": (begin_in_other_ways,),
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

    def on_validation_start(self) -> None:
        self.used_bytes = used_bytes()
        self.sums = [tiny.whole(layer.weight).view(torch.int32).sum().item() for layer in self.layers]

    def validation_step(self, batch: Any, index: int) -> None:
        pass


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
