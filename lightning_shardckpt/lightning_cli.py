"""``ShardedCLI``: a LightningCLI that takes a model's hyper-parameters from a sharded checkpoint, too."""

from __future__ import annotations

import os

from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from lightning_shardckpt.from_checkpoint import stored_hyper_parameters
from lightning_shardckpt.storage.router import file_path


class ShardedCLI(LightningCLI):
    """A LightningCLI that takes hyper-parameters from every ``--ckpt_path``: LightningCLI does so from single files.

    As in LightningCLI, hyper-parameters of the checkpoint override the command line. A subclass with a
    ``before_instantiate_classes`` of its own must call this one's.
    """

    @override
    def before_instantiate_classes(self) -> None:
        """Put the hyper-parameters that a directory or URL in ``--ckpt_path`` has into the config."""
        subcommand = self.config.get("subcommand")
        given = self.config[subcommand] if subcommand else {}
        path = file_path(given.get("ckpt_path") or "")
        if not (os.path.isdir(path) or "://" in path):
            return
        hyper = stored_hyper_parameters(path, weights_only=given.get("weights_only") is not False)
        hyper.pop("_instantiator", None)
        if "_class_path" in hyper:
            hyper = {"class_path": hyper.pop("_class_path"), "dict_kwargs": hyper}
        if hyper:
            self.config = self.parser.parse_object({subcommand: {"model": hyper}}, self.config)
