"""Is what the README says true? Its code blocks run here, in order, in one directory, each as a reader would run it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.schedule import bubble_fraction, resolve_schedule
from tests.pool import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
SET_UP = "python3.11 -m venv .venv"


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    code: str

    @property
    def world(self) -> int:
        """How many processes the Trainer of the block asks for."""
        found = re.search(r"devices=(\d+)", self.code)
        return int(found[1]) if found else 1


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [Block(match[1], README[: match.start()].count("\n") + 2, match[2]) for match in found]


BLOCKS = blocks()
COMMANDS = [block for block in BLOCKS if block.language == "bash" and not block.code.startswith(SET_UP)]
SCRIPTS = [block for block in COMMANDS if block.code.startswith("python examples/plain_torch.py")]
"""test_example_scripts.py runs these, in processes of their own."""
SET_UPS = [block.code.strip() for block in BLOCKS if block.language == "bash" and block.code.startswith(SET_UP)]


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "yaml", "text"}
    assert README.count("\n```") == 2 * len(BLOCKS)  # so that none is overlooked


def test_every_relative_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_command_that_runs_the_tests_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    lines = [line.replace('"$python"', "python3.11").replace('"$VENV"', ".venv") for line in script]
    lines = [line.replace('"$VENV/', ".venv/").replace('"', "").replace(" --quiet", "") for line in script_body(lines)]
    assert " && ".join(lines) == SET_UPS[1].replace('"', "")


def script_body(lines: list[str]) -> list[str]:
    """Return the lines from the one that makes the environment on."""
    first = next(number for number, line in enumerate(lines) if line.startswith(SET_UP))
    return [line for line in lines[first:] if line and not line.startswith("#")]


def test_the_command_of_the_main_job_runs_a_script_that_is_there() -> None:
    command, script = SET_UPS[0].rsplit(" ", 1)
    assert command == f"{SET_UP} && .venv/bin/pip install -c configs/constraints.txt -e . && .venv/bin/python"
    assert f"python {script}" in (ROOT / script).read_text()  # test_examples.py runs it
    assert len(SET_UPS) == 2


def test_all_yaml_is_a_config_of_a_lightning_cli(tmp_path: Path) -> None:
    sizes = []
    for block in (block for block in BLOCKS if block.language == "yaml"):
        (tmp_path / "config.yaml").write_text(block.code)
        names, size = run_ranks(1, parse, str(tmp_path / "config.yaml"), init_process_group=False)[0]
        assert names == ("ShardedStrategy", "ShardCkptIO")
        sizes.append(size)
    assert sizes[0] == 512


def parse(config: str) -> tuple[tuple[str, str], float]:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    sys.argv = ["train.py", f"--config={config}"]
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # LightningCLI itself uses what they are about
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=False, save_config_callback=None)
    io_: Any = cli.trainer.strategy.checkpoint_io
    return (type(cli.trainer.strategy).__name__, type(io_).__name__), io_.size_per_shard


def test_the_table_of_schedules_has_all_of_them_with_their_bubbles() -> None:
    rows = [line.strip("| ").split(" | ") for line in README.splitlines() if re.match(r"\| `(\w+)`.* % ", line)]
    shown = {
        name: (int(re.findall(r"\d|any$", stages)[0].replace("any", "1")), loss.strip("`"), int(bubble.split()[0]))
        for names, stages, loss, bubble, _ in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for name, (stages, loss, percent) in shown.items():
        schedule = resolve_schedule(name, 2, stages)
        assert round(100 * bubble_fraction(schedule, 4)) == percent
        assert loss == ("microbatch" if schedule.interleaves_backward else "any")
    with pytest.raises(TopologyError) as error:
        resolve_schedule("unknown", 2, 1)
    assert set(re.findall(r"\w+", str(error.value).partition("one of: ")[2])) == set(shown)


@pytest.mark.slow
def test_python_and_bash_blocks_run_in_order_and_print_what_is_shown(tmp_path: Path) -> None:
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = ""
    for block in BLOCKS:
        if block.language == "python":
            run_python(block, tmp_path)
        elif block in COMMANDS and block not in SCRIPTS:
            printed += "".join(run_command(line, tmp_path) for line in block.code.splitlines())
    shown = [line for block in BLOCKS if block.language == "text" for line in block.code.splitlines()]
    verdict = next(line for line in shown if "is whole" in line)
    assert numbers_hidden(verdict) in map(numbers_hidden, printed.splitlines())
    (tree,) = (block.code for block in BLOCKS if block.language == "text" and "root index" in block.code)
    named = set(re.findall(r"^  (\S+\.\w+) ", tree, re.MULTILINE))
    assert named - set(os.listdir(tmp_path / "checkpoints" / tree.splitlines()[0].rstrip("/"))) == set()


def run_python(block: Block, folder: Path) -> None:
    if named := re.match(r"# (\w+\.py)\n", block.code):
        (folder / named[1]).write_text(block.code)
        return
    run_ranks(block.world, execute, "\n" * (block.line - 1) + block.code, str(folder))


def execute(code: str, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    warnings.filterwarnings("ignore", "The dirpath has changed")  # the run under ddp keeps its checkpoints elsewhere
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def run_command(line: str, folder: Path) -> str:
    """Run a line of bash on as many ranks as its files or arguments say, instead of one that starts the others."""
    program, *arguments = shlex.split(line)
    assert program == "python"
    texts = [path.read_text() for path in map(folder.joinpath, arguments) if path.is_file()]
    asked = re.search(r"devices\W+(\d+)", "\n".join(texts))
    return str(run_ranks(int(asked[1]) if asked else 1, main, arguments, str(folder))[0])


def main(arguments: list[str], folder: str) -> str:
    """What ``python *arguments`` prints, but for the imports of torch and Lightning, which are there already."""
    os.chdir(folder)
    warnings.simplefilter("default")
    is_module, sys.argv = arguments[0] == "-m", arguments[arguments[0] == "-m" :]
    sys.path.insert(0, folder if is_module else str(Path(sys.argv[0]).resolve().parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"python {shlex.join(arguments)}: {end.code}\n{printed.getvalue()}"
    return printed.getvalue()


def numbers_hidden(line: str) -> str:
    """Return the line without its numbers of bytes, which depend on the versions of torch and Lightning."""
    return re.sub(r"[\d.]+ [KM]iB", "# bytes", line)
