"""First values that no file has: of models on the meta device, and of tensors computed from weights while building.

Oracles: transformers' own from_pretrained under the same seed, and the same module built on the CPU.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from lightning_shardckpt import save
from lightning_shardckpt.errors import StateError, UnsupportedCodeError
from lightning_shardckpt.fabric import ShardedStrategy as OfFabric
from tests.support import tiny
from tests.support.pool import run_each, run_ranks

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "FSDP2": (2, {}),
    "TP": (2, {"tensor_parallel_size": 2}),
    "PP": (2, {"pipeline_parallel_size": 2}),
}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


def gemma(kind: str) -> Any:
    import transformers  # costs seconds, in the ranks that need it only

    config = transformers.Gemma2Config(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **SIZES)
    config.num_labels = 3
    return getattr(transformers, f"Gemma2For{kind}"), config


def save_base(path: str) -> None:
    torch.manual_seed(5)
    model, config = gemma("CausalLM")
    model(config).save_pretrained(path)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, whole; of a stage those that it has."""
    return {name: tiny.whole(tensor) for name, tensor in [*module.state_dict().items(), *module.named_buffers()]}


class Training(pl.LightningModule):
    def on_train_start(self) -> None:
        self.first = tensors(self)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self(batch[0])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Judge(Training):
    """A base model that files have, with a head that they don't, built without memory."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            model, config = gemma("SequenceClassification")
            with torch.device("meta"):
                self.model = model(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits, tokens[:, 0] % 3)


def begin_a_judge(path: str, strategy: dict[str, Any]) -> list[str]:
    """What differs from the oracle, through the Trainer and, without stages, through Fabric."""
    found, options = [], {**strategy, "pretrained": path}
    with warnings.catch_warnings(record=True):  # of the head that files lack
        warnings.simplefilter("always")
        pl.seed_everything(1)
        run = tiny.trainer(options, max_steps=1, limit_val_batches=0)
        run.fit(module := Judge(), tiny.loader())
        found.append({name.removeprefix("model."): value for name, value in module.first.items()})
        if not strategy:
            fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric(**options))
            fabric.launch()
            torch.manual_seed(1)
            (judge := Judge()).configure_model()
            fabric.setup_module(judge.model)
            found.append(tensors(judge.model))
    torch.manual_seed(1)
    model, _ = gemma("SequenceClassification")
    expected = tensors(model.from_pretrained(path, num_labels=3))
    assert strategy or all(one.keys() == expected.keys() for one in found)
    return [name for one in found for name in tiny.differences({name: expected[name] for name in one}, one)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("base"))
    run_ranks(1, save_base, path, init_process_group=False)
    return path


def test_a_model_on_the_meta_device_begins_as_from_pretrained_does(base: str) -> None:
    calls = {name: (world, begin_a_judge, base, strategy) for name, (world, strategy) in TOPOLOGIES.items()}
    assert run_each(calls) == {name: [[]] * world for name, (world, _) in TOPOLOGIES.items()}


class Anchored(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        with torch.no_grad():
            self.weight[[1, 5]] = self.weight[range(2)]
        self.register_buffer("initial", self.weight.detach().clone())
        self.scales = [self.weight.detach().std()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.initial) * self.scales[0]


class Computed(Training):
    """Has tensors that are computed from weights while it is built, in classes with ``reset_parameters``."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.embed = nn.Embedding(tiny.VOCABULARY, 16)
            layers = [parametrizations.spectral_norm(nn.Linear(16, 16)), spectral_norm(nn.Linear(16, 16)), Anchored()]
            self.net = nn.Sequential(*layers, parametrizations.orthogonal(nn.Linear(16, 16)), nn.Linear(16, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.net(self.embed(tokens)).square().mean()
        return found


def begin_computed(strategy: dict[str, Any]) -> list[str]:
    torch.manual_seed(2)
    (oracle := Computed()).configure_model()
    state = torch.get_rng_state()
    expected, loss = tensors(oracle), oracle.eval()(torch.arange(9).unsqueeze(0)).item()
    torch.manual_seed(2)
    run = tiny.trainer(strategy, max_steps=1, limit_val_batches=0)
    run.fit(module := Begun(), tiny.loader(shuffle=False))
    wrong = tiny.differences({name: expected[name] for name in module.first} if strategy else expected, module.first)
    if not torch.equal(module.random, state):
        wrong.append("random numbers")
    return wrong + ([] if strategy or abs(module.loss - loss) < 1e-6 else [f"{module.loss} for {loss}"])


class Begun(Computed):
    def setup(self, stage: str) -> None:
        self.loss = 0.0

    def on_fit_start(self) -> None:
        self.random = torch.get_rng_state()

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.trainer.strategy.topology.pipeline == 1:
            with torch.no_grad():
                self.loss = self.eval()(torch.arange(9, device=self.device).unsqueeze(0)).item()
            self.train()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("topology", ["one", "FSDP2"])
def test_tensors_computed_from_weights_while_building_are_those_of_one_process(topology: str) -> None:
    world, strategy = TOPOLOGIES[topology]
    assert run_ranks(world, begin_computed, strategy) == [[]] * world


class Shared(Training):
    """Its buffer is a row of its weight, which changes with it on one process."""

    def configure_model(self) -> None:
        self.embed = nn.Embedding(tiny.VOCABULARY, 4)
        self.embed.register_buffer("first_row", self.embed.weight.detach()[0])

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) * self.embed.first_row).sum()


