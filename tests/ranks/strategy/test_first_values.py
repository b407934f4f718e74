"""First values that no file has: of models on the meta device, and of modules that rank 0 builds in configure_model.

Oracles: transformers' own from_pretrained, and the same module built on the CPU.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shardckpt import save
from lightning_shardckpt.errors import RankError, StateError, UnsupportedCodeError
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


HEAD = "score.weight"  # random, and so not that of from_pretrained


def begin_a_judge(path: str, strategy: dict[str, Any]) -> tuple[list[str], list[Tensor]]:
    """What differs from the oracle, through the Trainer and, without stages, through Fabric; and the heads."""
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
    wrong = [name for one in found for name in tiny.differences({name: expected[name] for name in one}, one)]
    return [name for name in wrong if name != HEAD], [one[HEAD] for one in found[:1] if HEAD in one]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("base"))
    run_ranks(1, save_base, path, init_process_group=False)
    return path


def test_a_model_on_the_meta_device_begins_as_from_pretrained_does(base: str) -> None:
    calls = {name: (world, begin_a_judge, base, strategy) for name, (world, strategy) in TOPOLOGIES.items()}
    found = run_each(calls)
    assert {name: [wrong for wrong, _ in ranks] for name, ranks in found.items()} == {
        name: [[]] * world for name, (world, _) in TOPOLOGIES.items()
    }
    first, *others = [head for ranks in found.values() for _, heads in ranks for head in heads]
    assert len(others) == 5 and all(torch.equal(first, other) for other in others)
    assert 0.01 < first.std() < 0.03  # initializer_range is 0.02


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
            self.net = nn.Sequential(*layers, nn.Linear(16, 1))
            self.share = torch.rand(()).item()  # after random initialisations without memory

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
    if not torch.equal(module.random, state) or module.share != oracle.share:
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


# ── built by rank 0 ─────────────────────────────────────────────────────────────────────────────────────────────────


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
    with fabric.init_module(empty_init=True):
        net.layers.append(nn.Linear(4, 4))
        initialize(net)
    nn.init.normal_(net.layers[2].weight)  # after the context, too: rank 0's values count
    if dist.get_world_size() > 1:
        with pytest.raises((StateError, RankError), match=r"rank 1 .*meta device, it has no values to store"):
            save("before", {"model": net})
    optimizer = torch.optim.AdamW(net.parameters())
    fabric.setup(net, optimizer)
    torch.manual_seed(seed)
    expected = Small()
    expected.layers.append(nn.Linear(4, 4))
    initialize(expected)
    nn.init.normal_(expected.layers[2].weight)
    assert net.embed.weight is net.head.weight is next(p for p in optimizer.param_groups[0]["params"] if len(p) == 12)
    same = torch.equal(torch.get_rng_state(), fabric.broadcast(torch.get_rng_state()))
    wrong = tiny.differences(tensors(expected), tensors(net))
    return wrong if same or TP not in strategy else [*wrong, "random numbers"]


TP = "tensor_parallel_plan"


@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_may_be_initialised_in_init_module_and_after_it(tensor: int) -> None:
    plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    strategy = {"tensor_parallel_size": tensor, TP: plan} if tensor > 1 else {}
    for world in (2,) if tensor > 1 else (1, 2):
        assert run_ranks(world, initialized, strategy) == [[]] * world


class Counted(TorchDispatchMode):
    """Counts the elements of the live parameters with memory, and notes the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() >= 64:
                memory = tensor.untyped_storage()
                self.alive[memory._cdata] = StorageWeakRef(memory), memory.nbytes() // 4
        self.alive = {n: (weak, size) for n, (weak, size) in self.alive.items() if not weak.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


class Deep(Training):
    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Embedding(tiny.VOCABULARY, 64), *[nn.Linear(64, 64, bias=False) for _ in range(12)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).square().mean()


def most_memory() -> int:
    """The most elements of tensors with memory, from the beginning to the first step."""
    counted, run = Counted(), tiny.trainer({}, max_steps=1, limit_val_batches=0)

    class Measured(Deep):
        def configure_optimizers(self) -> Any:
            self.most = counted.most
            return super().configure_optimizers()

    with counted:
        run.fit(module := Measured(), tiny.loader())
    return module.most


def test_other_ranks_hold_their_shards_and_one_tensor() -> None:
    first, second = run_ranks(2, most_memory)
    whole, largest = tiny.VOCABULARY * 64 + 12 * 64 * 64, 64 * 64
    assert first >= whole
    assert whole / 2 <= second <= whole / 2 + 3 * largest  # a tensor that is sent, its bytes, and a slice


class Failing(Training):
    """Fails or differs on one rank."""

    def __init__(self, how: str, on: int) -> None:
        super().__init__()
        self.how, self.on = how, on

    def configure_model(self) -> None:
        width = 4
        if dist.get_rank() == self.on:
            if self.how == "fails":
                raise KeyError("no such file")
            width = 6 if self.how == "shape" else 4
        self.embed = nn.Embedding(tiny.VOCABULARY, width)
        if self.how == "name" and dist.get_rank() == self.on:
            self.extra = nn.Linear(2, 2)
        if self.how == "tie" and dist.get_rank() != self.on:
            self.other = nn.Embedding(tiny.VOCABULARY, width)
            self.other.weight = self.embed.weight
        elif self.how == "tie":
            self.other = nn.Embedding(tiny.VOCABULARY, width)


def fail(how: str, on: int) -> str:
    with pytest.raises(Exception) as error:  # its class depends on the rank
        tiny.trainer({}, max_steps=1).fit(Failing(how, on), tiny.loader())
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("on", [0, 1])
def test_a_failure_while_building_reaches_every_rank(on: int) -> None:
    found = run_ranks(2, fail, "fails", on)
    assert f"rank {on} failed while building the module in configure_model: " in found[1 - on]
    assert "KeyError: 'no such file'" in found[1 - on]
    assert "no such file" in found[on]
    assert ("move it into __init__" in found[1 - on]) == (on == 1)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", "embed.weight  parameter of Embedding  (10, 4) torch.float32 with gradient"),
        pytest.param("name", "extra.weight  parameter of Linear", marks=pytest.mark.sweep),
        ("tie", "other.weight  parameter of Embedding"),
    ],
)
def test_ranks_that_build_different_modules_are_told_where(how: str, text: str) -> None:
    for told in run_ranks(2, fail, how, 1):
        assert "rank 0 and rank 1 have built different modules:" in told
        assert text.replace("(10", f"({tiny.VOCABULARY}") in told


