"""A device made of host memory that is as slow as a test wants: what was asked for is not done when asking returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from shared.streaming.copies import Event
from shared.tensors import aligned_buffer
from tests.shared.streaming.watched import PATIENCE_S


@dataclass(eq=False)
class Computed:
    """Computing that a test ends when it likes."""

    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.done.wait(PATIENCE_S)


@dataclass(frozen=True)
class Copied:
    future: Future[None]

    def wait(self) -> None:
        self.future.result(PATIENCE_S)


class SlowDevice:
    """Copies on a thread of its own, in their order; computes until a test says that it is done."""

    device = torch.device("cpu")

    def __init__(self, *, computes_slowly: bool = False) -> None:
        self.computes_slowly = computes_slowly
        self.computing: list[Computed] = []
        """What was asked for and is not done."""
        self.asked: SimpleQueue[tuple[Tensor, Event]] = SimpleQueue()
        """Target of every copy, and what it comes after, as it is asked for."""
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.copies: SimpleQueue[bytes] = SimpleQueue()
        """The first bytes of every copy, as it ends."""
        self.fails = False
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="device")

    def host_buffer(self, size_bytes: int) -> Tensor:
        return aligned_buffer(size_bytes)

    def copy(self, source: Tensor, target: Tensor, arrange: Callable[[], None], after: Event) -> Copied:
        if self.fails:
            raise RuntimeError("the device is broken")
        self.asked.put((target, after))
        return Copied(self._stream.submit(self._copy, source, target, arrange, after))

    def record(self) -> Event:
        computed = Computed()
        if self.computes_slowly:
            self.computing.append(computed)
        else:
            computed.done.set()
        return computed

    def order_after(self, event: Event) -> None:
        event.wait()  # a test looks at what arrived, so it must be there

    def finish_computing(self) -> None:
        """What was asked for until now is done."""
        while self.computing:
            self.computing.pop().done.set()

    def close(self) -> None:
        self.finish_computing()
        self._stream.shutdown()

    def _copy(self, source: Tensor, target: Tensor, arrange: Callable[[], None], after: Event) -> None:
        after.wait()
        assert self.may_copy.wait(PATIENCE_S)
        target.copy_(source)
        arrange()
        self.copies.put(target[:64].numpy().tobytes())
