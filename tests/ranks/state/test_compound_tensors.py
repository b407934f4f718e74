"""Tensors made of tensors: wrapper subclasses as parameters, buffers and optimizer state. Oracle: the values inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import FormatError, MismatchError, StateError
from lightning_shardckpt.state.compound_tensors import flatten_compound, unflatten_compound
from tests.support.pool import run_ranks

BLOCK = 4


class Blocks(Tensor):
    """Eight bits and a scale for each block of four elements, as optimizers with 8-bit moments have them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool = True) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    @classmethod
    def of(cls, value: Tensor) -> Blocks:
        scale = value.reshape(-1, BLOCK).abs().amax(1).clamp_min(1e-8)
        codes = (value.reshape(-1, BLOCK) / scale[:, None] * 127).round().to(torch.int8).reshape(value.shape)
        return cls(codes, scale)

    def whole(self) -> Tensor:
        return (self.codes.reshape(-1, BLOCK) / 127 * self.scale[:, None]).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Blocks:
        return cls(inner["codes"], inner["scale"], context["signed"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.default and tuple(args[1]) == args[0].shape:
            func, args = torch.ops.aten.detach.default, args[:1]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            of = args[0]
            made = cls(of.codes.clone(), of.scale.clone(), of.signed) if "clone" in str(func) else of
            return return_and_correct_aliasing(func, args, kwargs, cls(made.codes, made.scale, made.signed))
        raise NotImplementedError(str(func))


class BlockMomentum(torch.optim.Optimizer):
    """SGD whose momentum is kept in blocks of eight bits."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                kept = state["momentum"].whole() if "momentum" in state else torch.zeros_like(p)
                momentum = kept * 0.9 + p.grad
                state["momentum"] = Blocks.of(momentum)
                p.sub_(momentum, alpha=group["lr"])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def doubled(seed: int = 0) -> nn.Sequential:
    """A frozen weight and a buffer that are compound, one of them of compound tensors."""
    generator = torch.Generator().manual_seed(seed)
    module = net()
    a, b, c, d = (torch.randn(8, 8, generator=generator) for _ in range(4))
    module[0].weight = nn.Parameter(TwoTensor(a, b), requires_grad=False)  # type: ignore[no-untyped-call]
    inside = TwoTensor(TwoTensor(a.clone(), b.clone()), TwoTensor(c, d))  # type: ignore[no-untyped-call]
    module.register_buffer("pair", inside)
    return module


def inside(module: Any) -> list[Tensor]:
    pair = module.pair
    return [module[0].weight.a, module[0].weight.b, pair.a.a, pair.a.b, pair.b.a, pair.b.b]


def test_a_model_of_compound_tensors_is_filled_where_it_is(tmp_path: Path) -> None:
    module, other = doubled(0), doubled(1)
    ckpt.save(tmp_path / "c", {"model": module})
    before = [t.data_ptr() for t in inside(other)]
    assert ckpt.load(tmp_path / "c", {"model": other}) == {}
    assert all(torch.equal(a, b) for a, b in zip(inside(module), inside(other), strict=True))
    assert [t.data_ptr() for t in inside(other)] == before
    names = set(ckpt.metadata(tmp_path / "c").tensors)
    assert {"0.weight#a", "0.weight#b", "pair#a#a", "pair#b#b"} <= names


def test_optimizer_state_of_blocks_goes_on_exactly(tmp_path: Path) -> None:
    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            module(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    module = net()
    optimizer = BlockMomentum(module.parameters())
    steps(module, optimizer, range(3))
    ckpt.save(tmp_path / "c", {"model": module, "optimizer": optimizer})
    resumed = net()
    again = BlockMomentum(resumed.parameters())
    ckpt.load(tmp_path / "c", {"model": resumed, "optimizer": again})
    assert type(again.state[resumed[0].weight]["momentum"]) is Blocks
    for m, o in ((module, optimizer), (resumed, again)):
        steps(m, o, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


def sharded(path: str) -> list[Any]:
    """Weights of two tensors on a mesh: cut, saved, loaded where they are replicated. Blocks are refused."""
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(64.0).reshape(8, 8)
    mine = slice(mesh.get_local_rank() * 4, mesh.get_local_rank() * 4 + 4)

    def module(inner: Any, placement: Any) -> nn.Module:
        found = nn.Module()
        local = DTensor.from_local(inner, mesh, [placement], run_check=False)
        found.weight = nn.Parameter(local, requires_grad=False)
        return found

    two: Any = TwoTensor
    ckpt.save(f"{path}/two", {"model": module(two(value[mine].clone(), -value[mine]), Shard(0))})
    whole: Any = module(two(torch.zeros(8, 8), torch.zeros(8, 8)), Replicate())
    ckpt.load(f"{path}/two", {"model": whole})
    local = whole.weight._local_tensor
    said = ""
    try:
        ckpt.save(f"{path}/blocks", {"model": module(Blocks.of(value[mine]), Shard(0))})
    except StateError as error:
        said = str(error)
    return [torch.equal(local.a, value), torch.equal(local.b, -value), said]


@pytest.mark.slow
def test_inner_tensors_of_the_shape_of_the_whole_are_cut_anew_and_others_refused(tmp_path: Path) -> None:
    for a, b, said in run_ranks(2, sharded, str(tmp_path)):
        assert a and b
        assert "weight: scale of a" in said and "no other topology could load it" in said


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "(N|n)ested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    "on no device": (lambda: torch.ones(3, device="meta"), "meta device"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["value", "buffer", "moment"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(kind: str, where: str, tmp_path: Path) -> None:
    build, said = REFUSED[kind]
    state: dict[str, Any] = {"odd": build()}
    if where == "buffer":
        module = nn.Linear(2, 2)
        module.register_buffer("odd", build())
        state = {"model": module}
    elif where == "moment":
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["odd"] = build()
        state = {"model": module, "optimizer": optimizer}
    with pytest.raises(StateError, match=said) as caught:
        ckpt.save(tmp_path / "c", state)
    assert "odd" in str(caught.value)


def test_a_compound_value_is_refused_where_nobody_could_put_it_together(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"value: a torch\.testing.*TwoTensor is made of other tensors"):
        ckpt.save(tmp_path / "c", {"value": TwoTensor(torch.ones(2), torch.ones(2))})  # type: ignore[no-untyped-call]


def test_another_class_or_context_is_a_mismatch(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "c", {"model": doubled()})
    with pytest.raises(MismatchError, match=r"0\.weight  in model only"):
        ckpt.load(tmp_path / "c", {"model": net()})

    def blocks(signed: bool) -> nn.Module:
        module = nn.Linear(4, 4)
        kept = Blocks.of(torch.ones(4, 4))
        kept.signed = signed
        module.register_buffer("kept", kept)
        return module

    ckpt.save(tmp_path / "d", {"model": blocks(True)})
    with pytest.raises(MismatchError, match=r"'signed': True} in checkpoint, .*'signed': False} in model"):
        ckpt.load(tmp_path / "d", {"model": blocks(False)})


def test_a_context_that_is_no_data_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    kept = Blocks.of(torch.ones(4, 4))
    kept.signed = copy  # type: ignore[assignment]
    module.register_buffer("kept", kept)
    with pytest.raises(StateError, match=r"context of .*Blocks in kept"):
        ckpt.save(tmp_path / "c", {"model": module})


def test_classes_are_never_imported_and_records_are_checked() -> None:
    from lightning_shardckpt.state.json_tree import decode_small

    tensors, records = flatten_compound("m", Blocks.of(torch.ones(4, 4)))
    like = torch.empty(4, 4)

    def loaded(**changes: Any) -> dict[str, Any]:
        return {**tensors, "m#": {**decode_small(records["m#"]), **changes}}

    values = loaded()
    unflatten_compound("m", values, like)
    assert torch.equal(values["m"].whole(), torch.ones(4, 4))
    for name in ("this.Blocks", "os.system", "torch.Tensor", "builtins.eval", "antigravity.Any", ""):
        with pytest.raises(StateError, match="m was saved as a"):
            unflatten_compound("m", loaded(**{"class": name}), like)
    for changes in ({"tensors": ["codes", "more"]}, {"tensors": [3]}, {"class": None}):
        with pytest.raises(FormatError, match="m: "):
            unflatten_compound("m", loaded(**changes), like)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_that_torchao_quantized_come_back(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        return module

    module, other, inputs = quantized(0), quantized(1), torch.randn(2, 64)
    ckpt.save(tmp_path / "c", {"model": module})
    assert not torch.equal(other(inputs), module(inputs))
    ckpt.load(tmp_path / "c", {"model": other})
    assert torch.equal(other(inputs), module(inputs))
