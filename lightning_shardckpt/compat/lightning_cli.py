"""Private names of LightningCLI: where it takes a model's hyper-parameters from the checkpoint of ``--ckpt_path``.

Checked with Lightning 2.6.6; LightningCLI of 2.5 takes none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def take_hyper_parameters(cli: Any, of_checkpoint: Callable[[str, bool], dict[str, Any]]) -> None:
    """Let LightningCLI take hyper-parameters from every ``ckpt_path``, as it does from those that are a single file.

    Relies on ``LightningCLI._parse_ckpt_path``, which does nothing for a directory. As there, hyper-parameters of the
    checkpoint go before those of the command line.

    Args:
        cli: the class, whose method is replaced.
        of_checkpoint: returns the hyper-parameters of what is at a path or URL, empty if it has none; also gets
            ``weights_only``, which the command line may say.
    """
    original = getattr(cli, "_parse_ckpt_path", None)
    if original is None:
        return

    def parse(self: Any) -> None:
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or os.path.isfile(path) or not (os.path.isdir(path) or "://" in str(path)):
            original(self)
            return
        found = of_checkpoint(os.fspath(path), self.config[subcommand].get("weights_only") is not False)
        found.pop("_instantiator", None)
        if "_class_path" in found:
            found = {"class_path": found.pop("_class_path"), "dict_kwargs": found}
        if found:
            self.config = self.parser.parse_object({subcommand: {"model": found}}, self.config)

    cli._parse_ckpt_path = parse
