"""What every test is held to: no thread, process or environment variable of the pytest process outlives it.

And where it runs: files of tests run side by side, see support/workers.py.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule  # not exported

from tests.support import pool, stores, warm_python, workers

# pytest's own, and what importing torch or Lightning sets for good.
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}

collect_ignore_glob = ["golden/*", "support/*", "sweeps/*"]  # no tests: to look for doctests there takes seconds

SESSION: set[int] = set()
"""Processes that serve the whole session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json: what each test took")
    parser.addoption("--sweeps", action="store_true", help="also run what is marked sweep: the rest of each matrix")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.worker_count(config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    running = ExitStack()
    command = running.enter_context(workers.forking())
    config.add_cleanup(running.close)
    for spec in specs:
        spec.python = command


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import everything without collections of garbage, which look through all modules each time, then and later on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[list[pytest.Collector]]:
    """Look for no doctests in tests: there are none, and it takes each worker as long as to find the tests."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("sweeps"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("sweep")])
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    place = workers.longest_first(_file(item.nodeid) for item in items)
    items.sort(key=lambda item: place[_file(item.nodeid)])  # stable: within a file, as written


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_durations"):
        config.pluginmanager.register(_Recorder(config), "record-durations")
    pool.warning_filters[:] = config.getini("filterwarnings")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred processes would compile the package, each for itself
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some tests interrupt


def pytest_unconfigure() -> None:
    pool.stop_server()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a server that speaks S3; started for the first test that asks, stopped at the end."""
    with stores.server() as (port, pid):
        SESSION.add(pid)
        yield port


@pytest.fixture
def s3(s3_port: int) -> stores.Bucket:
    """A new bucket."""
    return stores.bucket(s3_port)


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> warm_python.Run:
    """Runs a command of Python, where torch and Lightning are imported already; with ``--sweeps``, in a new one."""
    return warm_python.run_new if request.config.getoption("sweeps") else warm_python.run


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = threading.enumerate()
    yield
    if leaked := pool.leaked_threads(before):
        pytest.fail(f"the test left threads behind: {leaked}")


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    before = _children()
    yield
    if leaked := _children() - before - {pool.server_pid(), *SESSION}:
        pytest.fail(f"the test left child processes behind: {sorted(map(_command, leaked))}")


@pytest.fixture(autouse=True)
def no_changed_environment() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        for name in changed:  # so that only this test fails
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        pytest.fail(f"the test left environment variables changed: {changed}")


class _Recorder:
    """Measures each phase of a test where it runs, and writes the record where all reports arrive."""

    def __init__(self, config: pytest.Config) -> None:
        self._durations, self._is_worker = workers.Durations(), hasattr(config, "workerinput")

    def pytest_runtest_logstart(self) -> None:
        self._before = workers.cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = workers.cpu_s()
        report.cpu_s, self._before = now - self._before, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._durations.add(report.nodeid, report.duration, report.cpu_s)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self._is_worker and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._durations.write()  # not of a run that was interrupted


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended since
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _command(pid: int) -> str:
    return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
