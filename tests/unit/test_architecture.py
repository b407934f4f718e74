"""The architecture, as a test: what may import what, and what may not be there at all."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import DOCS, table

PACKAGE = Path(__file__).parents[2] / "lightning_shardckpt"

# A room is a folder of the package or a module of its root. A room imports only from rows above its own.
ROWS = [
    {"errors", "system"},
    {"format", "compat"},
    {"storage", "distributed"},
    {"transfer", "parallel"},
    {"state"},
    {"sources"},
    {"checkpoint", "export", "tools"},
    {"api", "lazy", "checkpoint_io"},
    {"callbacks", "from_checkpoint", "merging"},
    {"strategy"},
    {"pytorch", "fabric", "cli"},
    {"__main__", "__init__", "consolidate"},
]
# The same within the room that has rooms of its own.
INNER_ROWS = {"parallel": [{"tensors"}, {"sharding"}, {"first_values", "pipeline"}, {"shard_model"}, {"optimizers"}]}
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
PURE = {"errors", "format"}
WITHOUT_TORCH = PURE | {"storage", "transfer", "tools"}
LIGHT_START = WITHOUT_TORCH | {"lazy", "consolidate", "cli", "__init__"}
KNOWS_LIGHTNING = {"compat", "callbacks", "checkpoint_io", "from_checkpoint", "strategy", "pytorch"}
KNOWS_LIGHTNING |= {"fabric"}
OTHERS = {"torch", "lightning", "torchmetrics", "transformers", "peft", "jsonargparse"}
PUBLIC_UNDERSCORES = {"_exit", "_getframe", "_replace", "_fields"}  # documented by Python
# What tests use of torch, of Lightning and of examples/text.py, and has the name of something of ours.
NAMESAKES = {"_parameters", "_modules", "_buffers", "_base", "_local_tensor"}
NAMESAKES |= {"_C", "_threads", "_trainer", "_backward_sync_control", "_windows"}
FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}
INPUT_OUTPUT = {"os", "pathlib", "io", "shutil", "tempfile", "glob", "mmap", "socket", "subprocess", "fsspec"}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLING = {(f"{PACKAGE.name}.{name}", "pickle") for name in ("state.json_tree",)}
PICKLING |= {(f"{PACKAGE.name}.distributed.host_numbers", "pickle")}  # between the ranks of a run
PICKLING |= {(f"{PACKAGE.name}.sources.dcp", "pickle")}  # data alone: it calls nothing that a pickle names
MOST_PRIVATE_NAMES = 85  # of torch and Lightning; to be lowered, not raised
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "base", "common", "manager", "engine", "handler"}


# Every module of the package by dotted name; a folder's `__init__` has the folder's name.
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return every node of a file: to find them takes longer than to look at them."""
    return [*ast.walk(ast.parse(path.read_text()))]


