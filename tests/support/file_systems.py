"""File systems of one kind or another, whatever the tests run on."""

from __future__ import annotations

from lightning_shardckpt.storage.local.posix import FileSystem

OF_ONE_MACHINE = FileSystem(has_global_locks=lambda directory: True)
OF_MANY_MACHINES = FileSystem(has_global_locks=lambda directory: False)
WITHOUT_FLAGS = FileSystem(has_global_locks=lambda directory: True, rename_with_flag=lambda source, target, flag: False)
"""It renames, but neither exchanges two names nor refuses to replace one."""
