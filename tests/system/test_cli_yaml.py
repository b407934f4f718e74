"""Strategy and CheckpointIO given in YAML alone, with code that knows nothing of this package."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.pool import run_each, run_ranks

EVERY_ARGUMENT: dict[str, Any] = {
    "data_parallel_shard_size": 3,
    "data_parallel_replicate_size": 2,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "tensor_parallel_plan": {"embed": "embedding_rowwise", "blocks.*.up": "colwise"},
    "fsdp": {
        "units": ["blocks.*"],
        "reshard_after_forward": False,
        "activation_checkpointing": ["Block"],
        "cpu_offload": True,
        "ignored": ["head"],
        "reduce_dtype": "float32",
    },
    "pipeline": {
        "layers": ["net.blocks.*"],
        "split": ["net.blocks.1"],
        "modules": {"net.head": "last"},
        "schedule": "looped_bfs",
        "microbatches": 3,
        "loss": "microbatch",
        "stages_per_rank": 2,
    },
    "pretrained": "weights/llama",
    "pretrained_key_mapping": {"^gpt_neox": "model", "masked_bias$": None},
    "pretrained_strict": True,
    "timeout_s": 12.5,
}
SINGLE = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "plugins": [{"class_path": "lightning_shardckpt.ShardCkptIO"}],
}


@dataclass
class Parsed:
    """What a LightningCLI made of its arguments."""

    strategy: str
    attributes: dict[str, Any]
    checkpoint_io: str
    size_per_shard: float
    verify: bool
    devices: int


def cli(*arguments: str) -> Any:
    """A LightningCLI for BoringModel; runs the subcommand, if `arguments` begin with one."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    _be_the_command_line(arguments)
    run = arguments[0] == "fit"
    return LightningCLI(BoringModel, run=run, seed_everything_default=False, save_config_callback=None)


def _be_the_command_line(arguments: Sequence[str]) -> None:
    """For the rest of this process, which is a child of the pool."""
    sys.argv = ["train.py", *arguments]
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI itself uses what they are about


def parse(*arguments: str) -> Parsed:
    return parsed(cli(*arguments))


def parsed(made: Any) -> Parsed:
    strategy = made.trainer.strategy
    return Parsed(
        strategy=type(strategy).__name__,
        attributes=plain(strategy),
        checkpoint_io=type(strategy.checkpoint_io).__name__,
        size_per_shard=strategy.checkpoint_io.save_options.size_per_shard,
        verify=strategy.checkpoint_io.load_options.verify,
        devices=made.trainer.num_devices,
    )


def plain(strategy: Any) -> dict[str, Any]:
    """Return the attributes that the arguments of a ShardedStrategy set, as text."""
    from lightning_shardckpt import ShardedStrategy

    found = vars(ShardedStrategy()).keys() - {"_parallel_devices", "_build"}
    kinds = (bool, int, float, str, dict, tuple)
    return {
        name: repr(value)
        for name, value in vars(strategy).items()
        if name in found and (isinstance(value, kinds) or dataclasses.is_dataclass(value))
    }


def parse_beside_code(*arguments: str) -> tuple[Parsed, dict[str, Any], dict[str, Any], set[str]]:
    """Return also the attributes of the same strategy built in Python, those of a default one, and all arguments."""
    from lightning_shardckpt import FSDP, Pipeline, ShardedStrategy

    names = set(inspect.signature(ShardedStrategy).parameters)
    in_code = {**EVERY_ARGUMENT, "fsdp": FSDP(**EVERY_ARGUMENT["fsdp"])}
    in_code["pipeline"] = Pipeline(**EVERY_ARGUMENT["pipeline"])
    return parse(*arguments), plain(ShardedStrategy(**in_code)), plain(ShardedStrategy()), names


def write(path: Path, trainer: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"trainer": {**SINGLE, **trainer}}, sort_keys=False))
    return f"--config={path}"


def alone(fn: Any, *arguments: str, bare: bool = False) -> Any:
    """Run `fn` in a process of its own, which is no rank of anything."""
    return run_ranks(1, fn, *arguments, init_process_group=False, bare=bare)[0]


