"""Options of ``consolidate``: defaults, valid combinations, and the stored state under the names of the output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike, map_names
from lightning_shardckpt.sources.source import Source

Format = Literal["torch", "safetensors", "huggingface", "peft"]
Split = Literal["one_file", "one_file_per_tensor", "chunks"]
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIZE_PER_SHARD = 5000.0
"""Default size of chunks in MB."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an export; ``consolidate`` describes them.

    Raises:
        ValueError: if a value is unknown, or options contradict each other.
    """

    format: Format = "torch"
    split: Split | None = None
    size_per_shard: float | None = None
    optimizer: bool | None = None
    dtype: str | None = None
    key_mapping: KeyMappingLike | None = None
    overwrite: bool = False
    mapping: KeyMapping = field(init=False)
    """The parsed ``key_mapping``."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("format", self.format, get_args(Format)),
            ("split", self.split, (None, *get_args(Split))),
            ("dtype", self.dtype, (None, *DTYPES)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(str(c) for c in choices if c)}, got {value!r}")
        object.__setattr__(self, "mapping", KeyMapping.of(self.key_mapping))
        self._check()

    def _check(self) -> None:
        format, split, size = self.format, self.split, self.size_per_shard
        if format == "torch" and split not in (None, "one_file"):
            raise ValueError(f"split {split!r} is for safetensors: a file for torch.load is one file")
        if format == "huggingface" and split == "one_file_per_tensor":
            raise ValueError("transformers reads one file or chunks; for one_file_per_tensor use format 'safetensors'")
        if format == "huggingface" and self.optimizer:
            raise ValueError(
                "a Hugging Face directory has no optimizer; export the optimizer with format 'safetensors' or 'torch'"
            )
        if format == "peft" and (split is not None or self.optimizer):
            raise ValueError("PEFT reads one file for each adapter, without an optimizer")
        if size is not None and self.files != "chunks":
            raise ValueError("size_per_shard is for split 'chunks'")
        if size is not None and not size > 0:
            raise ValueError(f"size_per_shard is a size in MB and must be positive, got {size}")
        if format == "peft" and (self.dtype is not None or not self.mapping.is_empty or self.overwrite):
            raise ValueError(
                "PEFT reads adapters as they were trained, under their names: format 'peft' takes no dtype and no "
                "key_mapping; and it replaces nothing, so choose a path where nothing is"
            )

    @property
    def files(self) -> Split:
        """The split into safetensors files."""
        return self.split or ("chunks" if self.format == "huggingface" else "one_file")

    @property
    def chunk_mb(self) -> float:
        """Maximum size of a chunk in MB."""
        return SIZE_PER_SHARD if self.size_per_shard is None else self.size_per_shard

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizers are exported, too."""
        return self.format == "torch" if self.optimizer is None else self.optimizer

    @property
    def is_file(self) -> bool:
        """True if the output is a file, not a directory."""
        return self.format == "torch" or (
            self.format == "safetensors" and self.files == "one_file" and not self.has_optimizer
        )

    def output_dtype(self, dtype: str) -> str:
        """Return the dtype of a model's tensor in the output for its stored dtype, by safetensors names."""
        is_floating = dtype.startswith(("F", "BF"))
        return DTYPES[self.dtype] if self.dtype is not None and is_floating else dtype

    def select(self, stored: Source) -> Source:
        """Return the stored state under the names of the output, without what is left out.

        Raises:
            ValueError: if entries of the mapping match no name, or give a name several times.
        """
        if self.mapping.is_empty:
            return stored
        try:
            selected, problems = map_names(stored, self.mapping, optimizers=None if self.has_optimizer else ())
        except MismatchError as error:
            raise ValueError(str(error)) from None
        if problems:
            raise ValueError(f"{stored.path!r}: " + "\n  ".join(problems))
        return selected
