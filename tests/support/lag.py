"""Make one process see late what the others make, as caches of network file systems do.

While a ``Lag`` is installed, names below its root that this process did not make raise ENOENT, and are not listed, for
some seconds after the last change of what they name, unless they were seen before. What is open is not concerned.
"""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LOOKING = ("stat", "lstat", "unlink", "rmdir", "open")
_LISTING = ("listdir", "scandir")
_MOVING = ("rename", "replace")


class Lag:
    """Below ``root``, names of others become visible ``late_s`` after their making. Use it as a context."""

    def __init__(self, root: str, late_s: float) -> None:
        self._root, self._late_s = os.path.abspath(root), late_s
        self._known: set[str] = set()
        self._originals: dict[str, Any] = {}
        self.missed: set[str] = set()
        """Base names that were asked for, or left out of a list, when they were there."""

    def __enter__(self) -> Lag:
        for name in (*_LOOKING, *_LISTING, *_MOVING, "mkdir"):
            self._originals[name] = getattr(os, name)
        for name in _LOOKING:
            setattr(os, name, self._looking(self._originals[name]))
        for name in _LISTING:
            setattr(os, name, self._listing(self._originals[name]))
        for name in _MOVING:
            setattr(os, name, self._moving(self._originals[name]))
        os.mkdir = self._making(self._originals["mkdir"])  # type: ignore[assignment]
        self._originals["file"] = builtins.open
        builtins.open = self._looking(builtins.open)
        return self

    def __exit__(self, *_: object) -> None:
        builtins.open = self._originals.pop("file")
        for name, original in self._originals.items():
            setattr(os, name, original)

    def knows(self, *paths: str) -> None:
        """These were seen before."""
        self._known.update(paths)

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path, if it is below the root."""
        if isinstance(path, int):
            return None
        base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        found = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        return found if found.startswith(self._root + "/") else None

    def _is_visible(self, path: str) -> bool:
        if path == self._root:
            return True
        if not self._is_visible(os.path.dirname(path)):
            return False
        if path in self._known:
            return True
        try:
            changed = self._originals["lstat"](path).st_ctime
        except OSError:
            return True  # the call itself says so
        if time.time() < changed + self._late_s:
            self.missed.add(os.path.basename(path))
            return False
        self._known.add(path)
        return True

    def _check(self, path: str | None) -> None:
        if path is not None and not self._is_visible(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            below = self._below(path, kwargs.get("dir_fd"))
            making = bool(args) and isinstance(args[0], int) and bool(args[0] & os.O_CREAT)
            self._check(os.path.dirname(below) if below is not None and making else below)
            found = original(path, *args, **kwargs)
            if making and below is not None:
                self._known.add(below)
            return found

        return call

    def _listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            base = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(path)
            below = self._below(base)
            self._check(below)
            found = original(path)
            if below is None and base != self._root:
                return found
            if original is self._originals["listdir"]:
                return [name for name in found if self._is_visible(os.path.join(base, name))]
            return _Entries([entry for entry in found if self._is_visible(os.path.join(base, entry.name))])

        return call

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any) -> None:
            self._check(self._below(source))
            original(source, target)
            before, after = self._below(source), self._below(target)
            if before is not None and after is not None:
                moved = {path for path in self._known if path == before or path.startswith(before + "/")}
                self._known = (self._known - moved) | {after + path[len(before) :] for path in moved | {before}}

        return call

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            with suppress(FileExistsError):
                self._check(self._below(os.path.dirname(os.path.abspath(path))))
            original(path, *args, **kwargs)
            if (below := self._below(path)) is not None:
                self._known.add(below)

        return call


class _Entries(list[Any]):
    """What scandir gives, as a context, too."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...
