"""The error classes, as one small tree.

    ShardCkptError
    ├── CheckpointNotFoundError  (FileNotFoundError)  no complete checkpoint at this path
    ├── FormatError              (ValueError)         an index or a header breaks FORMAT.md
    ├── CorruptionError          (OSError)            the bytes are not the bytes that were saved
    ├── MismatchError            (RuntimeError)       checkpoint and model (or ranks) differ
    ├── StateError               (TypeError)          state that this format cannot hold
    ├── TopologyError            (ValueError)         sizes, a mesh or a plan that do not fit
    ├── UnsupportedCodeError     (ValueError)         user code that would train something else than on one process
    └── RankError                (RuntimeError)       another rank failed, or did not answer in time

A message says what failed, where (path, FQN, rank), what was expected and found, and what to do.
"""


class ShardCkptError(Exception):
    """The root of the errors about checkpoints, models, topologies and ranks; wrong arguments are plain builtins."""


class CheckpointNotFoundError(ShardCkptError, FileNotFoundError):
    """No complete checkpoint is at this path."""


class FormatError(ShardCkptError, ValueError):
    """An index or a header breaks a rule of FORMAT.md, or is of a newer version."""


class CorruptionError(ShardCkptError, OSError):
    """Stored bytes differ from the bytes that were saved: a checksum, a size or a save id disagrees."""


class MismatchError(ShardCkptError, RuntimeError):
    """The checkpoint and the live objects differ, or the ranks disagree about what to save."""


class StateError(ShardCkptError, TypeError):
    """State that cannot be stored without pickle, or that no layout describes."""


class TopologyError(ShardCkptError, ValueError):
    """Sizes, a mesh, a plan or options that don't fit the world or the model."""


class UnsupportedCodeError(ShardCkptError, ValueError):
    """A step, hook, layer, loader or optimizer that would compute something else here than on one process."""


class RankError(ShardCkptError, RuntimeError):
    """Failure of another rank, or no answer in time; the message names it."""
