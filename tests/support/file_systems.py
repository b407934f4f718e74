"""File systems that cannot do everything, whatever the tests run on."""

from __future__ import annotations


def without_flags(source: str, target: str, flag: int) -> bool:
    """Neither exchange two names nor refuse to replace one, as some network file systems."""
    return False
