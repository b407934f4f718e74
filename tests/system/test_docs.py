"""The README and the documentation: every block of code runs, every link leads somewhere, every message exists.

Blocks run in the order of the pages, in one directory, each as a reader would run it, so that later pages use the
checkpoints of earlier ones.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import pydoc
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import lightning_shardckpt
import lightning_shardckpt.errors
from lightning_shardckpt import cli
from lightning_shardckpt.errors import ShardCkptError, TopologyError
from lightning_shardckpt.parallel.pipeline.schedule import resolve_schedule
from tests.support.messages import SLOT, messages
from tests.support.pages import DOCS, SET_UP, Block, blocks, pages, prose, table
from tests.support.pool import ROOT, run_ranks
from tests.support.schedules import idle
from tests.support.warm_python import Run

README = ROOT / "README.md"
MIGRATE = DOCS / "guide" / "migrate.md"
TEXTS = [*pages(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
BLOCKS = [block for page in pages() for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language == "bash" and not block.code.startswith(SET_UP)]
RUN_ELSEWHERE = r"python examples/(plain_torch|with_fabric|llama_lora)\.py"
SCRIPTS = [block for block in COMMANDS if re.match(RUN_ELSEWHERE, block.code)]
"""test_examples.py runs these, in processes of their own."""
SET_UPS = [block.code.strip() for block in BLOCKS if block.language == "bash" and block.code.startswith(SET_UP)]
WRITTEN = {"tests/durations.json"}
"""Files that a command writes."""


def test_every_page_is_in_the_menu_once() -> None:
    assert sorted(pages()[1:]) == sorted(DOCS.rglob("*.md"))


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "yaml", "console", "text", ""}
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in pages())
    assert fences == 2 * len(BLOCKS)  # so that none is overlooked
    assert [block.page.name for block in BLOCKS if block.language == "text"] == ["clusters.md", "format.md"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def test_nothing_is_misspelled() -> None:
    command = [sys.executable, "-m", "codespell_lib"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, and of a file that it includes."""
    text = prose(page)
    for included in re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE):
        text += prose(ROOT / included)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(page: Path) -> None:
    rooms = "|".join(path.name for path in (ROOT / "lightning_shardckpt").iterdir() if path.is_dir())
    named = re.findall(rf"`((?:lightning_shardckpt|examples|configs|tests|docs|{rooms})/[\w./-]*)", prose(page))
    absent = {name for name in named if not any((ROOT / at / name).exists() for at in ("", "lightning_shardckpt"))}
    assert absent - WRITTEN == set()
    modules = re.findall(r"python -m (tests[\w.]+)|`(tests\.sweeps[\w.]*)`", page.read_text())
    assert [name for pair in modules for name in pair if name and not is_module(name)] == []


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_the_command_that_runs_the_tests_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    lines = [line.replace('"$python"', "python3.11").replace('"$VENV"', ".venv") for line in script]
    lines = [line.replace('"$VENV/', ".venv/").replace('"', "").replace(" --quiet", "") for line in script_body(lines)]
    assert " && ".join(lines) == SET_UPS[1].replace('"', "")


def script_body(lines: list[str]) -> list[str]:
    """Return the lines from the one that makes the environment on."""
    first = next(number for number, line in enumerate(lines) if line.startswith(SET_UP))
    return [line for line in lines[first:] if line and not line.startswith("#")]


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
    return (type(cli.trainer.strategy).__name__, type(io_).__name__), io_.save_options.size_per_shard


