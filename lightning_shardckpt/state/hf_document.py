"""Record what a module knows about Hugging Face, so that an export needs no transformers.

A ``PreTrainedModel`` is told by its classes' names and what it has; transformers is never imported here. What is found
is a document of the checkpoint, see FORMAT.md: names and texts, nothing that is run. Nothing here fails a save.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

from torch import nn

from lightning_shardckpt.compat.transformers import names_not_saved, own_tied_patterns
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES, check_json_size
from lightning_shardckpt.state.documents import TEXT_BYTES, is_companion
from lightning_shardckpt.state.hf_original_names import original_names
from lightning_shardckpt.state.name_patterns import NamedBoxes

_TEXT_PROCESSORS = ("tokenizer", "processor", "image_processor", "feature_extractor")
_FILES_BYTES = MAX_JSON_BYTES // 2  # of all companions: a reader takes no larger document


@dataclass(slots=True)
class _Kept:
    """A result that was made of an object, with what tells whether the object is still the same."""

    of: Callable[[], Any]
    mark: Any
    value: Any


@dataclass(slots=True)
class HuggingFace:
    """Finds what the modules of a run know, and makes again only what has changed. For one thread at a time."""

    _kept: dict[Any, _Kept] = field(default_factory=dict)

    def document(self, module: nn.Module, names: Collection[str] = ()) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """The document for a module, None if it has no model of transformers; and what a user should know, once.

        Args:
            module: what is saved, such as a LightningModule.
            names: of the state dict of the whole model, where ``module`` is a pipeline stage.
        """
        notes: list[str] = []
        try:
            found = [self._model(name, model, adapter, names, notes) for name, model, adapter in _models(module)]
            if not found:
                return None, ()
            document = {"models": found, "files": self._companions("", module, notes)}
            if sum(map(len, _texts(document))) > _FILES_BYTES:
                notes.append("the tokenizer's files are too large to be saved with the checkpoint; it is saved without")
                document["files"] = {}
                for model in found:
                    model["files"] = {k: v for k, v in model["files"].items() if isinstance(v, str)}
            text = json.dumps(document, separators=(",", ":"), allow_nan=False)
            check_json_size(text.encode(), "it")
            return document, tuple(notes)
        except Exception as error:  # a user's classes run here, and a checkpoint without this loads as well
            return None, (f"what the model knows about Hugging Face is not in the checkpoint: {_said(error)}",)

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
            "files": files | self._companions(name, model, notes),
        }

    def _original(self, model: nn.Module, notes: list[str]) -> Mapping[str, NamedBoxes]:
        """Return what the weights are called in the files of ``from_pretrained``; looked up once per model."""

        def make() -> Any:
            try:
                return original_names(model)
            except Exception as error:  # of a version of transformers that works differently
                notes.append(
                    f"how {class_name(model)}'s weights are named outside of transformers is not in the checkpoint, "
                    f"so that an export has the names of its state dict: {_said(error)}"
                )
                return {}

        found: Mapping[str, NamedBoxes] = self._once(("names", id(model)), model, None, make)
        return found

    def _companions(self, name: str, owner: Any, notes: list[str]) -> dict[str, Any]:
        """The files of the tokenizers that are attributes of a module."""
        found: dict[str, Any] = {}
        for attribute in _TEXT_PROCESSORS:
            one = owner.__dict__.get(attribute)
            if one is None or isinstance(one, nn.Module) or not callable(getattr(one, "save_pretrained", None)):
                continue
            where = f"{name}.{attribute}" if name else attribute

            def make(one: Any = one, where: str = where) -> Any:
                try:
                    return _saved(one, where, notes)
                except Exception as error:  # a class of the user's may do anything
                    notes.append(f"{where}, a {type(one).__name__}, is not in the checkpoint: {_said(error)}")
                    return {}

            found |= self._once(("files", where), one, _mark(one), make)
        return found

    def _once(self, key: Any, of: Any, mark: Any, make: Any) -> Any:
        kept = self._kept.get(key)
        if kept is None or kept.of() is not of or kept.mark != mark:
            self._kept[key] = kept = _Kept(_reference(of), mark, make())
        return kept.value


def _reference(of: Any) -> Callable[[], Any]:
    try:
        return ref(of)
    except TypeError:  # its class has no room for one
        return lambda: of


_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Of a tokenizer of the library tokenizers, what it does before and after its model; each gives its state as JSON."""


def _mark(one: Any) -> Any:
    """Return what differs where a tokenizer has changed; what cannot be compared is equal to nothing."""
    try:
        size, backend = len(one) if hasattr(one, "__len__") else 0, getattr(one, "backend_tokenizer", None)
        steps = (getattr(backend, name, None) for name in _STEPS)
        stated = [step.__getstate__() for step in steps if step is not None]
        return repr(one), str(getattr(one, "chat_template", None)), size, stated
    except Exception:  # a class of the user's may do anything
        return object()


def class_name(model: Any) -> str:
    """The class of a model as it was before FSDP2 made one of its own of it."""
    kinds = type(model).__mro__
    return next(k.__name__ for k in kinds if all(base.__name__ != "FSDPModule" for base in k.__mro__))


def _models(module: nn.Module, name: str = "", adapter: str | None = None) -> Iterator[tuple[str, Any, str | None]]:
    """The outermost models of transformers with their names, and the prefix of adapters' names that PEFT put there."""
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
    """Patterns of names that ``save_pretrained`` leaves out where they are tied."""
    for name, module in model.named_modules():
        for pattern in own_tied_patterns(module):
            yield f"{re.escape(clean_fqn(name))}.{pattern}" if name else pattern


def _saved(one: Any, where: str, notes: list[str]) -> dict[str, Any]:
    """The files that a tokenizer writes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        one.save_pretrained(folder)
        for parent, _, names in os.walk(folder):
            for name in sorted(names):
                path = os.path.join(parent, name)
                relative = os.path.relpath(path, folder).replace(os.sep, "/")
                if not is_companion(relative):
                    notes.append(f"{relative}, of {where}, is not in the checkpoint: it is no file that is only data")
                    continue
                with open(path, "rb") as file:
                    found[relative] = packed(file.read())
    return found


def packed(content: bytes) -> Any:
    """Return a file as the document holds it: short texts as they are, the rest compressed."""
    try:
        text = content.decode()
        if len(content) <= TEXT_BYTES:
            return text
    except UnicodeDecodeError:
        pass
    return {"zlib": base64.b64encode(zlib.compress(content)).decode(), "bytes": len(content)}


def _texts(document: Mapping[str, Any]) -> Iterator[str]:
    for files in (document["files"], *(model["files"] for model in document["models"])):
        yield from (one if isinstance(one, str) else one["zlib"] for one in files.values())


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
