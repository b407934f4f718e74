"""Build the extensions of these tests for the installed torch, once, in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

PRETEND, SHARED = "pretend_device", "shared_gpu"  # a device; NCCL for ranks that share a real one
_HERE = Path(__file__).parent
_SOURCES = {PRETEND: ("memory", "streams", "kernels", "nccl"), SHARED: ("shared", "nccl")}
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
_COMPILER_TIMEOUT_S = 600


def why_not() -> str:
    """Return why the pretend device can't be built here, or nothing."""
    if shutil.which("g++") is None:
        return "there is no g++ to build the pretend device"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "there are no headers of Python to build the pretend device"
    import torch

    return "" if torch.version.cuda is None else "this build of torch has CUDA of its own"


def load(name: str) -> Any:
    """Import an extension module."""
    spec = importlib.util.spec_from_file_location(name, built(name))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(name: str) -> Path:
    """Return the extension module, which is built if this version of torch and these sources have none yet.

    Raises:
        RuntimeError: the compiler's messages.
    """
    sources = [*(_HERE / f"{source}.cpp" for source in _SOURCES[name]), _HERE / "pretend.h"]
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources))
    key.update(f"{version('torch')} {sys.version} {_FLAGS}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lightning-shardckpt" / f"{name}-{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{name}.so"
    with (folder / "lock").open("w") as lock:  # another process may build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            _build(name, folder, module)
    return module


def _build(name: str, folder: Path, module: Path) -> None:
    import torch
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    includes = [flag for path in (*include_paths(), sysconfig.get_paths()["include"]) for flag in ("-isystem", path)]
    objects = {source: str(folder / f"{source}.o") for source in _SOURCES[name]}
    older = ("-DPreMulSumSupplement=NCCLPreMulSumSupplement",) if torch.__version__ < "2.12" else ()
    flags = (*_FLAGS, *older, f"-DTORCH_EXTENSION_NAME={name}", *includes)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        compile_ = lambda source: _run("g++", *flags, "-c", str(_HERE / f"{source}.cpp"), "-o", objects[source])  # noqa: E731
        list(threads.map(compile_, reversed(_SOURCES[name])))  # the longest first
    linked = folder / "linked.so"
    libraries_of_torch = [f"-l{library}" for library in ("c10", "torch", "torch_cpu", "torch_python")]
    paths = (f"-L{libraries}", *libraries_of_torch, f"-Wl,-rpath,{libraries}")
    _run("g++", "-shared", *objects.values(), *paths, "-o", str(linked))
    linked.rename(module)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-3:])} failed:\n{done.stderr[-4000:]}")
