"""Keep code out of what torch.compile compiles, and see through the modules that it makes.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.compat.module_class import is_compiled

set_frame_callback: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Set what looks at the frames of Python in this thread, None for nothing; returns what did before.

While a compiled function runs, that is what compiles the functions that it calls. Relies on the callback being a state
of the thread, and on its return value being accepted as an argument later.
"""


def skip_folders(folders: Iterable[str]) -> None:
    """Let torch.compile run functions of these folders as they are; it compiles what they call.

    Does nothing while ``torch._dynamo`` is not imported, which takes long, and without which nothing is compiled.
    Relies on ``trace_rules.SKIP_DIRS``, and on the regular expression that is made of it.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    known = dynamo.trace_rules.SKIP_DIRS
    missing = [folder for folder in folders if folder not in known]
    if missing:
        known.extend(missing)
        dynamo.trace_rules._recompile_re()


def not_compiled() -> AbstractContextManager[Any]:
    """A context in which compiled functions run as they were, and nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def has_compiled(root: nn.Module) -> bool:
    """Return whether ``root``, or a module inside it, is compiled, in place or by a wrapper."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(is_compiled(m) or compiled_from(m) is not None for m in root.modules())


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` wrapped to make this one; None if it made none of it.

    Relies on the class name, so that ``torch._dynamo`` need not be imported to ask.
    """
    if type(module).__name__ != "OptimizedModule":
        return None
    found = module._orig_mod
    assert isinstance(found, nn.Module)
    return found
