"""The error classes. A message names the failure, the place (path, FQN, rank), expected and found, and the remedy."""


class ShardCkptError(Exception):
    """Base class of errors about checkpoints, models, topologies and ranks. Wrong arguments raise builtin errors."""


class CheckpointNotFoundError(ShardCkptError, FileNotFoundError):
    """There is no complete checkpoint at this path."""


class FormatError(ShardCkptError, ValueError):
    """An index or a header breaks a rule of FORMAT.md, or has a newer format version."""


class CorruptionError(ShardCkptError, OSError):
    """Stored bytes differ from the bytes that were saved: a checksum, a size or a save id does not match."""


class MismatchError(ShardCkptError, RuntimeError):
    """The checkpoint and the live objects differ, or the ranks disagree about the state to save."""


class StateError(ShardCkptError, TypeError):
    """A state can't be stored without pickle, or no layout describes it."""


class TopologyError(ShardCkptError, ValueError):
    """Sizes, a mesh, a plan or options don't fit the world or the model."""


class UnsupportedCodeError(ShardCkptError, ValueError):
    """A step, hook, layer, loader or optimizer would compute another result here than on one process."""


class RankError(ShardCkptError, RuntimeError):
    """Another rank failed, or did not answer in time; the message names it."""