def test_every_argument_of_the_strategy_can_be_given_in_yaml(tmp_path: Path) -> None:
    from lightning_shardckpt import FSDP, Pipeline

    strategy = {"class_path": "lightning_shardckpt.ShardedStrategy", "init_args": EVERY_ARGUMENT}
    config = write(tmp_path / "c.yaml", {"strategy": strategy})
    got, in_code, default, names = alone(parse_beside_code, config)
    assert names == EVERY_ARGUMENT.keys()  # a new argument belongs here, too
    for name, value in {"fsdp": FSDP, "pipeline": Pipeline}.items():
        assert {field.name for field in dataclasses.fields(value)} == EVERY_ARGUMENT[name].keys()
    assert got.strategy == "ShardedStrategy"
    differing = {name for name in default if default[name] != in_code[name]}
    assert len(differing) >= 4  # so that the comparison below says something
    assert {name: got.attributes[name] for name in differing} == {name: in_code[name] for name in differing}


def test_an_argument_of_several_types_takes_each_of_them(tmp_path: Path) -> None:
    arguments: list[dict[str, Any]] = [
        {"data_parallel_shard_size": "auto"},
        {"tensor_parallel_plan": "auto"},
        {"tensor_parallel_plan": "torch.nn.functional.relu"},
        {"fsdp": None, "pipeline": None},
        {"fsdp": {"units": None, "activation_checkpointing": True}},
        {"fsdp": {"class_path": "lightning_shardckpt.FSDP", "init_args": {"ignored": ["head"]}}},
        {"pipeline": {"class_path": "lightning_shardckpt.Pipeline", "init_args": {"split": "cost"}}},
    ]
    calls = {}
    for number, init_args in enumerate(arguments):
        strategy = {"class_path": "lightning_shardckpt.ShardedStrategy", "init_args": init_args}
        calls[number] = (1, parse, write(tmp_path / f"{number}.yaml", {"strategy": strategy}))
    assert [parsed.strategy for (parsed,) in run_each(calls).values()] == ["ShardedStrategy"] * len(arguments)


def test_the_checkpoint_io_takes_its_arguments_from_yaml(tmp_path: Path) -> None:
    plugin = {"class_path": "lightning_shardckpt.ShardCkptIO", "init_args": {"size_per_shard": 5.5, "verify": False}}
    strategy = {"class_path": "lightning_shardckpt.ShardedStrategy"}
    got = alone(parse, write(tmp_path / "c.yaml", {"strategy": strategy, "plugins": [plugin]}))
    assert (got.checkpoint_io, got.size_per_shard, got.verify) == ("ShardCkptIO", 5.5, False)


def test_the_strategy_has_a_short_name_once_the_yaml_names_the_checkpoint_io(tmp_path: Path) -> None:
    got = alone(parse, write(tmp_path / "c.yaml", {"strategy": "sharded"}), bare=True)
    assert (got.strategy, got.checkpoint_io) == ("ShardedStrategy", "ShardCkptIO")