class ShardsItself(Training):
    """Is built by rank 0 and sharded in ``configure_model``, as under Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.embed = nn.Embedding(tiny.VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        nn.init.normal_(self.blocks[1][0].weight)
        if self._trainer is None:
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if tensor.size() > 1:
                parallelize_module(block, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(block, mesh=data)
        fully_shard(self, mesh=data)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def begin_by_hand(strategy: dict[str, Any]) -> list[str]:
    torch.manual_seed(2)
    (oracle := ShardsItself()).configure_model()
    torch.manual_seed(2)
    tiny.trainer(strategy, max_steps=1, limit_val_batches=0).fit(module := ShardsItself(), tiny.loader())
    return tiny.differences(tensors(oracle), module.first)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_modules_that_shard_themselves_begin_as_on_one_process(world: int) -> None:
    strategy = {"tensor_parallel_size": world // 2, "data_parallel_shard_size": 2}
    assert run_ranks(world, begin_by_hand, strategy) == [[]] * world


# ── built on the meta device by the user ────────────────────────────────────────────────────────────────────────────


class Encoder(Training):
    """Every kind of module of torch that has an initialisation of its own, and tied embeddings."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.embed = nn.Embedding(tiny.VOCABULARY, 8, padding_idx=0)
            sizes: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, **sizes) for _ in range(2))
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, tiny.VOCABULARY, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2)).square().mean()


