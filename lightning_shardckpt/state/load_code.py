"""Which modules run code of their own when their state dict is loaded, and what of a load that code must see.

torch's ``load_state_dict`` asks hooks and overridden methods, which may change, rename, drop or add entries before they
are in the module, or make something of them afterwards. Stored tensors that such code sees are not read into the module
but beside it; then torch's own ``load_state_dict`` of the module is called. All others are filled in place, and are
entries of that call that copy nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_shardckpt.compat.torch_modules import code_before, has_code_after, has_own_load
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn


@dataclass(frozen=True, slots=True)
class LoadCode:
    """The modules that have such code, each as what stands before the canonical names of its entries.

    Attributes:
        before: with code that sees entries before they are loaded.
        of_libraries: with such code of torch, transformers or PEFT, which does something only where what is stored has
            other names or shapes than the module: ``BatchNorm`` without a count of batches, quantization that has seen
            no data.
        after: with hooks that run afterwards.
    """

    before: tuple[str, ...] = ()
    of_libraries: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> LoadCode:
        """Return that of modules, given by what stands before the names of each."""
        before, of_libraries, after = list[str](), list[str](), list[str]()
        for start, root in modules.items():
            if has_own_load(root):
                before.append(start)
            for name, module in root.named_modules(remove_duplicate=False):
                prefix = start + clean_fqn(f"{name}." if name else "")
                origins = code_before(module)
                if origins:
                    (before if "user" in origins else of_libraries).append(prefix)
                if has_code_after(module):
                    after.append(prefix)
        return cls(tuple(before), tuple(of_libraries), tuple(after))

    def scopes(self, stored: Mapping[str, Shape], live: Mapping[str, Shape], elsewhere: Collection[str]) -> Scopes:
        """Return whose entries code sees, of those of which something is stored.

        Args:
            stored: shapes of all entries by name.
            live: the same of the modules.
            elsewhere: names of entries that only other pipeline stages have.
        """
        differing = {name for name in {*stored, *live} if stored.get(name) != live.get(name)} - {*elsewhere}
        seen = [prefix for prefix in self.of_libraries if any(name.startswith(prefix) for name in differing)]
        return Scopes({prefix for prefix in (*self.before, *seen) if any(name.startswith(prefix) for name in stored)})


NO_CODE = LoadCode()


class Scopes:
    """A test of names: whether they are of one of some modules.

    >>> [Scopes({"a.b."})(name) for name in ("a.b.c", "a.bc")], Scopes({""})("a"), Scopes(())("a")
    ([True, False], True, False)
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(prefixes)

    def __call__(self, name: str) -> bool:
        return name.startswith(self._prefixes)

    def __bool__(self) -> bool:
        return bool(self._prefixes)


@dataclass(slots=True)
class ForCode:
    """The part of a load that is left to ``load_state_dict`` of the modules; names are canonical.

    Attributes:
        is_needed: whether some code would do something.
        entries: by stored name, what is not in the module yet; on the meta device what only other stages have, and what
            no module has.
        absent: names of the model's entries that nothing is stored for.
        kept: names of entries that are to stay as they are, which code is not shown.
        versions: of modules, see ``module_versions``.
    """

    is_needed: bool = False
    entries: dict[str, Any] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    versions: Mapping[str, Any] | None = None