def test_the_table_of_schedules_has_all_of_them_with_their_bubbles() -> None:
    rows = [row for row in table(DOCS / "guide" / "pipelines.md", "| `schedule` |") if "%" in row[3]]
    shown = {
        name: (int(re.findall(r"\d|any$", stages)[0].replace("any", "1")), loss.strip("`"), int(bubble.split()[0]))
        for names, stages, loss, bubble, _ in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for name, (stages, loss, percent) in shown.items():
        schedule = resolve_schedule(name, 2, stages)
        assert round(100 * idle(schedule, 4)) == percent
        assert loss == ("microbatch" if schedule.interleaves_backward else "any")
    with pytest.raises(TopologyError) as error:
        resolve_schedule("unknown", 2, 1)
    assert set(re.findall(r"\w+", str(error.value).partition("one of: ")[2])) == set(shown)


@pytest.mark.parametrize("theirs", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_the_arguments_of_a_strategy_and_their_counterparts_exist(theirs: str) -> None:
    rows = table(MIGRATE, f"| `{theirs}` | `ShardedStrategy` |")
    known = run_ranks(1, arguments_of, [theirs, "ShardedStrategy"], init_process_group=False)[0]
    for name, cells in zip((theirs, "ShardedStrategy"), zip(*rows, strict=True), strict=True):
        code = [text for cell in cells for text in re.findall(r"`(\w+=[^`]*)`", cell)]
        assert code and {text.partition("=")[0] for text in code} <= known[name]


@pytest.mark.parametrize("theirs", ["Accelerate", "torchtitan"])
def test_the_arguments_of_the_calls_in_a_table_exist(theirs: str) -> None:
    code = " ".join(cell for row in table(MIGRATE, f"| {theirs} | this package |") for cell in row)
    calls = [ast.parse(text, mode="eval").body for text in re.findall(r"`([A-Z]\w+\([^`]*\))`", code)]
    given: dict[str, set[str]] = {}
    for call in calls:
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        given.setdefault(call.func.id, set()).update(str(keyword.arg) for keyword in call.keywords)
    known = run_ranks(1, arguments_of, list(given), init_process_group=False)[0]
    assert {"ShardedStrategy", "FSDP"} <= given.keys()
    assert {name: arguments - known[name] for name, arguments in given.items() if arguments - known[name]} == {}


def arguments_of(names: list[str]) -> dict[str, set[str]]:
    from inspect import signature

    import accelerate.utils
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer, callbacks, strategies

    homes = [lightning_shardckpt, strategies, callbacks, accelerate, accelerate.utils, accelerate.parallelism_config]
    known = {name: getattr(home, name) for home in homes for name in names if hasattr(home, name)}
    known |= {"Trainer": Trainer, "Fabric": Fabric}
    return {name: set(signature(known[name]).parameters) for name in names}


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────


ERRORS = DOCS / "errors.md"
CLASSES = [
    name
    for name, value in vars(lightning_shardckpt.errors).items()
    if isinstance(value, type) and issubclass(value, ShardCkptError) and value is not ShardCkptError
]


def test_every_error_class_has_a_section_of_messages_that_the_package_has() -> None:
    sections = re.findall(r"^## (\w+)$", ERRORS.read_text(), re.MULTILINE)
    assert sections == [*CLASSES, "ImportError"]
    texts = messages()
    for name in sections:
        rows = table(ERRORS, f"## {name}\n\n")
        assert rows and all(cause and remedy for _, cause, remedy in rows)
        shown = [message.strip("`") for message, _, _ in rows]
        assert [message for message in shown if not any(is_part(message, text) for text in texts)] == [], name


def test_the_speed_of_the_readme_is_that_of_the_page() -> None:
    head = "| time of DCP |".replace("| time", "| × limit | × time")
    measured = [row[2:] for row in table(DOCS / "performance.md", f"| 2 ranks, 2.1 GB | goal | ours {head}")]
    shown = [row[1:] for row in table(README, f"| 2 ranks, 2.1 GB of float32 parameters and AdamW state | ours {head}")]
    assert len(shown) == 4 and [row for row in shown if row not in measured] == []


def test_every_option_of_a_tool_is_on_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    for name, *_ in table(DOCS / "tools.md", "| tool | question | reads |"):
        tool = name.strip("`")
        assert cli.main([tool, "--help"]) == 0
        options = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
        page = DOCS / {"consolidate": "guide/export.md", "merge": "guide/merge-and-follow.md"}.get(tool, "tools.md")
        known = set(re.findall(r"--[\w-]+", page.read_text()))
        assert options and sorted(options - known) == [], tool


def test_every_public_name_is_in_the_api_reference() -> None:
    shown = []
    for path, options in re.findall(r"^::: (\S+)((?:\n    .*)*)", (DOCS / "api.md").read_text(), re.MULTILINE):
        members = re.search(r"^      members: \[(.*)\]", options, re.MULTILINE)
        names = members[1].split(", ") if members else []
        found = pydoc.locate(path)
        assert found is not None, path
        parts = [getattr(found, name) for name in names]
        shown += parts if inspect.ismodule(found) else [found]
    public = {name: getattr(lightning_shardckpt, name) for name in lightning_shardckpt.__all__}
    assert [name for name, what in public.items() if what not in shown] == []


def is_part(message: str, text: str) -> bool:
    """Whether the words of a message stand in a text, in this order."""
    at = 0
    for piece in filter(None, (piece.strip() for piece in message.split(SLOT))):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


# ── code ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_all_code_runs_in_order_and_prints_what_is_shown(
    tmp_path: Path, python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there are GPUs, there may be fewer than a block asks for
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in BLOCKS:
        if block.language == "python":
            run_python(block, tmp_path, python)
        elif block.language == "console":
            check_transcript(block, tmp_path)
        elif block in COMMANDS and block not in SCRIPTS:
            for line in block.code.splitlines():
                run_command(line, tmp_path)
    (tree,) = (block.code for block in BLOCKS if block.language == "text" and "root index" in block.code)
    named = set(re.findall(r"^  (\S+\.\w+) ", tree, re.MULTILINE))
    assert named - set(os.listdir(tmp_path / "checkpoints" / tree.splitlines()[0].rstrip("/"))) == set()


def run_python(block: Block, folder: Path, python: Run) -> None:
    if named := re.match(r"# (\w+\.py)\n", block.code):
        (folder / named[1]).write_text(block.code)
        if named[1].startswith("test_"):
            done = python(["-m", "pytest", named[1]], env=os.environ | {"PYTHONPATH": str(ROOT)}, folder=folder)
            assert done.returncode == 0, done.stdout + done.stderr
        return
    run_ranks(block.world, execute, "\n" * (block.line - 1) + block.code, str(block.page), str(folder))


def execute(code: str, page: str, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    warnings.filterwarnings("ignore", "The dirpath has changed")  # the run under ddp keeps its checkpoints elsewhere
    warnings.filterwarnings("ignore", "metrics of 1 checkpoint are not logged")  # nobody follows the run yet
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


def check_transcript(block: Block, folder: Path) -> None:
    """Run the command after the prompt, and compare the lines that it prints with those that are shown."""
    prompt, *shown = block.code.splitlines()
    assert prompt.startswith("$ ")
    status = 1 if " diff " in prompt else 0  # as of diff(1)
    printed = set(map(without_numbers, run_command(prompt.removeprefix("$ "), folder, status).splitlines()))
    assert [line for line in shown if without_numbers(line) not in printed] == [], f"{block.page}:{block.line}"


def run_command(line: str, folder: Path, status: int = 0) -> str:
    """Run a line of bash on as many ranks as its files or arguments say, instead of one that starts the others."""
    program, *arguments = shlex.split(line)
    assert program == "python"
    texts = [path.read_text(errors="replace") for path in map(folder.joinpath, arguments) if path.is_file()]
    asked = re.search(r"devices\W+(\d+)", "\n".join(texts))
    return str(run_ranks(int(asked[1]) if asked else 1, main, arguments, str(folder), status)[0])


def main(arguments: list[str], folder: str, status: int) -> str:
    """What ``python *arguments`` prints, but for the imports of torch and Lightning, which are there already."""
    os.chdir(folder)
    warnings.simplefilter("default")
    is_module, sys.argv = arguments[0] == "-m", arguments[arguments[0] == "-m" :]
    sys.path.insert(0, folder if is_module else str(Path(sys.argv[0]).resolve().parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            shown = f"python {shlex.join(arguments)}: {end.code}\n{printed.getvalue()}"
            assert (end.code or 0) == status, shown
    return printed.getvalue()


def without_numbers(line: str) -> str:
    """Return the line without its numbers, whose digits depend on the versions of torch and Lightning, and its gaps."""
    return re.sub(r"\d[\d.,]*(e-\d+)?", "#", " ".join(line.replace("MiB", "KiB").split()))


# ── call orders ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_functions_of_the_documented_call_orders_are_where_the_page_says() -> None:
    page = (DOCS / "how-it-works.md").read_text()
    block = re.search(r"The same as calls, .*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    calls = re.findall(r"^ *([\w.]+)  +(\w+)(/?[\w/]*\.py)?", block[1], re.MULTILINE)
    package = "".join(path.read_text() for path in (ROOT / "lightning_shardckpt").rglob("*.py"))
    for name, first, rest in calls:
        text = (ROOT / "lightning_shardckpt" / f"{first}{rest}").read_text() if rest else package
        assert f"def {name.rpartition('.')[2]}(" in text, name
    assert len(calls) > 16