def begin_encoder(strategy: dict[str, Any]) -> dict[str, Tensor]:
    pl.seed_everything(6, verbose=False)
    run = tiny.trainer(strategy, max_steps=1, limit_val_batches=0)
    run.fit(module := Encoder(), tiny.loader())
    return module.first


def test_what_modules_on_the_meta_device_make_themselves_is_the_same_on_every_topology() -> None:
    plan = {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    calls: dict[str, tuple[Any, ...]] = {
        "one": (1, begin_encoder, {}),
        "replicas": (2, begin_encoder, {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}),
        "FSDP3": (3, begin_encoder, {}),
        "TP": (2, begin_encoder, {"tensor_parallel_size": 2, "tensor_parallel_plan": plan}),
        "PP": (2, begin_encoder, {"pipeline_parallel_size": 2}),
    }
    found = run_each(calls)
    (first,) = found.pop("one")
    for ranks in found.values():
        for tensors_of_rank in ranks:
            assert tiny.differences({name: first[name] for name in tensors_of_rank}, tensors_of_rank) == []
    assert first["embed.weight"][0].eq(0).all() and 0.7 < first["embed.weight"][1:].std() < 1.3
    assert first["layers.0.self_attn.in_proj_bias"].eq(0).all() and first["norm.running_var"].eq(1).all()
    assert not torch.equal(first["layers.0.linear1.weight"], first["layers.1.linear1.weight"])
    assert first["layers.0.linear1.weight"].abs().max() <= 8**-0.5


class Repeated(Training):
    """Initialises itself as many do: ``self.apply(self._init_weights)``, and then more, or not."""

    def __init__(self, more: str) -> None:
        super().__init__()
        self.more = more

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.embed, self.head = nn.Embedding(tiny.VOCABULARY, 64), nn.Linear(64, 64)
        if self.more != "nothing":
            self.apply(self._init_weights)
        more = {
            "orthogonal": lambda: nn.init.orthogonal_(self.head.weight),
            "data": lambda: self.head.weight.data.mul_(0.5),
            "view": lambda: self.head.weight.detach()[0].zero_(),
        }
        more.get(self.more, lambda: None)()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).square().mean()


class Unrepeated(Repeated):
    """Initialises its parts by a method of another name."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.embed, self.head = nn.Embedding(tiny.VOCABULARY, 64), nn.Linear(64, 64)
        self.apply(self.first_values)

    def first_values(self, module: nn.Module) -> None:
        super()._init_weights(module)

    _init_weights = None  # type: ignore[assignment]


def begin_repeated() -> dict[str, Any]:
    found = dict[str, Any]()
    for name, module in {
        "nothing": Repeated("nothing"), "apply": Repeated("apply"), "orthogonal": Repeated("orthogonal"),
        "data": Repeated("data"), "view": Repeated("view"), "unrepeated": Unrepeated("apply"),
    }.items():  # fmt: skip
        try:
            tiny.trainer({}, max_steps=1, limit_val_batches=0).fit(module, tiny.loader())
            found[name] = module.first["head.weight"].std().item(), module.first["head.bias"].abs().max().item()
        except UnsupportedCodeError as error:
            found[name] = str(error)
    return found


TIMES = {"nothing": (1, 2), "orthogonal": (3, 2), "data": (3, 2), "view": (3, 2), "unrepeated": (2, 1)}


def test_an_initialisation_on_the_meta_device_that_no_method_repeats_is_refused() -> None:
    for found in run_ranks(2, begin_repeated):
        std, bias = found["apply"]
        assert 0.018 < std < 0.022 and bias == 0
        for name, (times, repeated) in TIMES.items():
            text = f"which was changed {times} times while it was built, and is changed {repeated} times by methods"
            assert f"  head.weight  parameter of Linear, {text}" in found[name]
