"""An ordinary LightningCLI.

    python examples/train.py fit --config configs/transformer.yaml --config configs/fsdp2_tp2.yaml

The strategy and the CheckpointIO are named in the YAML files in configs/.
"""

from __future__ import annotations

import warnings

from lightning.pytorch.cli import LightningCLI
from text import ByteTransformer, PythonDocs


def main() -> None:
    # Lightning's own use of a deprecated name of torch; and advice that is pointless for tensors in memory.
    warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
    warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
    LightningCLI(ByteTransformer, PythonDocs)


if __name__ == "__main__":
    main()
