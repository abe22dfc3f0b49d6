"""Reading rows before they are needed: addresses follow from the ids alone, so disk and computation can run side by side.

Only for tables in files; what is read ahead changes nothing but what the page cache holds.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any


@functools.cache
def _reader(process: int) -> concurrent.futures.ThreadPoolExecutor:
    # one thread: it only asks the system for pages and does not wait for them (measured: a third of the CPU time of 8 that wait)
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engram-read-ahead")


def in_background(work: Callable[..., None], *args: Any) -> None:
    """Call `work(*args)` on the reading thread; returns at once. An error there is logged with its traceback."""
    reader = _reader(os.getpid())  # threads do not survive a fork
    reader.submit(work, *args).add_done_callback(_raise)


def _raise(task: concurrent.futures.Future[Any]) -> None:
    if not task.cancelled():
        task.result()
