"""Options of ``consolidate``: defaults, valid combinations, and the selection and renaming of tensors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike

Format = Literal["torch", "safetensors", "huggingface", "peft"]
Split = Literal["one_file", "one_file_per_tensor", "chunks"]
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SIZE_PER_SHARD = 5000.0
"""Default size of chunks in MB."""


@dataclass(frozen=True, slots=True)
class Naming:
    """Rules that select and rename tensors: filters on the old names, then remove a prefix, map, add a prefix.

    Attributes:
        include: patterns (``*``, ``?``, ``[…]``), of which a name must match at least one; none selects all.
        exclude: patterns that a name must not match.
        strip_prefix: a prefix to remove from the names that have it.
        mapping: maps old names to new ones; a name that it drops is not selected.
        add_prefix: a prefix to add to every name.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str = ""
    mapping: KeyMapping = field(default_factory=KeyMapping)
    add_prefix: str = ""

    @property
    def changes_something(self) -> bool:
        """True if any rule is set."""
        return self != Naming()

    def selects(self, name: str) -> bool:
        """Return True if an old name passes the filters, and the mapping does not drop it.

        >>> Naming(include=("model.*",), exclude=("*.bias",)).selects("model.head.bias")
        False
        """
        return self._passes_filters(name) and bool(self.mapping(name.removeprefix(self.strip_prefix)))

    def _passes_filters(self, name: str) -> bool:
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def rename(self, name: str) -> str:
        """Return the new name of a selected name.

        >>> swap = Naming(strip_prefix="net.", mapping=KeyMapping.of({"^a": "b", "^b": "a"}))
        >>> swap.rename("net.a.w"), swap.rename("b.w")
        ('b.w', 'a.w')

        Raises:
            ValueError: if the mapping gives several names.
        """
        new = self.mapping(name.removeprefix(self.strip_prefix))
        if len(new) != 1:
            raise ValueError(f"key_mapping gives {name!r} the names {list(new)}; in the output, a tensor has one name")
        return self.add_prefix + new[0]

    def check(self, names: Iterable[str]) -> None:
        """Check that every rule matches at least one of the names.

        Raises:
            ValueError: listing the patterns, mapping entries and prefixes that match none.
        """
        names = list(names)
        stripped = [name.removeprefix(self.strip_prefix) for name in names if self._passes_filters(name)]
        unused = [repr(p) for p in (*self.include, *self.exclude) if not any(fnmatchcase(n, p) for n in names)]
        if self.strip_prefix and not any(name.startswith(self.strip_prefix) for name in names):
            unused.append(f"the prefix {self.strip_prefix!r}")
        unused += map(repr, self.mapping.unused(stripped))
        if unused:
            near = difflib.get_close_matches(unused[0].strip("'"), [*names, *stripped], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            advice = "".join(f"\n  key_mapping: {line}" for line in self.mapping.suggest(stripped))
            raise ValueError(f"no tensor has a name for {', '.join(unused)}{hint}{advice}")


def check_unique(names: Iterable[tuple[str, str, object]]) -> dict[str, str]:
    """Return the old names by new names, from ``(old name, new name, identity of the tensor)``."""
    by_new_name: dict[str, tuple[str, object]] = {}
    for old, new, tensor in names:
        other = by_new_name.setdefault(new, (old, tensor))
        if other[1] != tensor:
            raise ValueError(f"two tensors would be called {new!r}: {other[0]!r} and {old!r}")
    return {new: old for new, (old, _) in by_new_name.items()}


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
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    key_mapping: KeyMappingLike | None = None
    strip_prefix: str | None = None
    add_prefix: str | None = None
    overwrite: bool = False
    naming: Naming = field(init=False)
    """The rules for names, from the options above."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("format", self.format, get_args(Format)),
            ("split", self.split, (None, *get_args(Split))),
            ("dtype", self.dtype, (None, *DTYPES)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is one of {', '.join(str(c) for c in choices if c)}, got {value!r}")
        naming = Naming(
            (self.include,) if isinstance(self.include, str) else tuple(self.include),
            (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude),
            self.strip_prefix or "",
            KeyMapping.of(self.key_mapping),
            self.add_prefix or "",
        )
        object.__setattr__(self, "naming", naming)
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
        if format == "peft" and (self.dtype is not None or self.naming != Naming() or self.overwrite):
            raise ValueError(
                "PEFT reads adapters as they were trained, under their names: format 'peft' takes no dtype, patterns "
                "or new names; and it replaces nothing, so choose a path where nothing is"
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
