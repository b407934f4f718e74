"""Run a function on several ranks, each in a process of its own, in milliseconds.

One fork server imports torch and Lightning once, starts no thread and runs no backward, and forks a fresh child per
rank and call; a fork of it that has imported lightning_shardckpt and the file of the test, too, does so for most calls.
The server alone supervises the children; results, output and stack dumps come back through files. The side that pytest
runs imports neither torch nor lightning_shardckpt. Under xdist, workers.py makes the server along with the worker.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.metadata
import json
import linecache
import logging
import os
import pickle
import pkgutil
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
FIRST_LOOK_S = 0.5  # between asking a rank for its stacks and killing it
LEAVING_S = 2  # a rank that is done waits so long for the others: it would break connections that they still make
OUTPUT_TAIL_LINES = 30
# What ranks would else import by themselves, at 0.2 s of processor time each.
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint", "torch.distributed._tensor", "torch.profiler", "safetensors.torch", "xxhash"),
    *("lightning.pytorch", "lightning.pytorch.cli", "lightning.fabric", "transformers.models.llama.modeling_llama"),
    *("peft", "s3fs", "pytest"),
)
PACKAGE = "lightning_shardckpt"  # not among them: some tests ask what goes without it, or what brings it in
# Daemon threads that a library starts once per process and never stops: tqdm's monitor, fsspec's event loop, and what
# watches the other ranks in a script of Fabric.
LIBRARY_THREADS = {"TMonitor", "fsspecIO", "shardckpt-watch"}
# Threads of allocators, which know of forks: of what other packages bring in.
FORKABLE_THREADS = {"jemalloc_bg_thd"}
# What a rank reports because another rank failed first; such errors are shown last.
SECONDARY = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|[Tt]imed? ?out|Connection refused|failed to connect|store.*closed"
)

warning_filters: list[str] = []
"""The `filterwarnings` lines of pyproject.toml, applied in every child; conftest.py fills them in."""


class RankError(NamedTuple):
    """The exception that ended a rank, as text."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended. Exactly one holds: it returned `value`, it raised `error`, or it was `killed` by a signal.

    `error` is also set for a rank that was killed, naming the signal; `stacks` is empty unless the pool stopped it.
    """

    rank: int
    value: Any = None
    error: RankError | None = None
    killed: bool = False
    output: str = ""
    stacks: str = ""


class RankFailure(AssertionError):
    """Some ranks failed; `outcomes` has every rank's end."""

    def __init__(self, headline: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted((o for o in outcomes if o.error), key=_informative_first)
        super().__init__("\n".join([headline, *map(_describe, failed)]))


class _Job(NamedTuple):
    folder: str
    world: int
    timeout_s: float
    grace_s: float
    init_process_group: bool
    bare: bool
    env: dict[str, str]
    warning_filters: list[str]


class _Ended(TypedDict):
    exit_codes: list[int]  # negative: the signal
    stopped: list[int]
    timed_out: bool


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return what the selected tests of the file have as the parameter of a name: for all of them at once."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params))


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    grace_s: float = 20,
    init_process_group: bool = True,
    bare: bool = False,
    expect_errors: bool = False,
    **named: Any,
) -> list[Any]:
    """Return `[fn(*args, **named) on rank 0, on rank 1, …]`, each from a fresh process with gloo initialised.

    `fn` is a module-level function; its arguments and result are pickled. The ranks share an empty working directory,
    which is deleted afterwards. They see the environment of the caller, extended as `torchrun` would. A rank fails,
    too, when it leaves a Python thread behind, or when an exception ended one of its threads or escaped a destructor.

    Args:
        bare: in processes that have imported nothing of lightning_shardckpt.
        grace_s: how long the other ranks may go on after one has failed, before they are killed.
        expect_errors: return an `Outcome` per rank instead of raising when ranks raise or are killed.

    Raises:
        RankFailure: a rank failed and `expect_errors` is false; or ranks still ran after `timeout_s`, in any case.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "cwd").mkdir()
        (folder / "call.pickle").write_bytes(pickle.dumps((fn, args, named)))
        env = dict(os.environ)
        ended = _ask_server(_Job(name, world, timeout_s, grace_s, init_process_group, bare, env, warning_filters))
        outcomes = [_outcome(folder, rank, ended) for rank in range(world)]
    failed = [o.rank for o in outcomes if o.error]
    if ended["timed_out"]:
        running = ", ".join(map(str, ended["stopped"]))
        raise RankFailure(f"{fn.__qualname__}: ranks {running} of {world} still ran after {timeout_s} s", outcomes)
    if failed and not expect_errors:
        raise RankFailure(f"{fn.__qualname__}: ranks {', '.join(map(str, failed))} of {world} failed", outcomes)
    return outcomes if expect_errors else [o.value for o in outcomes]


def run_each(calls: Mapping[Any, tuple[Any, ...]], timeout_s: float = 120) -> dict[Any, list[Any]]:
    """Return by key what each rank returned, of calls that are each a world, a function and its arguments.

    Calls in a world of the same size are one after another in the same processes, whose start is what takes longest;
    each may take the time.
    """
    found: dict[Any, list[Any]] = {}
    for world in dict.fromkeys(world for world, *_ in calls.values()):
        of_world = {key: call for key, (size, *call) in calls.items() if size == world}
        ranks = run_ranks(world, _call_each, of_world, timeout_s=timeout_s * len(of_world))
        found |= {key: [rank[key] for rank in ranks] for key in of_world}
    return found


def _call_each(calls: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    found = {}
    for key, (fn, *args) in calls.items():
        try:
            found[key] = fn(*args)
        except BaseException as error:
            error.add_note(f"in {key}")
            raise
    return found


def join_store_of_rank_0() -> tuple[int, Any]:
    """Make the process group of two ranks as Lightning's launcher does: the process of rank 0 has the server."""
    import torch.distributed as dist

    rank, rendezvous = int(os.environ["RANK"]), dist.FileStore("rendezvous", 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        rendezvous.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(rendezvous.get("port")), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return rank, rendezvous


def leaked_threads(before: Collection[threading.Thread], timeout_s: float = 2) -> list[threading.Thread]:
    """Return the Python threads that were not there `before` and don't end within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    new = [t for t in threading.enumerate() if t not in before and t is not threading.current_thread()]
    ours = [
        t
        for t in new
        # A _DummyThread is a native thread (autograd, gloo) that called into Python: not ours to end.
        if not isinstance(t, threading._DummyThread)
        and not {t.name, type(t).__name__} & LIBRARY_THREADS
        and not t.name.startswith("asyncio_")  # the executor of fsspec's event loop, which stays as the loop does
    ]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [t for t in ours if t.is_alive()]


# ── the pytest process ──────────────────────────────────────────────────────────────────────────────────────────────


_server: tuple[int, IO[str]] | None = None
"""The process, and a line to it."""


def server_pid() -> int | None:
    """Return the process id of the running fork server, or None."""
    if _server is None or os.waitid(os.P_PID, _server[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return None
    return _server[0]


def stop_server() -> None:
    """End the fork server and with it every rank; the next `run_ranks` starts another."""
    global _server
    if _server:
        (pid, line), _server = _server, None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        line.close()


def _start_server() -> None:
    global _server
    ours, theirs = socket.socketpair()
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.pool", str(os.getpid())]
    # A session of its own: Ctrl-C must reach pytest alone, which then stops the server.
    process = subprocess.Popen(command, stdin=theirs, cwd=ROOT, env=env, start_new_session=True)
    process.returncode = 0  # for its destructor: `stop_server` waits
    theirs.close()
    _server = process.pid, ours.makefile("rw")
    ours.close()


def _ask_server(job: _Job) -> _Ended:
    if server_pid() is None:
        stop_server()
        _start_server()
    assert _server
    try:
        _server[1].write(json.dumps(job) + "\n")
        _server[1].flush()
        reply = _server[1].readline()
    except BaseException:
        stop_server()  # the reply of an interrupted call must not answer the next one
        raise
    if not reply:
        stop_server()
        raise RuntimeError("the fork server of the tests ended; see its stderr")
    ended: _Ended = json.loads(reply)
    return ended


def _outcome(folder: Path, rank: int, ended: _Ended) -> Outcome:
    code = ended["exit_codes"][rank]
    output = (folder / f"{rank}.out").read_text(errors="replace")
    stacks = (folder / f"{rank}.stacks").read_text(errors="replace") if rank in ended["stopped"] else ""
    result = folder / f"{rank}.result"
    value, error = pickle.loads(result.read_bytes()) if code in (0, 1) and result.exists() else (None, None)
    if code < 0:
        by = "the pool, because another rank failed or time was up," if rank in ended["stopped"] else "a signal,"
        error = RankError("Killed", f"killed by {by} {signal.Signals(-code).name}", "")
    elif code or not result.exists():
        error = error or RankError("Exited", f"left with exit status {code} before its function returned", "")
    return Outcome(rank, value, error, killed=code < 0, output=output, stacks=stacks)


def _informative_first(outcome: Outcome) -> tuple[int, int]:
    assert outcome.error
    if outcome.stacks:
        return 2, outcome.rank
    return int(bool(SECONDARY.search(outcome.error.message))), outcome.rank


def _describe(outcome: Outcome) -> str:
    assert outcome.error
    lines = (outcome.error.traceback or f"{outcome.error.type}: {outcome.error.message}").splitlines()
    if outcome.stacks:
        lines += ["where it stood:", *outcome.stacks.splitlines()]
    if outcome.output:
        lines += ["end of its output:", *outcome.output.splitlines()[-OUTPUT_TAIL_LINES:]]
    return "\n".join(f"[rank {outcome.rank}] {line}" for line in lines)


# ── the fork server ─────────────────────────────────────────────────────────────────────────────────────────────────


def serve(parent: int) -> None:
    """Answer one job per line of a socket, which is stdin, until it ends. Runs in the server process only."""
    die_with(parent)
    with socket.socket(fileno=os.dup(0)) as line, line.makefile("rw") as jobs:
        _detach()
        preload()
        be_ready_to_fork()
        _serve(jobs)


def _detach() -> None:
    """Leave stdin and stdout, which are for a protocol, to nobody."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)


def preload() -> None:
    """Import what ranks need, and do here what takes each rank or each of its Trainers a while, with the same result.

    transformers makes its table of conversions, in 0.1 s. Each Trainer asks all installed packages for their entry
    points, in 10 ms, and each first save for versions, in 30: who asks twice, with the same search path, gets the same
    answer.
    """
    for name in ("entry_points", "version"):
        setattr(importlib.metadata, name, _cached_by_path(getattr(importlib.metadata, name)))
    for module in PRELOADED:
        importlib.import_module(module)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
    for package in ("lightning", "torch"):
        importlib.metadata.version(package)
    _warm_up()


def _warm_up() -> None:
    """Fill the caches of Python, torch and Lightning that each rank would else fill by itself, in a tenth of a second.

    They are of checks of abstract classes, of lines of code in stacks, and of fake tensors.
    """
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch._subclasses import FakeTensorMode

    class Logs(BoringModel):
        automatic_optimization = False  # a backward would count the devices that a rank has, for good

        def training_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("loss", self.layer(batch).sum(), sync_dist=True)

    without = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    logger, env = logging.getLogger("lightning.pytorch.utilities.rank_zero"), dict(os.environ)
    logger.disabled = True
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(RandomDataset(32, 2))
        Trainer(accelerator="cpu", devices=1, max_epochs=1, **without).fit(Logs(), loader)
        with FakeTensorMode():
            torch.empty(2).detach()
    logger.disabled = False
    os.environ.clear()
    os.environ.update(env)
    for name, module in list(sys.modules.items()):
        if re.match(r"torch\.(distributed|nn|optim|utils|random|cuda|xpu|mtia)|lightning\.(pytorch|fabric)", name):
            linecache.getlines(getattr(module, "__file__", None) or "")


def _cached_by_path(ask: Callable[..., Any]) -> Callable[..., Any]:
    of_path = cache(lambda path, *args, **which: ask(*args, **which))
    return lambda *args, **which: of_path(tuple(sys.path), *args, **which)


def fork_server() -> None:
    """Make the server of this process, which has done `preload` and nothing else, by a fork."""
    global _server
    ours, theirs = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        die_with(parent)
        _detach()
        with theirs.makefile("rw") as jobs:
            _serve(jobs)
        os._exit(0)
    theirs.close()
    _server = pid, ours.makefile("rw")
    ours.close()


def _serve(jobs: IO[str]) -> None:
    _spare_threads_of_gloo()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # _supervise waits for it
    other = _fork_another(_serve_with_package)
    assert other
    for line in jobs:
        jobs.write(_answer(line) if _Job(*json.loads(line)).bare else _pass_on(line, other))
        jobs.flush()


def _fork_another(serve: Callable[[IO[str]], None]) -> IO[str] | None:
    """Fork a server that takes lines and replies as this one does, once it has said that it can; None if it can't."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        die_with(parent)
        ours.close()
        with theirs.makefile("rw") as jobs:
            serve(jobs)
        os._exit(0)
    theirs.close()
    line = ours.makefile("rw")
    if line.readline():
        return line
    line.close()
    os.wait()
    return None


def _pass_on(line: str, other: IO[str]) -> str:
    other.write(line)
    other.flush()
    reply = other.readline()
    assert reply, "a server that has imported more ended"
    return reply


def _serve_with_package(jobs: IO[str]) -> None:
    """Import all of the package; a fork of it imports the file of the test that runs, for all calls of that file."""
    for module in pkgutil.walk_packages([str(ROOT / PACKAGE)], f"{PACKAGE}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    be_ready_to_fork()
    use_huge_pages()
    print(file=jobs, flush=True)
    name, other = "", None
    for line in jobs:
        wanted = _Job(*json.loads(line)).env.get("PYTEST_CURRENT_TEST", "").partition(".py::")[0].replace("/", ".")
        if wanted != name:
            if other:
                other.close()  # which ends it
                os.wait()
            name, other = wanted, _fork_another(partial(_serve_with_test, wanted))
        jobs.write(_pass_on(line, other) if other else _answer(line))
        jobs.flush()


def _serve_with_test(name: str, jobs: IO[str]) -> None:
    try:
        importlib.import_module(name)
        be_ready_to_fork()
    except BaseException:  # each rank imports it, and says why it can't
        return
    print(file=jobs, flush=True)
    for line in jobs:
        jobs.write(_answer(line))
        jobs.flush()


def be_ready_to_fork() -> None:
    """Leave nothing for collections of garbage, which would copy pages, and nothing that a fork would break."""
    gc.collect()
    gc.freeze()  # a rank's collections neither look through all modules nor copy their pages
    threads = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    others = [name for name in threads[1:] if name not in FORKABLE_THREADS]
    assert not others, f"only a process with one thread can be forked safely, and this one has {others}"


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages: with small ones, a fork and its end take 30 ms, and not 10."""
    huge, madv_collapse = 2 << 20, 25  # since Linux 6.1; elsewhere an error without consequences
    madvise, maps = ctypes.CDLL(None).madvise, Path("/proc/self/maps").read_text()
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, stop in re.findall(r"^(\w+)-(\w+) rw-p 0+ \S+ 0 +(?:\[heap\])?$", maps, re.MULTILINE):
        for address in range(-(-int(start, 16) // huge) * huge, int(stop, 16) - huge + 1, huge):
            madvise(address, huge, madv_collapse)


def _answer(line: str) -> str:
    """Do a job; returns how it ended, as a line."""
    job = _Job(*json.loads(line))
    exit_door = os.pipe()
    pids = [_fork(rank, job, exit_door) for rank in range(job.world)]
    for end in exit_door:
        os.close(end)
    return json.dumps(_supervise(pids, timeout_s=job.timeout_s, grace_s=job.grace_s)) + "\n"


def _spare_threads_of_gloo() -> None:
    """Let every group of gloo work off its collectives in one thread: the two of torch 2.13 corrupt the heap together.

    Both store the name of what they have done in one ``std::string`` of the group, without a lock: see
    ``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``. One that is longer than 15 characters, such as
    ALLGATHER_COALESCED of ``DTensor.full_tensor``, may be freed twice, also where each collective is waited for before
    the next one. Options of gloo, which have the number of threads, are not passed on by ``init_process_group``.

    And let all groups of a process share a device: the thread of each looks a hundred times a second for what to do.
    """
    import torch.distributed

    gloo: Any = torch.distributed.ProcessGroupGloo
    original = gloo.__init__

    @cache
    def device_of(pid: int, interface: str | None) -> Any:
        return gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    def initialise(
        group: Any, store: Any, rank: int, size: int, *, timeout: datetime.timedelta, enable_reconfigure: bool = False
    ) -> None:
        assert not enable_reconfigure, "options of gloo have no such thing"  # torch 2.15 passes it, False by default
        options = gloo._Options()
        device = device_of(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))
        options._devices, options._threads, options._timeout = [device], 1, timeout
        original(group, store, rank, size, options)

    gloo.__init__ = initialise


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _fork(rank: int, job: _Job, exit_door: tuple[int, int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(rank, job, server, exit_door)
    with suppress(ProcessLookupError, PermissionError):  # the child does the same: whoever is first
        os.setpgid(pid, pid)
    return pid


def _supervise(pids: list[int], *, timeout_s: float, grace_s: float) -> _Ended:
    """Wait for all `pids`, then leave no process of theirs. The first failure shortens the wait to `grace_s`."""
    timeout = deadline = time.monotonic() + timeout_s
    codes: dict[int, int] = {}

    def reap(options: int) -> None:
        for pid in [p for p in pids if p not in codes]:
            done, status = os.waitpid(pid, options)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)

    while len(codes) < len(pids) and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        reap(os.WNOHANG)
        if any(codes.values()) and deadline == timeout:
            deadline = min(timeout, time.monotonic() + grace_s)
    stopped = [rank for rank, pid in enumerate(pids) if pid not in codes]
    if stopped:
        for rank in stopped:
            os.kill(pids[rank], signal.SIGUSR2)  # faulthandler writes the stacks
        time.sleep(FIRST_LOOK_S)
    for pid in pids:
        with suppress(ProcessLookupError):  # its group: data loader workers and other grandchildren die, too
            os.killpg(pid, signal.SIGKILL)
    reap(0)
    return _Ended(
        exit_codes=[codes[pid] for pid in pids], stopped=stopped, timed_out=bool(stopped) and deadline == timeout
    )


# ── a rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _child(rank: int, job: _Job, server: int, exit_door: tuple[int, int]) -> NoReturn:
    os.setpgid(0, 0)
    die_with(server)
    folder = Path(job.folder)
    _redirect(folder / f"{rank}.out")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    faulthandler.register(signal.SIGUSR2, file=(folder / f"{rank}.stacks").open("w"), all_threads=True)
    code, value, error = 0, None, None
    try:
        value = pickle.dumps((_call(rank, job, exit_door), None))
    except BaseException as raised:  # reported to the test, whatever it is
        code = 1
        error = RankError(type(raised).__name__, str(raised), traceback.format_exc())
    (folder / f"{rank}.result").write_bytes(value or pickle.dumps((None, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no atexit handlers of the server


def _redirect(output: Path) -> None:
    null, out = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper here


def _call(rank: int, job: _Job, exit_door: tuple[int, int]) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not re-exported for mypy

    folder, world = Path(job.folder), job.world
    os.chdir(folder / "cwd")
    os.environ.clear()
    os.environ.update(job.env | _torchrun_env(rank, world))
    torch.set_num_threads(1)
    _apply_warning_filters(job.warning_filters)
    lost = _collect_lost_exceptions()
    threads = threading.enumerate()
    fn, args, named = pickle.loads((folder / "call.pickle").read_bytes())
    if job.init_process_group:
        # Below the pool's timeout, so that a stuck collective raises in its own rank, with its own traceback.
        timeout = datetime.timedelta(seconds=max(job.timeout_s - 10, job.timeout_s / 2))
        store = FileStore(str(folder / "store"), world)  # no port to hunt for
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()  # a rank that failed at once would break the connections that the others still make
    value = fn(*args, **named)
    if leaked := leaked_threads(threads):
        raise AssertionError(f"{fn.__qualname__} left threads behind: {leaked}")
    if lost:
        raise AssertionError("exceptions that nobody could catch:\n" + "\n".join(lost))
    _leave_together(exit_door)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _leave_together(exit_door: tuple[int, int]) -> None:
    """Wait until all ranks came here or died: then nobody has the pipe open for writing, and its end can be read."""
    reading, writing = exit_door
    os.close(writing)
    select.select([reading], [], [], LEAVING_S)


def _torchrun_env(rank: int, world: int) -> dict[str, str]:
    """Return what `torchrun` sets, by which Lightning recognises processes that it must not start itself."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # nobody listens: the group is there before anyone could ask for it
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _apply_warning_filters(lines: Sequence[str]) -> None:
    if lines:
        from _pytest.config import parse_warning_filter  # pytest's own reading of the same lines

        for line in lines:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def _collect_lost_exceptions() -> list[str]:
    """Return a list that grows by each exception that ends a thread or escapes a destructor, as pytest notices them."""
    lost: list[str] = []

    def in_thread(info: threading.ExceptHookArgs) -> None:
        if info.exc_value:
            lost.append("".join(traceback.format_exception(info.exc_value)))

    def unraisable(info: sys.UnraisableHookArgs) -> None:
        if info.exc_value:
            lost.append(f"in {info.object!r}:\n" + "".join(traceback.format_exception(info.exc_value)))

    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    return lost


if __name__ == "__main__":
    from tests.support import pool

    pool.serve(int(sys.argv[1]))
