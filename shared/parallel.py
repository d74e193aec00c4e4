"""Work on tensors that is cut into independent parts, on all cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
    """The results of all parts, in order; the first error is raised. Each core works on a part of its own.

    Torch's own threads share each operation, and wait for each other after it: on short operations, or beside other
    load, that takes longer than the operations.
    """
    return list(_pool().map(work, parts))


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads in which torch uses no others. That is a setting of each thread, but also what later ones begin with."""
    workers, threads = os.cpu_count() or 1, torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "parallel", _work_alone)
    started = threading.Barrier(workers + 1)
    for _ in range(workers):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(threads)
    return pool


def _work_alone() -> None:
    torch.get_num_threads()  # the first call in a thread takes over the common setting, and must come before
    torch.set_num_threads(1)
