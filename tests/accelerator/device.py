"""Make this process believe that it has GPUs and NCCL: the Python side of the pretend device.

``install`` changes ``torch.cuda`` and ``torch.distributed`` for the rest of the process. So it runs in a process of its
own, such as a rank that the tests have forked, before anything asks for a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.accelerator import nccl
from tests.accelerator.build import PRETEND, load

_GIB = 1 << 30

_module: Any = None


def install(
    devices: int = 2,
    *,
    guarded: bool = True,
    eager: bool = True,
    deadlock_s: float = 20,
) -> None:
    """Give this process pretend GPUs.

    Args:
        devices: how many.
        guarded: a read or write of device memory by the host is a segmentation fault.
        eager: one communicator for collectives and messages, as with ``init_process_group(device_id=…)``; else messages
            have one for each pair of ranks.
        deadlock_s: the process ends with status 86, after a word, when a collective has run for so long.
    """
    global _module
    _module = load(PRETEND)
    _module.begin(devices, guarded, eager, deadlock_s)
    _change_cuda()
    torch.cuda.nccl = SimpleNamespace(version=lambda: (2, 27, 5), is_available=lambda *_: True)
    nccl.install(_module)


def counts() -> dict[str, int]:
    """Return how many kernels, copies and waits of the host there were, and the bytes of memory."""
    return dict(_module.counts())


def queues() -> str:
    """Return what the communicators of this rank have not done yet."""
    return str(_module.queues())


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device if device >= 0 else int(_module.current_device())
    index = None if device is None else torch.device(device).index
    return int(_module.current_device() if index is None else index)


# ── torch.cuda ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Stream:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, **_: bool) -> Event:
        return super().__new__(cls, torch.device("cuda", _index()), enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(_current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(_current_stream() if stream is None else stream)


def _current_stream(device: Any = None) -> Stream:
    now = torch.accelerator.current_stream(_index(device))
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class _OnStream:
    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device, self._before = _index(), _current_stream(self.stream.device_index)
            _set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            _set_stream(self._before)
            _module.set_device(self._device)


class _OnDevice:
    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _module.set_device(self._before)


class _OnDeviceOf(_OnDevice):
    def __init__(self, owner: torch.Tensor) -> None:
        super().__init__(owner.get_device() if owner.is_cuda else None)


def _exchange_device(device: int) -> int:
    before = int(_module.current_device())
    if device >= 0:
        _module.set_device(device)
    return before


def _properties(device: Any = None) -> SimpleNamespace:
    sizes = {"warp_size": 32, "L2_cache_size": 50 << 20, "regs_per_multiprocessor": 65536}
    return SimpleNamespace(
        name="pretend", major=9, minor=0, total_memory=80 * _GIB, multi_processor_count=132, gcnArchName="",
        uuid=f"pretend-{_index(device)}", max_threads_per_multi_processor=2048, is_integrated=False, **sizes,
    )  # fmt: skip


def _change_cuda() -> None:
    generators = tuple(_module.default_generator(i) for i in range(_module.device_count()))
    count = lambda key: lambda device=None: counts()[key]  # noqa: E731  # one line each, below
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: _module.register_host(address, size) or 0,
        cudaHostUnregister=lambda address: _module.unregister_host(address) or 0,
    )
    changed: dict[str, Any] = {
        # devices
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: _module.device_count(),
        "current_device": lambda: _module.current_device(),
        "set_device": lambda device: _exchange_device(_index(device)) and None,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "device": _OnDevice,
        "device_of": _OnDeviceOf,
        "synchronize": lambda device=None: _module.synchronize(_index(device)),
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: "pretend",
        "get_device_capability": lambda device=None: (9, 0),
        "can_device_access_peer": lambda *_: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda: True,
        "current_blas_handle": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        # streams
        "Stream": Stream,
        "Event": Event,
        "stream": _OnStream,
        "StreamContext": _OnStream,
        "current_stream": _current_stream,
        "set_stream": _set_stream,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=_index(device), device_type=1),
        # random numbers
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state.cpu()) and None,
        "get_rng_state_all": lambda: [each.get_state() for each in generators],
        "set_rng_state_all": lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)] and None,
        "manual_seed": lambda seed: generators[_index()].manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: [each.manual_seed(int(seed)) for each in generators] and None,
        "initial_seed": lambda: generators[_index()].initial_seed(),
        # memory
        "empty_cache": lambda: _module.synchronize(_index()),  # as cudaFree does
        "ipc_collect": lambda: None,
        "memory_allocated": count("allocated"),
        "memory_reserved": count("allocated"),
        "max_memory_allocated": count("peak"),
        "max_memory_reserved": count("peak"),
        "reset_peak_memory_stats": lambda device=None: _module.reset_peak(),
        "cudart": lambda: runtime,
        "mem_get_info": lambda device=None: (70 * _GIB, 80 * _GIB),
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda *_, **__: "",
    }
    homes = [torch.cuda, *(sys.modules.get(f"torch.cuda.{name}") for name in ("random", "memory", "streams", "graphs"))]
    for home in homes:
        for name, value in changed.items():
            if home is torch.cuda or hasattr(home, name):
                setattr(home, name, value)
    _add_to_extension(
        _cuda_getDeviceCount=_module.device_count,
        _cuda_getDevice=_module.current_device,
        _cuda_setDevice=_module.set_device,
        _cuda_exchangeDevice=_exchange_device,
        _cuda_maybeExchangeDevice=_exchange_device,
        _cuda_synchronize=lambda: _module.synchronize(-1),
        _cuda_getCurrentRawStream=lambda device: 0,
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_getArchFlags=lambda: "sm_90",
        _cuda_clearCublasWorkspaces=lambda: None,
        _cuda_emptyCache=lambda: None,
    )
    torch.version.cuda = "13.0"
    torch.UntypedStorage.resize_ = _resize_by(torch.UntypedStorage.resize_)
    torch.UntypedStorage.clone = _clone_by(torch.UntypedStorage.clone)


def _add_to_extension(**functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _resize_by(of_host: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``UntypedStorage.resize_``: a build without CUDA refuses it for storages of a GPU. FSDP2 frees by it."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "cuda":
            return of_host(storage, size)
        _module.resize_storage(storage, size)
        return storage

    return resize_


def _clone_by(of_host: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``UntypedStorage.clone``: a build without CUDA makes no storage of a GPU by itself. Deep copies use it."""

    def clone(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cuda":
            return of_host(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    return clone
