"""The document "huggingface" of a checkpoint: names and configs of the models of transformers, for exports without it.

Models are recognized by class names and attributes; transformers is never imported here. The document holds names and
texts, no code, see FORMAT.md. A failure here is a note and does not fail the save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import buffer_slots, non_persistent_buffers
from lightning_shardckpt.compat.torch_tensors import DispatchMode, memory_id
from lightning_shardckpt.compat.transformers import names_not_saved, own_tied_patterns, revert_function
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import check_json_size
from lightning_shardckpt.state.hf_directory import NamedBoxes

# ── names before conversion ───────────────────────────────────────────────────────────────────────────────────────────
# The names of a model's weights in the files of ``from_pretrained``, where they differ from its state dict.
#
# Transformers 5, for instance, keeps all experts of a layer in one parameter, and splits it when it saves. To learn the
# names and shapes, its own function runs here on tensors of the meta device: each result is a box of an entry of the
# state dict.


def original_names(model: nn.Module) -> dict[str, NamedBoxes]:
    """Return the tensors that the entries of a model's state dict become in a file, by name, if they are converted.

    Entries of other pipeline stages are among them.
    """
    revert = revert_function()
    if revert is None:
        return {}
    stand_ins = {
        clean_fqn(name): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in _state(model)
    }
    with _NoCopies():
        reverted = revert(model, dict(stand_ins))
    entries = {memory_id(stand_in): name for name, stand_in in stand_ins.items()}
    parts: dict[str, NamedBoxes] = {}
    for name, tensor in reverted.items():
        entry = entries.get(memory_id(tensor))
        box = _box_of(tensor, tuple(stand_ins[entry].shape)) if entry is not None else None
        if entry is None or box is None:
            raise ValueError(f"{name} is not a part of one entry of the state dict")
        parts.setdefault(entry, []).append([name, *box, list(tensor.shape)])
    unchanged = {name: [[name, [0] * t.ndim, list(t.shape), list(t.shape)]] for name, t in stand_ins.items()}
    return {name: sorted(boxes) for name, boxes in parts.items() if boxes != unchanged[name]}


class _NoCopies(DispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Makes copies views, so that a result tells the stand-in and the box that it is of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _box_of(view: Tensor, shape: Shape) -> tuple[list[int], list[int]] | None:
    """Return start and stop of the box of a contiguous tensor of ``shape`` that a view of it is; None if it is none."""
    strides = torch.empty(shape, device="meta").stride()
    rest, start = int(view.storage_offset()), list[int]()
    for length, stride in zip(shape, strides, strict=True):
        at, rest = divmod(rest, stride) if length else (0, rest)
        start.append(at)
    stop, dim = [at + 1 for at in start], 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        while dim < len(shape) and not _runs_along(shape[dim], strides[dim], length, stride):
            dim += 1
        if dim == len(shape):
            return None
        stop[dim] = start[dim] + length
        dim += 1
    return start, stop


def _runs_along(own_length: int, own_stride: int, length: int, stride: int) -> bool:
    return own_length >= length and (stride == own_stride or length == own_length == 1)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, without calling the hooks of ``state_dict``, which may gather."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in buffer_slots(module).items():
            if buffer is not None and name not in non_persistent_buffers(module):
                yield f"{prefix}.{name}" if prefix else name, buffer


@dataclass(slots=True)
class HuggingFace:
    """Makes the document "huggingface" of modules; looks up the names of a model's weights once. Not thread-safe."""

    _names: WeakKeyDictionary[nn.Module, dict[str, NamedBoxes]] = field(default_factory=WeakKeyDictionary)

    def document(self, module: nn.Module, names: Collection[str] = ()) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Return the document of a module, None if it has no model of transformers; and notes for the user.

        Args:
            module: the saved module, such as a LightningModule.
            names: of the state dict of the whole model, if ``module`` is a pipeline stage.
        """
        notes: list[str] = []
        try:
            models = [self._model(name, model, adapter, names, notes) for name, model, adapter in _models(module)]
            document = {"models": models}
            check_json_size(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), "it")
            return document if models else None, tuple(notes)
        except Exception as error:  # the user's classes run here, and a checkpoint loads without this document, too
            return None, (f"the checkpoint has no Hugging Face config and names of the model: {_message(error)}",)

    def _model(
        self, name: str, model: Any, adapter: str | None, names: Collection[str], notes: list[str]
    ) -> dict[str, Any]:
        prefix = f"{clean_fqn(name)}." if clean_fqn(name) else ""
        kind = class_name(model)
        config = json.loads(model.config.to_json_string())
        told = {"torch_dtype" if "torch_dtype" in config else "dtype": str(model.dtype).removeprefix("torch.")}
        files = {"config.json": _pretty({**config, **told, "architectures": [kind]})}
        generation = getattr(model, "generation_config", None)
        if generation is not None and getattr(model, "can_generate", bool)():
            text = json.loads(generation.to_json_string())
            files["generation_config.json"] = _pretty({k: v for k, v in text.items() if k != "compile_config"})
        here = [n.removeprefix(prefix) for n in names if n.startswith(prefix)] or list(_state_names(model))
        patterns = [re.compile(pattern) for pattern in _tied_patterns(model)]
        return {
            "prefix": prefix,
            "class": kind,
            "adapter": adapter,
            "ties": sorted(n for n in here if any(p.search(n) for p in patterns)),
            "ignored": sorted(names_not_saved(model).intersection(here)),
            "names": self._original(model, notes),
            "files": files,
        }

    def _original(self, model: nn.Module, notes: list[str]) -> dict[str, NamedBoxes]:
        """Return the names of weights in the files of ``from_pretrained``; looked up once per model."""
        if model not in self._names:
            if original_class(model).__module__.partition(".")[0] != "transformers":
                name = class_name(model)
                notes.append(f"the code of {name} is not in the checkpoint: load an export by its from_pretrained")
            try:
                self._names[model] = original_names(model)
            except Exception as error:  # from a version of transformers that works differently
                self._names[model] = {}
                notes.append(
                    f"the names of {class_name(model)}'s weights in files of transformers could not be found, so an "
                    f"export will have the names of its state dict: {_message(error)}"
                )
        return self._names[model]


def original_class(model: Any) -> type:
    """Return the class of a model before FSDP2 replaced it."""
    kinds = type(model).__mro__
    return next(k for k in kinds if all(base.__name__ != "FSDPModule" for base in k.__mro__))


def class_name(model: Any) -> str:
    """Return the name of the class of a model before FSDP2 replaced it."""
    return original_class(model).__name__


def _models(module: nn.Module, name: str = "", adapter: str | None = None) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the outermost models of transformers with their names, and PEFT's prefix of adapters around them."""
    kind: Any = type(module)
    kinds = _kinds(kind)
    if "PreTrainedModel" in kinds and hasattr(getattr(module, "config", None), "to_json_string"):
        yield name, module, adapter
        return
    if "BaseTuner" in kinds:
        adapter = str(getattr(module, "prefix", "")) or "adapter"
    for child_name, child in module.named_children():
        yield from _models(child, f"{name}.{child_name}" if name else child_name, adapter)


@cache
def _kinds(of: Any) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in of.__mro__)


def _state_names(model: nn.Module) -> Iterator[str]:
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        yield clean_fqn(name)


def _tied_patterns(model: nn.Module) -> Iterator[str]:
    """Yield patterns of names that ``save_pretrained`` leaves out if they are tied."""
    for name, module in model.named_modules():
        for pattern in own_tied_patterns(module):
            yield f"{re.escape(clean_fqn(name))}.{pattern}" if name else pattern


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
