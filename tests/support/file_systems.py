"""File systems of one kind or another, whatever the tests run on."""

from __future__ import annotations

from lightning_shardckpt.storage.local.posix import FileSystem

OF_ONE_MACHINE = FileSystem(locks_bind_everybody=lambda directory: True)
OF_MANY_MACHINES = FileSystem(locks_bind_everybody=lambda directory: False)
WITHOUT_FLAGS = FileSystem(
    locks_bind_everybody=lambda directory: True, rename_at_once=lambda source, target, flag: False
)
"""It renames, but neither exchanges two names nor refuses to replace one."""