def print_config(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli(*arguments, "--print_config")
    return out.getvalue()


def test_print_config_shows_every_argument_and_its_output_is_a_config(tmp_path: Path) -> None:
    from lightning_shardckpt import ShardCkptIO

    strategy = {"class_path": "lightning_shardckpt.ShardedStrategy", "init_args": {"tensor_parallel_size": 2}}
    config = write(tmp_path / "c.yaml", {"strategy": strategy})
    printed = alone(print_config, config)
    shown = yaml.safe_load(printed)["trainer"]
    assert shown["strategy"]["init_args"].keys() == EVERY_ARGUMENT.keys()
    assert shown["strategy"]["init_args"]["tensor_parallel_size"] == 2
    assert shown["plugins"][0]["init_args"].keys() == inspect.signature(ShardCkptIO).parameters.keys()
    (tmp_path / "printed.yaml").write_text(printed)
    again = f"--config={tmp_path / 'printed.yaml'}"
    assert alone(parse, again).attributes == alone(parse, config).attributes


def fit(*arguments: str) -> int:
    """Collective: every rank must call it. Returns the global step."""
    step: int = cli("fit", *arguments).trainer.global_step
    return step


def test_a_run_from_yaml_alone_saves_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    keep = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(tmp_path)}}
    trainer = {"strategy": "sharded", "callbacks": [keep], "max_epochs": 1, "limit_train_batches": 3}
    trainer |= {"limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "devices": 2}
    assert run_ranks(2, fit, write(tmp_path / "two.yaml", trainer), bare=True) == [3, 3]
    (saved,) = tmp_path.glob("*.ckpt")
    one = write(tmp_path / "one.yaml", {**trainer, "devices": 1, "max_epochs": 2})
    assert run_ranks(1, fit, one, f"--ckpt_path={saved}", bare=True) == [6]


def validated(*arguments: str) -> tuple[dict[str, Any], float]:
    """Collective: every rank must call it. Returns hyper-parameters and loss of ``validate`` from the command line."""
    from lightning_shardckpt import ShardedCLI
    from tests.support.boring import Scaled

    _be_the_command_line(("validate", *arguments))
    made = ShardedCLI(Scaled, save_config_callback=None, seed_everything_default=7)
    return dict(made.model.hparams), float(made.trainer.callback_metrics["loss"])


def run_by_lightnings_cli(command: str, *arguments: str) -> tuple[float | None, str]:
    """Return the loss, if the command logs it, and the error of a LightningCLI of Lightning's."""
    from lightning.pytorch.cli import LightningCLI

    from lightning_shardckpt.errors import MismatchError
    from tests.support.boring import Scaled

    _be_the_command_line((command, *arguments))
    found: list[float] = []

    class Noting(LightningCLI):
        def after_run(self) -> None:
            found.extend(float(value) for name, value in self.trainer.callback_metrics.items() if name == "loss")

        after_validate = after_test = after_predict = after_run

    try:
        Noting(Scaled, save_config_callback=None, seed_everything_default=7)
    except MismatchError as error:
        return None, str(error)
    return next(iter(found), None), ""


def saved_scaled(path: str, plain: str) -> None:
    """Save one run twice: as a directory, and as one process under plain Lightning does."""
    import lightning.pytorch as pl
    import torch

    from lightning_shardckpt import ShardCkptIO
    from tests.support.boring import Scaled

    pl.seed_everything(7)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(Scaled(factor=3.0))
    trainer.save_checkpoint(plain)
    ShardCkptIO().save_checkpoint(torch.load(plain, weights_only=True), path)


def test_validate_from_the_command_line_takes_the_hyper_parameters_of_a_directory(tmp_path: Path) -> None:
    directory, plain = str(tmp_path / "a.ckpt"), str(tmp_path / "plain.ckpt")
    alone(saved_scaled, directory, plain)
    quiet = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    sharded = [*quiet, "--trainer.plugins=lightning_shardckpt.ShardCkptIO", "--trainer.strategy=sharded"]
    stock = [*quiet, "--trainer.strategy=ddp"]
    expected = alone(validated, *stock, "--trainer.devices=1", f"--ckpt_path={plain}", bare=True)
    assert expected[0]["factor"] == 3.0
    assert alone(validated, *sharded, "--trainer.devices=1", f"--ckpt_path={directory}", bare=True) == expected
    both = run_ranks(2, validated, *sharded, "--trainer.devices=2", f"--ckpt_path={directory}", bare=True)
    assert [hyper for hyper, _ in both] == [expected[0]] * 2
    by_lightnings = [*sharded, "--trainer.devices=1", f"--ckpt_path={directory}"]
    _, error = alone(run_by_lightnings_cli, "predict", *by_lightnings, bare=True)
    assert "factor=3.0 in the checkpoint, 1.0 in the module" in error
    assert "ShardedCLI" in error and error.endswith("or pass --model.factor=3.0")
    remedy = alone(run_by_lightnings_cli, "validate", *by_lightnings, "--model.factor=3.0", bare=True)
    assert remedy == (expected[1], "")
