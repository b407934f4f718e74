"""Models of transformers, and adapters of PEFT: their names and configurations in the files of these libraries.

A save describes live models in the documents "huggingface" and "peft", which hold names and texts, no code, so that an
export needs neither the models nor the libraries; see FORMAT.md. Models are recognized by their class or attributes.
Neither torch, transformers nor PEFT is imported here.

PEFT puts a model below ``base_model.model``, a module that gets an adapter below ``base_layer``, and a module that is
trained as a whole below ``original_module``, beside a copy for each adapter in ``modules_to_save``. PEFT's files omit
the name of the adapter: ``….lora_A.default.weight`` becomes ``….lora_A.weight``. A module that PEFT wrapped is
recognized by its ``peft_config``. Source: PEFT 0.21, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import Box, Shape, find_cover_error
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.format.value_checks import TORCH_NAMES, check_json_size, parse_json, shown
from lightning_shardckpt.state.documents import CONFIG, CONFIGS, ROOT

if TYPE_CHECKING:
    from torch import Tensor, nn

# ── transformers ──────────────────────────────────────────────────────────────────────────────────────────────────────

NamedBoxes: TypeAlias = "list[list[Any]]"
"""The tensors that one entry of a state dict becomes: name, start and stop of the box, and shape of each."""

CONFIG_DTYPES = {name: TORCH_NAMES[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")}
"""Names of floating dtypes in a config, by their names in safetensors."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


def list_tensors(
    model: Mapping[str, Any],
    keys: Mapping[str, str],
    component: Component,
    output_dtype: Callable[[str], str] = str,
    *,
    refuses_adapters: bool = False,
) -> Iterator[OutputTensor]:
    """Yield tensors as ``save_pretrained`` writes them: without names that the model ties.

    A tensor that another module tied is written under each name. Tensors of other modules are left out.

    Args:
        model: an item of the document "huggingface".
        keys: of stored tensors of the component, by name.
        component: of the tensors.
        output_dtype: returns the written dtype of a stored one.
        refuses_adapters: raise a ValueError for tensors of adapters; else they are left out.

    Raises:
        FormatError: if the document's boxes do not tile a tensor.
    """
    names, adapter, prefix = dict[str, list[str]](), model["adapter"], model["prefix"]
    for name, key in keys.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own in model["ignored"]:
            continue
        if not (adapter and any(part.startswith(adapter) for part in own.split("."))):
            names.setdefault(key, []).append(own)
        elif refuses_adapters:
            raise ValueError(
                f"the model has an adapter of PEFT, such as {own!r}, which is not merged into its weights: "
                "merge it before saving (merge_and_unload), or leave it out for the base model alone: "
                rf"--key_mapping '\.{adapter}=null'"
            )
    for key, own_names in names.items():
        spec = component.tensors[key]
        for name in [name for name in own_names if name not in model["ties"]] or [max(own_names)]:
            name = name.replace(".base_layer.", ".") if adapter else name
            yield from _parts(model, OutputTensor(name, output_dtype(spec.dtype), spec.shape, ("model", key)))


def _parts(model: Mapping[str, Any], tensor: OutputTensor) -> Iterator[OutputTensor]:
    """Yield the tensors of a file for ``from_pretrained`` that a tensor becomes; it may be renamed and split."""
    unchanged = [[tensor.name, [0] * len(tensor.shape), tensor.shape, tensor.shape]]
    parts: NamedBoxes = model["names"].get(tensor.name, unchanged)
    boxes = [Box(tuple(start), tuple(stop)) for _, start, stop, _ in parts]
    sizes = [(box.numel, prod(part[-1])) for box, part in zip(boxes, parts, strict=True)]
    if find_cover_error(tensor.shape, boxes) is not None or any(a != b for a, b in sizes):
        raise FormatError(f"huggingface.json: the parts of {tensor.name!r}, {tensor.shape}, do not tile it")
    for (name, _, _, shape), box in zip(parts, boxes, strict=True):
        whole = box == Box.whole(tensor.shape)
        yield OutputTensor(name, tensor.dtype, tuple(shape), tensor.source, None if whole else box)