def train_shared() -> None:
    with pytest.raises(
        UnsupportedCodeError, match=r"the buffer embed\.first_row is in the memory of the parameter embed\.weight"
    ):
        tiny.trainer({}, max_steps=1).fit(Shared(), tiny.loader())


def test_a_buffer_in_the_memory_of_a_parameter_is_refused() -> None:
    run_ranks(2, train_shared)


# ── what nothing fills ──────────────────────────────────────────────────────────────────────────────────────────────


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(tiny.VOCABULARY, 4)
        self.register_buffer("scale", torch.tensor(3.0))


class Incomplete(Training):
    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.where = device

    def configure_model(self) -> None:
        with torch.device(self.where):
            self.embed = Scaled()

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) * self.embed.scale).sum()


def begin_incomplete(strategy: dict[str, Any]) -> list[str]:
    told = []
    with pytest.raises(UnsupportedCodeError) as error:
        tiny.trainer(strategy, max_steps=1).fit(Incomplete(), tiny.loader())
    told.append(str(error.value))
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric(**strategy))
    fabric.launch()
    (module := Incomplete()).configure_model()
    with pytest.raises(UnsupportedCodeError) as error:
        fabric.setup_module(module)
    return [*told, str(error.value)]


def test_a_buffer_without_a_value_is_refused_by_every_rank() -> None:
    for rank in run_ranks(2, begin_incomplete, {}):
        assert all("  embed.scale  buffer of Scaled" in told for told in rank)


def resume_incomplete(path: str) -> list[str]:
    trained, resumed = Incomplete("cpu"), Incomplete("meta")
    tiny.trainer({}, max_steps=1).fit(trained, tiny.loader())
    trained.trainer.save_checkpoint(path)
    tiny.trainer({}, max_steps=2).fit(resumed, tiny.loader(), ckpt_path=path)
    return tiny.differences(tensors(trained), resumed.first)


def test_what_has_no_value_may_come_from_the_checkpoint_of_a_resume(tmp_path: Path) -> None:
    assert run_ranks(2, resume_incomplete, str(tmp_path / "a.ckpt")) == [[], []]


# ── initialised in init_module, not after it ────────────────────────────────────────────────────────────────────────


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def initialize(net: Small) -> None:
    """In place, by methods that are bound to modules, through ``data``, indices and ties."""

    def normal(module: Any, std: float) -> None:
        nn.init.normal_(module.weight, std=std)

    for module in net.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            module.reset_parameters = partial(normal, module, 0.3)
    for module in net.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    net.layers[0].weight.data[0].mul_(3.0)
    with torch.no_grad():
        net.layers[0].weight[[1, 2]] = net.layers[0].weight[0].clone()
        net.layers[0].bias.copy_(net.head.weight.data[:4].sum(1))
    net.embed.weight = net.head.weight


def initialized(strategy: dict[str, Any], seed: int = 4) -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=OfFabric(**strategy))
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    with fabric.init_module(empty_init=True):
        net = Small()
    for use in (lambda: nn.init.zeros_(net.head.weight), lambda: net.head.weight.data, lambda: net.head.weight.sum()):
        with pytest.raises(StateError, match=r"no memory before fabric\.setup\. Initialise them inside"):
            use()
    with fabric.init_module(empty_init=True):
        net.layers.append(nn.Linear(4, 4))
        initialize(net)
    with pytest.raises(StateError, match=r"load and save after fabric\.setup"):
        save("before", {"model": net})
    optimizer = torch.optim.AdamW(net.parameters())
    fabric.setup(net, optimizer)
    torch.manual_seed(seed)
    expected = Small()
    expected.layers.append(nn.Linear(4, 4))
    initialize(expected)
    assert net.embed.weight is net.head.weight is next(p for p in optimizer.param_groups[0]["params"] if len(p) == 12)
    return tiny.differences(tensors(expected), tensors(net))


@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_are_initialised_in_init_module_alone(tensor: int) -> None:
    plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    strategy = {"tensor_parallel_size": tensor, "tensor_parallel_plan": plan}
    for world in (2,) if tensor > 1 else (1, 2):
        assert run_ranks(world, initialized, strategy) == [[]] * world
