"""Exports through little memory, so that small tensors are cut into windows, too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_shardckpt.export.torch_export import plan_torch
from lightning_shardckpt.export.whole_files import Options, plan_safetensors, write
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.storage.local_files import open_output
from lightning_shardckpt.storage.router import StorageRouter


def in_windows(path: Path, output: Path, nbytes: int, *, key_mapping: Any = None, **options: Any) -> Path:
    """Do the same as consolidate, which has more memory for windows."""
    chosen = Options(**options, key_mapping=KeyMapping.of(key_mapping))
    source, _ = open_source(str(path), StorageRouter(), for_export=True)
    with closing(source) as stored:
        export = plan_torch(stored, chosen) if chosen.format == "torch" else plan_safetensors(stored, chosen)
        with open_output(str(output), is_file=chosen.is_file, replaceable=lambda path: False) as (create, _):
            write(export, create, window_bytes=nbytes)
    return output
