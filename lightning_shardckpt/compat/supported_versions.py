"""The supported versions of torch and Lightning, and the refusal of others.

Private names may differ or be missing in another version. So an import of modules that need torch or Lightning fails
here, before the first such name is used. Installed versions are read from metadata, without importing the packages.
Tools that run without torch don't import this.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = {"torch": ((2, 12), (2, 15)), "lightning": ((2, 5), (2, 6))}
"""The first and the last tested minor version of each, as in ``pyproject.toml``."""


def require_supported_versions() -> None:
    """Refuse untested versions of torch and Lightning.

    A nightly or development build counts as the version that it precedes: 2.16.0.dev20261120 is 2.16. A package that is
    not installed, or whose version has no number, is left to the import that needs it.

    Raises:
        ImportError: naming the installed and the supported versions, and remedies.
    """
    problems = [text for name in SUPPORTED if (text := _problem(name))]
    if problems:
        wanted = " ".join(f'"{name}{_requirement(name)}"' for name in SUPPORTED)
        raise ImportError(
            f"lightning-shardckpt cannot be used with the installed versions: {'; '.join(problems)}\n"
            "It relies on private names of torch and Lightning, with which others may give errors or different results."
            f"\nRun `pip install {wanted}`, or use a release of lightning-shardckpt for the installed versions."
        )


def _problem(name: str) -> str | None:
    """Return a text of the installed and the supported versions; None if supported, or unknown."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return None
    number = re.match(r"(\d+)\.(\d+)", installed)
    first, last = SUPPORTED[name]
    if number is None or first <= (int(number[1]), int(number[2])) <= last:
        return None
    return f"{name} {installed} is installed, {_text(first)} to {_text(last)} are supported"


def _requirement(name: str) -> str:
    """Return the bounds in pip's syntax, such as ``>=2.12,<2.16``."""
    first, (major, minor) = SUPPORTED[name]
    return f">={_text(first)},<{major}.{minor + 1}"


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
