"""An ordinary LightningCLI.

    python examples/train.py fit --config configs/transformer.yaml --config configs/fsdp2_tp2.yaml

The strategy and the CheckpointIO are named in the YAML files in configs/. Exit status 75 (``EX_TEMPFAIL``) says that
SIGTERM has ended the run before it was done; examples/slurm.sh requeues its job then.
"""

from __future__ import annotations

import os
import sys
import warnings

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from text import ByteTransformer, PythonDocs


def main() -> None:
    # Lightning's own use of a deprecated name of torch; and advice that is pointless for tensors in memory.
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
    try:
        LightningCLI(ByteTransformer, PythonDocs)
    except SIGTERMException:
        sys.exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()
