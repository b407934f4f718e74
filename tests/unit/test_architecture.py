"""The architecture, as a test: what may import what, and what may not be there at all."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_shardckpt"

# A module imports only from rows above its own. A folder (storage, state, look, …) counts as one module.
ROWS = [
    {"errors"},
    {"parts", "registration", "box", "text", "crc", "pages", "collector", "processes", "threads", "pending"},
    {"layout", "header"},
    {"files"},
    {"index", "containers"},
    {"plan"},
    {"storage"},
    {"write", "read", "mirror"},
    {"fetch", "planning"},
    {"locate", "whole"},
    {"shardfile", "regions", "foreign"},
    {"staging", "ranks"},
    {"state"},
    {"torchfile", "sources", "background", "exchange", "hub"},
    {"formats"},
    {"joining", "opening", "casting"},
    {"export"},
    {"pretrained"},
    {"mirroring", "mirrored"},
    {"saving", "loading", "sharing", "selected", "as_values"},
    {"checkpoint"},
    {"describing", "restoring"},
    {"consolidate", "look", "verify", "lazy", "functional"},
    {"parallel", "assigned"},
    {"checkpoint_io"},
    {"adapt", "stopping"},
    {"resume", "job", "preemption", "latest", "preflight"},
    {"function_job"},
    {"pipelined"},
    {"on_mesh"},
    {"pytorch", "fabric"},
    {"cli"},
    {"__main__", "__init__"},
]
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
PURE = {"errors", "parts", "box", "text", "crc", "layout", "header", "files", "index", "plan", "containers", "mirror"}
BYTES_ONLY = PURE | {"pages", "processes", "threads", "pending", "storage", "write", "read", "fetch", "planning"}
BYTES_ONLY |= {"locate", "whole", "regions", "shardfile", "foreign", "hub", "look"}
LIGHT_START = BYTES_ONLY | {"mirrored", "verify", "lazy", "consolidate", "cli"}
LIGHT_START |= {"__main__", "__init__", "registration"}
DOORS = {"assigned", "checkpoint_io", "resume", "stopping", "adapt", "job", "pipelined", "preemption", "latest"}
DOORS |= {"preflight"}
DOORS |= {"function_job", "on_mesh", "pytorch", "fabric"}
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}
INPUT_OUTPUT = {"os", "pathlib", "io", "shutil", "tempfile", "glob", "mmap", "socket", "subprocess", "fsspec"}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "base", "common", "manager", "engine", "handler"}


def modules() -> dict[str, Path]:
    """Return every module of the package by dotted name; a folder's `__init__` has the folder's name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


MODULES = modules()


def part(module: str) -> str:
    """Return the name that ROWS has for a module: `lightning_shardckpt.state.model` is of `state`."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports, in functions and under TYPE_CHECKING, too; a module of ours by its dotted name.

    Left out is `if __name__ == "__main__":`, where the file stands for `__main__`, which is in the last row.
    """
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


def our_imports(module: str) -> set[str]:
    return {name for name in imports(MODULES[module]) if name.split(".")[0] == PACKAGE.name}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(MODULES[module])} - {PACKAGE.name}


def test_every_module_has_a_row() -> None:
    assert {part(name) for name in MODULES} - ROW.keys() == set()


def test_a_module_imports_only_from_rows_above_its_own() -> None:
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        for name in our_imports(module)
        if part(name) != part(module) and ROW[part(name)] >= ROW[part(module)]
    ]
    assert upward == []


def test_the_parallel_column_knows_only_torch_and_the_errors() -> None:
    ours = {name for module in MODULES if part(module) == "parallel" for name in our_imports(module)}
    assert {part(name) for name in ours} - {"parallel", "errors"} == set()
    users = {part(module) for module in MODULES if "parallel" in map(part, our_imports(module))}
    assert users - {"parallel", "__init__"} - DOORS == set()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: our_imports(module) - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the cycle


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (BYTES_ONLY, FRAMEWORKS),
        (PURE - {"errors"}, INPUT_OUTPUT),
        (ROW.keys() - DOORS, FRAMEWORKS - {"torch"}),
        (ROW.keys() - {"torchfile"}, PICKLES),  # a file for torch.load is a pickle; written there, never read
    ],
    ids=["torch below the live objects", "I/O in pure modules", "Lightning outside the doors", "pickle anywhere"],
)
def test_nobody_imports(where: set[str], what: set[str]) -> None:
    found = [
        f"{module} imports {name}"
        for module in MODULES
        if part(module) in where
        for name in sorted(foreign_imports(module) & what)
    ]
    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name for name in MODULES if EMPTY_NAMES & {word for p in name.split(".") for word in p.split("_")}] == []


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_an_init_defines_nothing_but_lazy_names(module: str) -> None:
    lazy = {"__getattr__", "__dir__"} if module == PACKAGE.name else set()
    tree = ast.parse(MODULES[module].read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    defined = {getattr(node, "name", "a lambda") for node in ast.walk(tree) if isinstance(node, kinds)}
    assert defined - lazy == set()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter that finds this package before an installed one."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)


def test_the_light_modules_start_without_torch_and_lightning() -> None:
    light = [module for module in MODULES if part(module) in LIGHT_START and part(module) != "__main__"]
    script = f"""
import importlib, sys
for module in {light}:
    importlib.import_module(module)
    assert not {FRAMEWORKS} & sys.modules.keys(), module
"""
    run = python("-c", script)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("inspect", "--help")], ids=" ".join)
def test_the_command_line_answers_without_torch(arguments: tuple[str, ...]) -> None:
    run = python("-X", "importtime", "-m", PACKAGE.name, *arguments)
    times = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if line not in times)
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert PACKAGE.name in imported  # so that the list was understood
    assert imported & FRAMEWORKS == set()
