"""A folder for the sockets of one front, that only this user can enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

_PREFIX = "jaxpaged-sockets-"
_MAX_LENGTH = 80  # characters: the path of a Unix socket may have about a hundred
_SECONDS_TO_LOCK = 60.0  # a younger folder may be about to be locked


class PrivateFolder:
    """A new one, with mode 0700. Those that killed processes of this user have left are removed.

    Attributes:
      path: of the folder.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) + len(_PREFIX) + 10 > _MAX_LENGTH:
            parent = Path("/tmp")
        _remove_left(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the system frees it when this process ends, however that happens

    def remove(self) -> None:
        """Removes it and the sockets in it. Does nothing the second time."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def _remove_left(parent: Path) -> None:
    """Removes folders that no process has locked."""
    for folder in parent.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # it is another user's, or in use, or has just gone
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _SECONDS_TO_LOCK:
                _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Removes what a front and its cores make there, and no more: a folder that holds anything else stays."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.sock"):
            path.unlink()
        folder.rmdir()
