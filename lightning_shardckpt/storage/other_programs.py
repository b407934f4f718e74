"""Identification of other programs' checkpoints by file names, with a remedy for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lightning_shardckpt.format.index import is_part
from lightning_shardckpt.system.text import count_text

_READ = "`trainer.fit(ckpt_path=…)`, `load` and `python -m lightning_shardckpt consolidate` read it"
_STEP = re.compile(r"step-\d+")
_WEIGHTS = re.compile(r".+\.safetensors|pytorch_model.*\.bin")

# (pattern of a name in the folder, description of the folder, remedy); the first match counts.
_PROGRAMS = (
    (r"meta\.pt", "a sharded checkpoint of Lightning's FSDPStrategy or ModelParallelStrategy", _READ),
    (r"\.metadata", "a checkpoint of torch.distributed.checkpoint", _READ),
    (
        r"(model\.safetensors|pytorch_model\.bin)(\.index(\..+)?\.json)?",
        "a Hugging Face model directory",
        "`ShardedStrategy(pretrained=…)` and `load` read it",
    ),
    (
        r"zero_to_fp32\.py|global_step\d+|(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt",
        "a checkpoint of DeepSpeed",
        "convert it with the script in it, `python zero_to_fp32.py . OUTPUT --safe_serialization`, and load OUTPUT",
    ),
    (
        r"latest_checkpointed_iteration\.txt|iter_\d{7}",
        "a checkpoint of Megatron-LM",
        "convert it to a Hugging Face model directory with Megatron's tools",
    ),
    (
        r"(pytorch_optim\.bin|optimizer\.safetensors)\.index(\..+)?\.json",
        "an optimizer of ColossalAI's Booster",
        "Booster's weights are read: load the model's directory, and begin with a new optimizer",
    ),
    (
        r"__\d+_\d+\.distcp",
        "an unfinished save of torch.distributed.checkpoint, which TorchTitan and others use: it has no .metadata",
        "load an earlier checkpoint",
    ),
)


def describe_other_program(names: Iterable[str]) -> str | None:
    """Return a predicate that describes a folder of another program and the remedy, or None if it is not recognized.

    Args:
        names: the names of the entries of the folder; files further below may be included, relative to it.

    >>> describe_other_program(["step-9", "step-10/.metadata"])
    'holds 2 folders of steps, as TorchTitan makes; give the path of one of them'
    >>> describe_other_program(["notes.txt"])
    """
    entries = sorted({name.partition("/")[0] for name in names if not is_part(name)})
    for pattern, description, remedy in _PROGRAMS:
        if any(re.fullmatch(pattern, name) for name in entries):
            return f"is {description}, not of lightning-shardckpt; {remedy}"
    if steps := list(filter(_STEP.fullmatch, entries)):
        return f"holds {count_text(len(steps), 'folder')} of steps, as TorchTitan makes; give the path of one of them"
    weights = list(filter(_WEIGHTS.fullmatch, entries))
    if len(weights) == 1:
        return f"holds {weights[0]!r}, but no checkpoint of lightning-shardckpt; give the path of that file"
    if weights:
        return (
            f"holds {len(weights)} files of weights, {weights[0]!r} …, without the index that says which tensor is in "
            "which; put it there (Hugging Face's is model.safetensors.index.json), or give the path of one file"
        )
    return None
