"""Build the pretend device for the installed torch, once, in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

MODULE = "pretend_device"
_HERE = Path(__file__).parent
_SOURCES = ("memory", "streams", "kernels", "nccl")
_DEFINED = ("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-DTORCH_EXTENSION_NAME={MODULE}")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", *_DEFINED)
_COMPILER_TIMEOUT_S = 600


def why_not() -> str:
    """Return why it can't be built here, or nothing."""
    if shutil.which("g++") is None:
        return "there is no g++ to build the pretend device"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "there are no headers of Python to build the pretend device"
    import torch

    return "" if torch.version.cuda is None else "this build of torch has CUDA of its own"


def built() -> Path:
    """Return the extension module, which is built if this version of torch and these sources have none yet.

    Raises:
        RuntimeError: the compiler's messages.
    """
    sources = [*(_HERE / f"{name}.cpp" for name in _SOURCES), _HERE / "pretend.h"]
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources))
    key.update(f"{version('torch')} {sys.version} {_FLAGS}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lightning-shardckpt" / f"{MODULE}-{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{MODULE}.so"
    with (folder / "lock").open("w") as lock:  # another process may build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            _build(folder, module)
    return module


def _build(folder: Path, module: Path) -> None:
    import torch
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    includes = [flag for path in (*include_paths(), sysconfig.get_paths()["include"]) for flag in ("-isystem", path)]
    objects = {name: str(folder / f"{name}.o") for name in _SOURCES}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(
            threads.map(
                lambda name: _run("g++", *_FLAGS, *includes, "-c", str(_HERE / f"{name}.cpp"), "-o", objects[name]),
                reversed(_SOURCES),  # the longest first
            )
        )
    linked = folder / "linked.so"
    names = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")]
    _run("g++", "-shared", *objects.values(), f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}", "-o", str(linked))
    linked.rename(module)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-3:])} failed:\n{done.stderr[-4000:]}")
