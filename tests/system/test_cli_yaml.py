"""Strategy and CheckpointIO given in YAML alone, with code that knows nothing of this package."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.pool import run_ranks

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
        "schedule": "interleaved_1f1b",
        "microbatches": 3,
        "loss": "microbatch",
        "stages_per_rank": 2,
    },
    "pretrained": {"path": "weights/llama", "key_mapping": {"^gpt_neox": "model", "bias$": None}, "strict": True},
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


def cli(*arguments: str) -> Any:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    _be_the_command_line(arguments)
    run = arguments[0] == "fit"
    return LightningCLI(BoringModel, run=run, seed_everything_default=False, save_config_callback=None)


def _be_the_command_line(arguments: Sequence[str]) -> None:
    """For the rest of this process, which is a child of the pool."""
    sys.argv = ["train.py", *arguments]
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI itself uses what they are about


def parse(*arguments: str) -> tuple[dict[str, Any], tuple[str, str, float, bool]]:
    """The attributes of the strategy, the classes of strategy and CheckpointIO, and two options of that."""
    strategy = cli(*arguments).trainer.strategy
    io_ = strategy.checkpoint_io
    about = type(strategy).__name__, type(io_).__name__, io_.save_options.size_per_shard, io_.load_options.verify
    return plain(strategy), about


def plain(strategy: Any) -> dict[str, Any]:
    """Return the attributes that the arguments of a ShardedStrategy set, as text."""
    from lightning_shardckpt import ShardedStrategy

    found = vars(ShardedStrategy()).keys() - {"_parallel_devices", "_build"}
    kinds = (bool, int, float, str, dict, tuple, type(None))
    return {
        name: re.sub(" at 0x[0-9a-f]+", "", repr(value))
        for name, value in vars(strategy).items()
        if name in found and (isinstance(value, kinds) or dataclasses.is_dataclass(value))
    }


def parse_beside_code(*arguments: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]:
    """The attributes of the strategy, of the same one built in Python and of a default one, and all arguments."""
    from lightning_shardckpt import FSDP, Pipeline, Pretrained, ShardedStrategy

    names = set(inspect.signature(ShardedStrategy).parameters)
    in_code = {**EVERY_ARGUMENT, "fsdp": FSDP(**EVERY_ARGUMENT["fsdp"])}
    in_code["pipeline"] = Pipeline(**EVERY_ARGUMENT["pipeline"])
    in_code["pretrained"] = Pretrained(**EVERY_ARGUMENT["pretrained"])
    return parse(*arguments)[0], plain(ShardedStrategy(**in_code)), plain(ShardedStrategy()), names


def write(path: Path, trainer: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump({"trainer": {**SINGLE, **trainer}}, sort_keys=False))
    return f"--config={path}"


def alone(fn: Any, *arguments: str, bare: bool = False) -> Any:
    """Run `fn` in a process of its own, which is no rank of anything."""
    return run_ranks(1, fn, *arguments, init_process_group=False, bare=bare)[0]


def test_every_argument_of_the_strategy_can_be_given_in_yaml(tmp_path: Path) -> None:
    from lightning_shardckpt import FSDP, Pipeline, Pretrained

    strategy = {"class_path": "lightning_shardckpt.ShardedStrategy", "init_args": EVERY_ARGUMENT}
    config = write(tmp_path / "c.yaml", {"strategy": strategy})
    got, in_code, default, names = alone(parse_beside_code, config)
    assert names == EVERY_ARGUMENT.keys()  # a new argument belongs here, too
    for name, value in {"fsdp": FSDP, "pipeline": Pipeline, "pretrained": Pretrained}.items():
        assert {field.name for field in dataclasses.fields(value)} == EVERY_ARGUMENT[name].keys()
    differing = {name for name in default if default[name] != in_code[name]}
    assert len(differing) >= 4  # so that the comparison below says something
    assert {name: got[name] for name in differing} == {name: in_code[name] for name in differing}


def test_the_checkpoint_io_takes_its_arguments_from_yaml_where_the_strategy_has_a_short_name(tmp_path: Path) -> None:
    plugin = {"class_path": "lightning_shardckpt.ShardCkptIO", "init_args": {"size_per_shard": 5.5, "verify": False}}
    _, about = alone(parse, write(tmp_path / "c.yaml", {"strategy": "sharded", "plugins": [plugin]}), bare=True)
    assert about == ("ShardedStrategy", "ShardCkptIO", 5.5, False)


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
    assert alone(parse, again) == alone(parse, config)


def fit(*arguments: str) -> int:
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
