"""Whether an engine works: what the health service says, and when a failed engine tries again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import DataLossError, UnavailableError

log = logging.getLogger(__name__)

STALL_S = 120.0
"""An engine whose work brings no new layer for this long hangs."""
RETRY_S = 2.0
"""Pause before an idle engine that has failed reads its layers again."""


class EngineHealth:
    """Follows one engine. The engine's thread reports; any thread asks."""

    def __init__(self) -> None:
        self._working = False
        self._last_progress_s = time.monotonic()
        self._storage_failed = False
        self._thread: threading.Thread | None = None

    def watch(self, thread: threading.Thread) -> None:
        """Names the engine's thread: when it has died, nothing works."""
        self._thread = thread

    @property
    def healthy(self) -> bool:
        """False while weights cannot be read, when work makes no progress, and when the engine is gone."""
        stalled = self._working and time.monotonic() - self._last_progress_s > STALL_S
        gone = self._thread is not None and not self._thread.is_alive()
        return not (stalled or gone or self._storage_failed)

    @property
    def retry_s(self) -> float | None:
        """How long to wait for work before trying to read the layers again; None for ever, while all is well."""
        return RETRY_S if self._storage_failed else None

    def progress(self) -> None:
        """A layer has come."""
        self._last_progress_s = time.monotonic()

    def recovered(self) -> None:
        """Every layer has come: the weights can be read."""
        if self._storage_failed:
            log.info("the weights can be read again")
        self._storage_failed = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around a pass. One that fails because weights cannot be read makes the engine unhealthy until it recovers."""
        self.progress()
        self._working = True
        try:
            yield
        except (DataLossError, UnavailableError) as error:
            if not self._storage_failed:
                log.error("%s; trying again every %g s", error, RETRY_S)
            self._storage_failed = True
            raise
        finally:
            self._working = False
