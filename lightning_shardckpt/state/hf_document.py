"""The document "huggingface" of a checkpoint: names and configs of the models of transformers, for exports without it.

Models are recognized by class names and attributes; transformers is never imported here. The document holds names and
texts, no code, see FORMAT.md. A failure here is a note and does not fail the save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import buffer_slots, non_persistent_buffers
from lightning_shardckpt.compat.torch_tensors import DispatchMode, memory_id
from lightning_shardckpt.compat.transformers import is_model, names_not_saved, own_tied_patterns, revert_function
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Shape
from lightning_shardckpt.format.value_checks import check_json_size
from lightning_shardckpt.state.documents import CONFIG, CONFIGS
from lightning_shardckpt.state.hf_directory import NamedBoxes

_NAMES: WeakKeyDictionary[nn.Module, dict[str, NamedBoxes]] = WeakKeyDictionary()
"""The results of ``_original_names``, which takes 0.15 s for 32 layers of experts."""


def describe_hugging_face(
    module: nn.Module, names: Collection[str] = ()
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the document of a module, None if it has no model of transformers; and notes for the user.

    Args:
        module: the saved module, such as a LightningModule.
        names: of the state dict of the whole model, if ``module`` is a pipeline stage.
    """
    try:
        document = {"models": [_describe(name, model, adapter, names) for name, model, adapter in _models(module)]}
        check_json_size(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), "it")
    except Exception as error:  # the user's classes run here, and a checkpoint loads without this document, too
        message = f"{type(error).__name__}: {error}"[:300]
        return None, (f"the checkpoint has no Hugging Face config and names of the model: {message}",)
    return document if document["models"] else None, ()


def _describe(name: str, model: Any, adapter: str | None, names: Collection[str]) -> dict[str, Any]:
    prefix = f"{clean_fqn(name)}." if clean_fqn(name) else ""
    # the class before FSDP2 replaced it
    kind = next(k for k in type(model).__mro__ if all(base.__name__ != "FSDPModule" for base in k.__mro__))
    if model not in _NAMES:
        _NAMES[model] = _original_names(model)
    config = json.loads(model.config.to_json_string())
    told = {"torch_dtype" if "torch_dtype" in config else "dtype": str(model.dtype).removeprefix("torch.")}
    files = {CONFIG: _pretty({**config, **told, "architectures": [kind.__name__]})}
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", bool)():
        text = json.loads(generation.to_json_string())
        files[CONFIGS[1]] = _pretty({k: v for k, v in text.items() if k != "compile_config"})
    own = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
    own = own or [clean_fqn(name) for name, _ in _state(model, ties=True)]
    tied = [  # patterns of names that save_pretrained leaves out if they are tied
        (f"{re.escape(clean_fqn(path))}." if path else "") + pattern
        for path, module in model.named_modules()
        for pattern in own_tied_patterns(module)
    ]
    return {
        "prefix": prefix,
        "class": kind.__name__,
        "adapter": adapter,
        "ties": sorted(n for n in own if any(re.search(pattern, n) for pattern in tied)),
        "ignored": sorted(names_not_saved(model).intersection(own)),
        "names": _NAMES[model],
        "files": files,
    }


def _models(module: nn.Module, name: str = "", adapter: str | None = None) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the outermost models of transformers with their names, and PEFT's prefix of adapters around them."""
    if is_model(module) and hasattr(module.config, "to_json_string"):
        yield name, module, adapter
        return
    if any(kind.__name__ == "BaseTuner" for kind in type(module).__mro__):
        adapter = str(getattr(module, "prefix", "")) or "adapter"
    for child_name, child in module.named_children():
        yield from _models(child, f"{name}.{child_name}" if name else child_name, adapter)


def _state(model: nn.Module, *, ties: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, without calling the hooks of ``state_dict``, which may gather."""
    yield from model.named_parameters(remove_duplicate=not ties)
    for prefix, module in model.named_modules(remove_duplicate=not ties):
        for name, buffer in buffer_slots(module).items():
            if buffer is not None and name not in non_persistent_buffers(module):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


# ── names before conversion ───────────────────────────────────────────────────────────────────────────────────────────
# The names of a model's weights in the files of ``from_pretrained``, where they differ from its state dict.
#
# Transformers 5, for instance, keeps all experts of a layer in one parameter, and splits it when it saves. To learn the
# names and shapes, its own function runs here on tensors of the meta device: each result is a box of an entry of the
# state dict.


def _original_names(model: nn.Module) -> dict[str, NamedBoxes]:
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
    """Return start and stop of the box of a contiguous tensor of ``shape`` that a view is; None if it is none."""
    if tuple(view.shape) == shape:
        return [0] * len(shape), list(shape)
    kept = [(length, stride) for length, stride in zip(view.shape, view.stride(), strict=True) if length != 1]
    first = int(view.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in kept)
    dims = list(zip(shape, torch.empty(shape, device="meta").stride(), strict=True))
    start = [first // stride % length for length, stride in dims]
    stop = [last // stride % length + 1 for length, stride in dims]
    strides, count = [stride for _, stride in kept], prod(b - a for a, b in zip(start, stop, strict=True))
    return (start, stop) if count == view.numel() and strides == sorted(strides, reverse=True) else None