def part(module: str) -> str:
    """Return the room of a module: `lightning_shardckpt.state.model` is in `state`."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def imports(path: Path) -> frozenset[str]:
    """Return what a file imports, in functions and under TYPE_CHECKING, too; a module of ours by its dotted name."""
    found = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
    return frozenset(found)


def our_imports(module: str) -> set[str]:
    return {name for name in imports(MODULES[module]) if name.split(".")[0] == PACKAGE.name}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(MODULES[module])} - {PACKAGE.name}


def test_every_room_has_a_row() -> None:
    assert {part(name) for name in MODULES} == ROW.keys()


def test_every_folder_says_in_three_lines_what_lives_there() -> None:
    inits = {name: path for name, path in MODULES.items() if path.stem == "__init__"}
    said = {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in inits.items()}
    assert [name for name, text in said.items() if not text or len(text.splitlines()) < 3] == []


def test_no_two_modules_have_the_same_name() -> None:
    names = [path.stem for path in MODULES.values() if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_module_imports_only_from_rows_above_its_own() -> None:
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        for name in our_imports(module)
        if part(name) != part(module) and ROW[part(name)] >= ROW[part(module)]
    ]
    assert upward == []


def test_the_table_of_layers_in_the_documentation_has_these_rows() -> None:
    rows = table(DOCS / "how-it-works.md", "| row | folder | content |")
    shown = [(name, int(row)) for row, names, _ in rows for name in re.findall(r"`(\w+)", names)]
    assert sorted(shown) == sorted((name, row + 1) for name, row in ROW.items() if row + 1 < len(ROWS))


@pytest.mark.parametrize("room", INNER_ROWS)
def test_within_a_room_of_rooms_imports_only_go_up(room: str) -> None:
    row = {name: number for number, names in enumerate(INNER_ROWS[room]) for name in names}
    arrows = [
        (module, name)
        for module in MODULES
        for name in our_imports(module)
        if part(module) == part(name) == room and room != module.rpartition(".")[2]
    ]
    inner = {module: module.split(".")[2] for arrow in arrows for module in arrow}
    assert len(arrows) > 10
    upward = [(a, b) for a, b in arrows if inner[a] != inner[b] and row[inner[b]] >= row[inner[a]]]
    assert upward == []


def test_parallel_knows_only_torch_and_what_knows_no_checkpoints() -> None:
    ours = {name for module in MODULES if part(module) == "parallel" for name in our_imports(module)}
    assert {part(name) for name in ours} - {"parallel", "compat", "distributed", "errors", "system", "format"} == set()
    assert {name for name in ours if part(name) == "format"} == {"lightning_shardckpt.format.clean_fqn"}  # strings only
    users = {part(module) for module in MODULES if "parallel" in map(part, our_imports(module))}
    assert users - {"parallel", "strategy", "pytorch", "fabric", "__init__"} == set()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: our_imports(module) - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the cycle


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (WITHOUT_TORCH, FRAMEWORKS),
        (PURE, INPUT_OUTPUT),
        (ROW.keys() - KNOWS_LIGHTNING, FRAMEWORKS - {"torch"}),
        (ROW.keys(), PICKLES),
    ],
    ids=["torch below the live objects", "I/O in pure modules", "Lightning outside its rooms", "pickle anywhere"],
)
def test_nobody_imports(where: set[str], what: set[str]) -> None:
    found = [
        f"{module} imports {name}"
        for module in MODULES
        if part(module) in where
        for name in sorted(foreign_imports(module) & what)
        if (module, name) not in PICKLING
    ]
    assert found == []


@cache
def our_names() -> frozenset[str]:
    """Return every name that the package defines."""
    return frozenset().union(*(own_names(nodes(path)) for path in MODULES.values()))


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return every name that a module defines: functions, classes, variables, attributes of ``self``."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def last_word(node: ast.expr) -> str:
    """Return what a name or an attribute ends with, else nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def private_names_of_others(nodes: list[ast.AST], own: frozenset[str]) -> Iterator[str]:
    """Yield the private names of other packages that a module imports, or asks an object for."""
    known = own | PUBLIC_UNDERSCORES
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OTHERS:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(word.startswith("_") for word in name.split(".")))
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in known:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and last_word(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            names = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from (name for name in names if re.match("_[^_]", name) and name not in known)


def test_private_names_of_torch_and_lightning_are_used_in_compat_alone_and_do_not_become_more() -> None:
    own, in_compat, elsewhere = our_names(), set[str](), list[str]()
    for module, path in MODULES.items():
        names = {*private_names_of_others(nodes(path), own)}
        if part(module) == "compat":
            in_compat |= {name.rpartition(".")[2] for name in names}
        else:
            elsewhere += [f"{module}: {name}" for name in sorted(names)]
    assert elsewhere == [] and 30 < len(in_compat) <= MOST_PRIVATE_NAMES


def private_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names with an underscore that a module imports from the package, asks an object for, or patches."""
    for node in nodes:
        found = list[str]()
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE.name):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.Call) and last_word(node.func).endswith("attr"):  # getattr, monkeypatch.setattr, …
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found = [text.rpartition(".")[2] for text in texts]
        yield from (name for name in found if re.match("_[^_]", name))


def test_tests_use_no_private_name_of_the_package() -> None:
    uses = f"from {PACKAGE.name}.a import _b; x._c; y.setattr('{PACKAGE.name}.a._d', 1); getattr(x, '_e'); x.__f__"
    assert [*private_names([*ast.walk(ast.parse(uses))])] == ["_b", "_c", "_d", "_e"]  # the search is seen to find
    ours, found = our_names() - NAMESAKES, list[str]()
    for path in sorted(PACKAGE.with_name("tests").rglob("*.py")):
        here = nodes.__wrapped__(path)  # not kept
        found += [f"{path.name}: {name}" for name in sorted({*private_names(here)} & ours - own_names(here))]
    assert found == []


def test_every_function_of_compat_is_tested_in_a_folder_of_that_name() -> None:
    tests = PACKAGE.with_name("tests").glob("*/compat/test_*.py")
    tested = {word for test in tests for word in re.findall(r"\w+", test.read_text())}
    paths = [path for name, path in MODULES.items() if part(name) == "compat"]
    tree = [node for path in paths for node in ast.parse(path.read_text()).body]
    functions = {node.name for node in tree if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert len(functions) > 100 and functions - tested == set()


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


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("inspect", "--help")], ids=" ".join)
def test_the_command_line_answers_without_torch_and_numpy(arguments: tuple[str, ...]) -> None:
    run = python("-X", "importtime", "-m", PACKAGE.name, *arguments)
    times = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if line not in times)
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert PACKAGE.name in imported  # so that the list was understood
    assert imported & (FRAMEWORKS | {"numpy"}) == set()
