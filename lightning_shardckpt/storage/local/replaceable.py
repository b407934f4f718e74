"""Check that what a save would replace is nothing that somebody would miss."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from lightning_shardckpt.format.index import ROOT_NAME


def check_replaceable(target: str) -> None:
    """Raise unless nothing is at ``target``, or an empty directory, a checkpoint of ours or a link.

    Raises:
        FileExistsError: for anything else.
        OSError: if no file system would take the name.
    """
    there = check_name(target)
    if there is None:
        return
    if stat.S_ISLNK(there.st_mode):  # such as ModelCheckpoint's "last": the link is replaced, not what it names
        return
    if not stat.S_ISDIR(there.st_mode):
        raise FileExistsError(
            f"a file is in the way at {target!r}: a sharded checkpoint is a directory; move it or use another path"
        )
    with suppress(FileNotFoundError):  # it was removed since
        strange = os.listdir(target) and not os.path.exists(os.path.join(target, ROOT_NAME))
        if strange and os.path.samestat(there, os.lstat(target)):  # it was there all the time
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of ours, so it is not "
                "replaced; move it or use another path"
            )


def check_name(path: str) -> os.stat_result | None:
    """Return what is known of what is at a path, None if nothing is.

    Raises:
        OSError: saying so if the name is too long; making something there would fail only at the end.
    """
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # making the parent says which one is a file
        return None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        length = len(os.fsencode(os.path.basename(path)))
        problem = f"a name of {length} bytes in a path of {len(os.fsencode(path))} is too long for this file system"
        raise OSError(errno.ENAMETOOLONG, problem + "; shorten it", path) from None
