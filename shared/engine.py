"""What both engines are: one thread that takes batches and runs them, and outlives every failure."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from shared.errors import HeadraceError
from shared.health import EngineHealth
from shared.model.model import Model

log = logging.getLogger(__name__)

Job = TypeVar("Job")


class Engine(ABC, Generic[Job]):
    """Runs batches until there are no more. While layers cannot be read it tries again whenever it is idle."""

    def __init__(self, name: str, model: Model) -> None:
        """Prepares the engine; `name` is its thread's."""
        self._model = model
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def health(self) -> EngineHealth:
        """Whether passes succeed."""
        return self._model.health

    def start(self) -> None:
        """Starts the engine's thread."""
        self.health.watch(self._thread)
        self._thread.start()

    def join(self) -> None:
        """Waits until everything submitted is done; close the scheduler first."""
        self._thread.join()
        self._model.close()

    def _run(self) -> None:
        with torch.inference_mode():
            while (batch := self._next_batch(self.health.retry_s)) is not None:
                try:
                    with self.health.working():
                        try:
                            if batch:
                                self._run_batch(batch)
                            else:
                                self._model.probe()
                        finally:
                            self._model.finish()  # before anybody else is given memory of the batch
                except Exception as error:
                    if not isinstance(error, HeadraceError):
                        log.exception("a pass failed")
                    self._fail(batch, error)
                finally:
                    self._let_go(batch)

    @abstractmethod
    def _next_batch(self, timeout_s: float | None) -> list[Job] | None:
        """Waits for work: none after `timeout_s` without any, None when there will be no more."""

    @abstractmethod
    def _run_batch(self, batch: list[Job]) -> None:
        """Does the work."""

    @abstractmethod
    def _fail(self, batch: list[Job], error: Exception) -> None:
        """Tells everyone in the batch who does not have an answer yet."""

    @abstractmethod
    def _let_go(self, batch: list[Job]) -> None:
        """The batch is over, well or not."""
