"""The private names of torch and Lightning that this package uses, and its changes of their behavior at run time.

Takes their objects. Nothing here knows checkpoints. Support of a new version of torch or Lightning begins in this room.
Importing it needs torch, and refuses unsupported versions.
"""

from lightning_shardckpt.compat.supported_versions import require_supported_versions

require_supported_versions()
