"""Of which format is what lies at a path, if it is no checkpoint of this package?

A new format is a row of ``FORMATS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.formats import huggingface
from lightning_shardckpt.formats.plain import PlainSource
from lightning_shardckpt.sources import Source


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of checkpoint: its name with an article, whether a path is one, and how it is opened.

    ``open`` is given the path, and ``weights_only`` as ``torch.load`` takes it, for what is unpickled.
    """

    name: str
    matches: Callable[[str], bool]
    open: Callable[[str, bool], Source]


def _is_other_file(path: str) -> bool:
    return os.path.isfile(path) and not huggingface.is_safetensors(path)


FORMATS = (
    Format("a Hugging Face directory", huggingface.is_directory, huggingface.open_directory),
    Format("a file of safetensors", huggingface.is_safetensors, huggingface.open_file),
    Format("a file of torch.save", _is_other_file, PlainSource),
)


def recognised(path: str) -> Format | None:
    """The format of what is at ``path``; None if it is of none of them.

    Raises:
        FormatError: if it is of several.
    """
    found = [known for known in FORMATS if known.matches(path)]
    if len(found) > 1:
        names = " and ".join(known.name for known in found)
        raise FormatError(f"{path!r} is {names} at once, and which one is meant cannot be told. Move one elsewhere.")
    return found[0] if found else None
