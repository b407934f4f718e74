"""The private names of torch and Lightning that this package uses, and its changes of their behavior at run time.

In come objects of theirs. Nothing here knows checkpoints. A new version of torch or Lightning is one room to look at.
Whoever imports a module of this room needs torch, in a version that is supported: others are refused here.
"""

from lightning_shardckpt.compat.supported_versions import require_supported_versions

require_supported_versions()