def config_files(model: Mapping[str, Any], dtype: str | None, converted: bool) -> dict[str, bytes]:
    """Return the configs beside the weights of an item of the document "huggingface".

    ``dtype`` is that of all weights, by its name in safetensors, None if they differ; it replaces the config's if
    weights were converted to it.
    """
    files = {name: text.encode() for name, text in model["files"].items() if name in CONFIGS}
    config = json.loads(files[CONFIG])
    if dtype in CONFIG_DTYPES and (converted or not any(key in config for key in _DTYPE_KEYS)):
        _set_dtype(config, CONFIG_DTYPES[dtype])
    return {**files, CONFIG: (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()}


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a config, and of nested configs that have one."""
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, dtype))
    for inner in config.values():
        if isinstance(inner, dict) and any(key in inner for key in _DTYPE_KEYS):
            _set_dtype(inner, dtype)


def pick_model(document: Mapping[str, Any] | None, names: Collection[str]) -> Mapping[str, Any] | None:
    """Return the document's only model that has a tensor among the names; None if the document has no models.

    Raises:
        ValueError: listing the models, if not exactly one has.
    """
    models: list[Mapping[str, Any]] = document["models"] if document is not None else []
    chosen = [model for model in models if any(name.startswith(model["prefix"]) for name in names)]
    if models and len(chosen) != 1:
        listed = ", ".join(f"{model['class']} under {model['prefix']!r}" for model in models)
        example = {f"^{re.escape(models[0]['prefix'])}": None}
        problem = f"leave out all but one by the key_mapping of consolidate, such as {example}"
        raise ValueError(f"the checkpoint has the models {listed}; {problem if chosen else 'all are left out'}")
    return chosen[0] if chosen else None


_NAMES: WeakKeyDictionary[nn.Module, dict[str, NamedBoxes]] = WeakKeyDictionary()
"""The results of ``_original_names``, which takes 0.15 s for 32 layers of experts."""


def describe_hugging_face(
    module: nn.Module, names: Collection[str] = ()
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the document of a module, None if it has no model of transformers; and notes for the user.

    ``names`` are those of the state dict of the whole model, if ``module`` is a pipeline stage.
    """
    try:
        document = {"models": [_describe(name, model, adapter, names) for name, model, adapter in _models(module)]}
        check_json_size(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), "it")
    except Exception as error:  # the user's classes run here, and a checkpoint loads without this document, too
        message = f"{type(error).__name__}: {error}"[:300]
        return None, (f"the checkpoint has no Hugging Face config and names of the model: {message}",)
    return document if document["models"] else None, ()


def _describe(name: str, model: Any, adapter: str | None, names: Collection[str]) -> dict[str, Any]:
    from lightning_shardckpt.compat.transformers import names_not_saved, own_tied_patterns  # imports torch

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
    from lightning_shardckpt.compat.transformers import is_model  # imports torch

    if is_model(module) and hasattr(module.config, "to_json_string"):
        yield name, module, adapter
        return
    if any(kind.__name__ == "BaseTuner" for kind in type(module).__mro__):
        adapter = str(getattr(module, "prefix", "")) or "adapter"
    for child_name, child in module.named_children():
        yield from _models(child, f"{name}.{child_name}" if name else child_name, adapter)


