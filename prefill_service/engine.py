"""The prefill engine: takes prompts, walks the layers once, sends each layer's KV as it is done."""

from __future__ import annotations

import time

from torch import Tensor

from prefill_service.scheduler import PromptJob, PromptScheduler
from shared.engine import Engine
from shared.errors import CapacityError
from shared.kv.handoff import KvLayout, PrefillOutcome, frames_of_layer
from shared.kv.prompt import PromptKeyValues
from shared.metrics import Telemetry
from shared.model.batch import TokenBatch
from shared.model.model import Model, Pass
from shared.tensors import to_bytes


class PrefillEngine(Engine[PromptJob]):
    """Runs passes on one thread until the scheduler is closed and empty."""

    def __init__(
        self, model: Model, layout: KvLayout, scheduler: PromptScheduler, telemetry: Telemetry, spool_bytes: int
    ) -> None:
        """Prepares the engine.

        Args:
            spool_bytes: most KV that may wait for slow callers, all together.
        """
        super().__init__("prefill-engine", model)
        self._layout = layout
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._spool_bytes = spool_bytes
        self._unsent: list[PromptJob] = []

    def _next_batch(self, timeout_s: float | None) -> list[PromptJob] | None:
        return self._scheduler.next_batch(timeout_s)

    def _let_go(self, batch: list[PromptJob]) -> None:
        self._scheduler.pass_done(batch)

    def _fail(self, batch: list[PromptJob], error: Exception) -> None:
        for job in batch:
            job.outlet.close(error)

    def _run_batch(self, jobs: list[PromptJob]) -> None:
        """One pass over the layers; each layer's KV leaves as soon as it is computed."""
        started_s, prompts = time.monotonic(), len(jobs)
        current = self._model.begin(TokenBatch.of((job.token_ids, 0) for job in jobs))
        tokens, streamed_before = len(current.hidden), self._model.streamed_bytes
        for layer, weights in self._model.walk():
            jobs = self._drop_cancelled(jobs, current)
            if not jobs:
                break
            kv = PromptKeyValues(current.batch.segments)
            current.compute(layer, weights, kv)
            for job, segment in zip(jobs, current.batch.segments, strict=True):
                self._send_layer(job, layer, *kv.of(segment))
        elapsed_s = time.monotonic() - started_s
        self._telemetry.record_pass(
            elapsed_s,
            requests=prompts,
            streamed_bytes=self._model.streamed_bytes - streamed_before,
            prompt_tokens=sum(len(job.token_ids) for job in jobs if not job.cancelled),
        )
        for job, hidden in zip(jobs, current.last_hidden if jobs else (), strict=True):
            if job.cancelled:
                continue
            queue_ms = (started_s - job.arrived_s) * 1e3
            job.outlet.put(
                PrefillOutcome(to_bytes(hidden), job.frame_count, queue_ms, elapsed_s * 1e3, prompts, tokens)
            )
            job.outlet.close()

    def _send_layer(self, job: PromptJob, layer: int, keys: Tensor, values: Tensor) -> None:
        """Hands one layer's KV to the caller's stream."""
        if job.cancelled:
            return
        new_keys, new_values = (to_bytes(part[job.held_tokens :]) for part in (keys, values))
        for frame in frames_of_layer(self._layout, layer, job.frame_count, new_keys, new_values, job.held_tokens):
            job.outlet.put(frame, frame.size_bytes)
            job.frame_count += 1
        self._unsent = [other for other in self._unsent if other.outlet.pending and other is not job] + [job]
        self._bound_spool()

    def _bound_spool(self) -> None:
        """Where too much KV waits, the caller that is furthest behind loses its request; the others lose nothing."""
        while sum(job.outlet.pending for job in self._unsent) > self._spool_bytes:
            slowest = max(self._unsent, key=lambda job: job.outlet.pending)
            waiting_bytes = slowest.outlet.pending
            slowest.cancelled = True
            slowest.outlet.drop(
                CapacityError(f"{waiting_bytes} bytes of KV wait for a caller that reads too slowly; read faster")
            )
            self._unsent.remove(slowest)

    def _drop_cancelled(self, jobs: list[PromptJob], current: Pass) -> list[PromptJob]:
        kept = self._scheduler.still_wanted(jobs)
        if kept and len(kept) < len(jobs):
            current.keep(kept)
        return [jobs[index] for index in kept]
