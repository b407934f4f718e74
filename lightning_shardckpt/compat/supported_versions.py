"""The supported versions of torch and Lightning, and the refusal of others before their first private name is used.

Tools that run without torch don't import this.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = {"torch": ((2, 12), (2, 15)), "lightning": ((2, 5), (2, 6))}
"""The first and the last tested minor version of each, as in ``pyproject.toml``."""


def require_supported_versions() -> None:
    """Raise an ImportError for untested versions of torch and Lightning, by the metadata of packages.

    A nightly or development build counts as the version that it precedes: 2.16.0.dev20261120 is 2.16. A package that is
    not installed is left to the import that needs it.
    """
    problems, wanted = list[str](), list[str]()
    for name, (first, last) in SUPPORTED.items():
        low, high, above = (f"{major}.{minor}" for major, minor in (first, last, (last[0], last[1] + 1)))
        wanted.append(f'"{name}>={low},<{above}"')
        with suppress(PackageNotFoundError):
            number = re.match(r"(\d+)\.(\d+)", installed := version(name))
            if number is not None and not first <= (int(number[1]), int(number[2])) <= last:
                problems.append(f"{name} {installed} is installed, {low} to {high} are supported")
    if problems:
        raise ImportError(
            f"lightning-shardckpt cannot be used with the installed versions: {'; '.join(problems)}\n"
            "It relies on private names of torch and Lightning, with which others may give errors or different results."
            f"\nRun `pip install {' '.join(wanted)}`, or use a release of lightning-shardckpt for the versions "
            "that are installed."
        )
