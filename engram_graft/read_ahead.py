"""Reading rows before they are needed: addresses follow from the ids alone, so disk and computation can run side by side.

Only for tables in files. A reader changes nothing but what the page cache holds.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

THREADS = 8  # a read waits for the disk, not for a core
CHUNK = 256  # rows at a time: too few for torch to start threads of its own


@functools.cache
def _pool(process: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="engram-read-ahead")


def read_ahead(read: Callable[[Tensor], object], rows: Tensor) -> None:
    """Call `read` with all of `rows`, in pieces, on other threads; returns at once. An error there is logged."""
    pool = _pool(os.getpid())  # threads do not survive a fork
    for first in range(THREADS):
        pool.submit(_read, read, rows[first::THREADS]).add_done_callback(_raise)


def _read(read: Callable[[Tensor], object], rows: Tensor) -> None:
    for piece in rows.unique().split(CHUNK):
        read(piece)


def _raise(task: concurrent.futures.Future[Any]) -> None:
    if not task.cancelled():
        task.result()  # an error is logged with its traceback
