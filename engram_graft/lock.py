"""A directory that one run at a time may use: the lock goes with its owner, however that ends."""

import gc
import os
import weakref
from pathlib import Path

from engram_graft.errors import UserError


class DirectoryLock:
    """An open directory that can be locked, shared or alone; unlocked when nobody holds the object any more.

    Raises:
        UserError: it cannot be opened, or (from `take`) another process or object has it.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self.number = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{directory}: cannot be used ({error.strerror}); give another directory") from error
        weakref.finalize(self, os.close, self.number)

    def take(self, exclusive: bool) -> None:
        """Lock it: alone, or together with others that only read."""
        import fcntl

        wanted = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        for attempt in (1, 2):
            try:
                fcntl.flock(self.number, wanted)
                return
            except BlockingIOError as error:
                if attempt == 2:
                    raise UserError(f"{self.directory}: in use by another run or another model; give this one its own") from error
                gc.collect()  # a model of this process that nobody has a name for any more may hold it
            except OSError as error:
                raise UserError(
                    f"{self.directory}: cannot be locked ({error.strerror}); give a directory on a local disk"
                ) from error