def _state(model: nn.Module, *, ties: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, without calling the hooks of ``state_dict``, which may gather."""
    from lightning_shardckpt.compat.torch_modules import buffer_slots, non_persistent_buffers  # imports torch

    yield from model.named_parameters(remove_duplicate=not ties)
    for prefix, module in model.named_modules(remove_duplicate=not ties):
        for name, buffer in buffer_slots(module).items():
            if buffer is not None and name not in non_persistent_buffers(module):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _original_names(model: nn.Module) -> dict[str, NamedBoxes]:
    """Return the tensors that the entries of a model's state dict become in a file, by name, if they are converted.

    Transformers 5, for instance, keeps all experts of a layer in one parameter, and splits it when it saves. Its own
    function runs here on tensors of the meta device: each result is a box of an entry.
    """
    import torch  # an export works without it

    from lightning_shardckpt.compat.torch_tensors import copies_are_views, memory_id
    from lightning_shardckpt.compat.transformers import revert_function

    revert = revert_function()
    if revert is None:
        return {}
    stand_ins = {
        clean_fqn(name): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in _state(model)
    }
    with copies_are_views():
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


def _box_of(view: Tensor, shape: Shape) -> tuple[list[int], list[int]] | None:
    """Return start and stop of the box of a contiguous tensor of ``shape`` that a view is; None if it is none."""
    if tuple(view.shape) == shape:
        return [0] * len(shape), list(shape)
    kept = [(length, stride) for length, stride in zip(view.shape, view.stride(), strict=True) if length != 1]
    first = int(view.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in kept)
    dims = [(length, max(1, prod(shape[dim + 1 :]))) for dim, length in enumerate(shape)]
    start = [first // stride % length for length, stride in dims]
    stop = [last // stride % length + 1 for length, stride in dims]
    strides, count = [stride for _, stride in kept], prod(b - a for a, b in zip(start, stop, strict=True))
    return (start, stop) if count == view.numel() and strides == sorted(strides, reverse=True) else None


# ── PEFT ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_EMBEDDINGS = ("embed_tokens", "lm_head")  # EMBEDDING_LAYER_NAMES
_BASE_LAYER = ".base_layer."
_TENSOR = re.compile(r"((?:.*?\.)?)(lora_[^.]+|modules_to_save|trainable_tokens_delta)\.([^.]+)((?:\..*)?)")


def added_names(live_names: Collection[str]) -> frozenset[str]:
    """Return the names that PEFT's layers add to the names of the wrapped layers.

    >>> sorted(added_names(["q.base_layer.weight", "q.lora_A.default.weight", "norm.weight"]))
    ['q.lora_A.default.weight']
    """
    owners = {name.partition(_BASE_LAYER)[0] for name in live_names if _BASE_LAYER in name}
    beside = (name for name in live_names if owners and _BASE_LAYER not in name)
    return frozenset(n for n in beside if any(m in owners for m in accumulate(n.split("."), lambda a, b: f"{a}.{b}")))


def _adapter_and_name(name: str) -> tuple[str, str] | None:
    """Return the adapter of a tensor, and its name in PEFT's files; None for a tensor of no adapter.

    >>> _adapter_and_name("base_model.model.q_proj.lora_A.default.weight")
    ('default', 'base_model.model.q_proj.lora_A.weight')
    >>> _adapter_and_name("base_model.model.head.modules_to_save.default.dense.weight")
    ('default', 'base_model.model.head.dense.weight')
    """
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    before, kind, adapter, after = match.groups()
    if kind == "modules_to_save":
        return adapter, before + after[1:]
    return adapter, before + kind + ("" if kind == "lora_magnitude_vector" else after)


def _names_in_file(names: Collection[str], adapter: str) -> dict[str, str]:
    """Return the name in a model by name in PEFT's files of the tensors of an adapter."""
    found = ((name, _adapter_and_name(name)) for name in names)
    return {short[1]: name for name, short in found if short is not None and short[0] == adapter}


def live_names_in_file(live_names: Collection[str]) -> dict[str, str]:
    """Return the name in the model by name in PEFT's files of the tensors of an adapter; biases have their own names.

    Of several adapters it is the one that PEFT loads a file into by default.

    >>> live_names_in_file(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.bias"])
    {'base_model.model.q.lora_A.weight': 'base_model.model.q.lora_A.default.weight'}
    """
    adapters = {found[0] for found in map(_adapter_and_name, live_names) if found is not None}
    adapter = "default" if "default" in adapters else next(iter(adapters)) if len(adapters) == 1 else None
    return {} if adapter is None else _names_in_file(live_names, adapter)


def stored_names(adapter: Mapping[str, str], stored: Collection[str]) -> dict[str, str]:
    """Return the stored name by name in PEFT's file of all tensors of ``PeftModel.save_pretrained``, sorted.

    ``adapter`` is an item of the document "peft", ``stored`` the names of the model's tensors.

    Raises:
        FormatError: for a kind of adapter whose file layout is not implemented.
    """
    name, prefix = adapter["name"], adapter["prefix"]
    settings = parse_json(adapter["config"].encode(), f"the configuration of adapter {name!r}")
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        raise FormatError(
            f"adapter {name!r} is of kind {shown(kind)}; only LORA is exported in PEFT's layout. Load the "
            "checkpoint into the model and call save_pretrained of PEFT."
        )
    local = {one.removeprefix(prefix): one for one in stored if one.startswith(prefix)}
    names = _names_in_file(local, name)
    if settings.get("bias") == "all":  # the base model's, trained in place
        names |= {one: one for one in local if one.endswith(".bias") and _adapter_and_name(one) is None}
    elif settings.get("bias") == "lora_only":
        names |= {one: one for one in local if one.endswith(".base_layer.bias")}
    if settings.get("trainable_token_indices") is None:  # PEFT saves embeddings that may have been resized
        adapted = (one for one in local if one.partition(_BASE_LAYER)[0].rpartition(".")[2] in _EMBEDDINGS)
        names |= {one: one for one in adapted if _BASE_LAYER in one}
    return {adapter["root"] + one: local[names[one]] for one in sorted(names)}


def wrapped_models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost models that PEFT wrapped, or put adapters into, each after the prefix of its names."""
    outermost = tuple[str, ...]()
    for name, sub in module.named_modules():
        prefix = f"{clean_fqn(name)}." if name else ""
        if not prefix.startswith(outermost) and isinstance(getattr(sub, "peft_config", None), dict):
            outermost += (prefix,)
            yield prefix, sub


def describe_adapters(module: nn.Module) -> list[dict[str, str]]:
    """Return the adapters of each model in ``module`` that PEFT wrapped, or put adapters into, for the document "peft".

    "prefix" is that of the wrapped model's names, "root" is to add in PEFT's files: a PeftModel's names have it.
    """
    adapters = []
    for prefix, wrapped in wrapped_models(module):
        root = "" if "base_model" in wrapped._modules else ROOT
        for name in wrapped.peft_config:
            adapters.append({"name": name, "prefix": prefix, "root": root, "config": _config_text(wrapped, name)})
    return adapters


def _config_text(wrapped: Any, adapter: str) -> str:
    """Return the ``adapter_config.json`` of PEFT's ``save_pretrained``, with sets sorted."""
    settings: dict[str, Any] = wrapped.peft_config[adapter].to_dict()
    settings = {key: sorted(v) if isinstance(v, set | frozenset) else v for key, v in settings.items()}
    model = wrapped.base_model.model if "base_model" in wrapped._modules else wrapped
    if settings.get("base_model_name_or_path") is None:
        settings["base_model_name_or_path"] = vars(model).get("name_or_path") or None
    if settings.get("task_type") is None:
        kind = type(model)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    settings["inference_mode"] = True
    try:
        return json.dumps(settings, indent=2, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StateError(f"the configuration of adapter {adapter!r} cannot be written as JSON: {error}") from error


def adapter_tensors(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return the names among ``names``, canonical names of a module's tensors, that belong to an adapter."""
    inside = tuple(prefix for prefix, _ in wrapped_models(module))
    return frozenset(name for name in names if inside and name.startswith(inside) and _adapter_and_name(name))


def alters_base(wrapped: Any) -> bool:
    """Return whether the initialization of an adapter changed the weights that it adapts, as in PiSSA."""
    ways = (getattr(config, "init_lora_weights", True) for config in wrapped.peft_config.values())
    return any(way not in (True, False, "gaussian", "eva", "orthogonal") for way in ways)


def made_from_base(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return the names of adapters' tensors whose first values PEFT computes from the base model's: DoRA, PiSSA, …."""
    altered = any(alters_base(wrapped) for _, wrapped in wrapped_models(module))
    parts = (".lora_magnitude_vector.", ".trainable_tokens_delta.", *((".lora_A.",) if altered else ()))
    return sorted(name for name in names if any(part in name for part in parts))
