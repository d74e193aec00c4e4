"""The prefill engine: takes prompts, walks the layers once, sends each layer's KV as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from prefill_service.prompt_cache import PassPrompt, PromptCache
from prefill_service.scheduler import PromptJob, PromptScheduler
from prefill_service.scores import scores_of_text
from shared.blocks import BlockPool
from shared.engine import Engine
from shared.kv.handoff import KvLayout, PrefillOutcome, frames_of_layer, tokens_per_frame
from shared.kv.paged import PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.logprobs import ScoreOutcome
from shared.metrics import Telemetry
from shared.model.batch import TokenBatch
from shared.model.model import Model, Pass
from shared.tensors import to_bytes


@dataclass(frozen=True)
class _PassFigures:
    """What every answer of a pass reports of it."""

    started_s: float
    elapsed_s: float
    prompts: int
    tokens: int
    """Computed in its first layer."""


class PrefillEngine(Engine[PromptJob]):
    """Runs passes on one thread until the scheduler is closed and empty."""

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        scheduler: PromptScheduler,
        telemetry: Telemetry,
        cache: PromptCache | None = None,
    ) -> None:
        """Prepares the engine.

        Args:
            cache: of prompts' blocks; without one, or with one that has none, every prompt is computed as a whole.
        """
        super().__init__("prefill-engine", model)
        self._layout = layout
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._cache = cache or PromptCache(BlockPool(0), "")
        blocks = self._cache.block_count
        self._pool = PagedKeyValues(model.spec, model.dtype, blocks, model.device) if blocks else None

    def _next_batch(self, timeout_s: float | None) -> list[PromptJob] | None:
        return self._scheduler.next_batch(timeout_s, self._cache.known_tokens)

    def _let_go(self, batch: list[PromptJob]) -> None:
        self._scheduler.pass_done(batch)

    def _fail(self, batch: list[PromptJob], error: Exception) -> None:
        for job in batch:
            job.outlet.close(error)

    def check_integrity(self) -> None:
        """Raises BlockIntegrityError unless every block of the idle engine is free or kept for prompts to come."""
        self._cache.check_integrity()

    def _run_batch(self, jobs: list[PromptJob]) -> None:
        """One pass over the layers; each layer's KV leaves as soon as it is computed."""
        started_s, streamed_before = time.monotonic(), self._model.streamed_bytes
        filled = False
        try:
            prompts = self._cache.begin(jobs)
            current = self._model.begin(TokenBatch.of((p.job.token_ids[p.context :], p.context) for p in prompts))
            tokens = len(current.hidden)
            prompts = self._walk(prompts, current)
            filled = True
        finally:
            self._cache.end(filled=filled)
        self._scheduler.still_wanted(jobs)
        figures = _PassFigures(started_s, time.monotonic() - started_s, len(jobs), tokens)
        waiting = [prompt for prompt in prompts if not prompt.job.cancelled]
        self._telemetry.record_pass(
            figures.elapsed_s,
            requests=len(jobs),
            streamed_bytes=self._model.streamed_bytes - streamed_before,
            prompt_tokens=sum(prompt.count for prompt in waiting),
        )
        self._telemetry.add(cached_tokens=sum(prompt.context for prompt in waiting))
        hidden = {prompt: current.hidden[s.rows] for prompt, s in zip(prompts, current.batch.segments, strict=False)}
        # Scores last: they take time, and the others have all they need.
        for prompt in sorted(waiting, key=lambda prompt: prompt.job.top_logprobs is not None):
            if prompt.job.top_logprobs is None:
                self._answer(prompt, hidden[prompt], figures)
            else:
                self._answer_scores(prompt.job, hidden[prompt], figures)

    def _walk(self, prompts: list[PassPrompt], current: Pass) -> list[PassPrompt]:
        """Takes the prompts through all layers; returns those that are in the pass to its end."""
        kv = self._key_values(prompts, current)
        for layer, weights in self._model.walk():
            self._scheduler.still_wanted([prompt.job for prompt in prompts])
            self._cache.drop_cancelled()
            counts = [prompt.count for prompt in prompts]
            if not any(counts):
                return []
            if counts != [segment.count for segment in current.batch.segments]:
                current.keep(counts)
                prompts = [prompt for prompt in prompts if prompt.count]
                kv = self._key_values(prompts, current)
            current.compute(layer, weights, kv)
            for prompt, segment in zip(prompts, current.batch.segments, strict=True):
                if prompt.job.top_logprobs is None and not prompt.job.cancelled:
                    self._send_layer(prompt.job, layer, partial(kv.of, segment))
            kv.clear()
        return prompts

    def _key_values(self, prompts: list[PassPrompt], current: Pass) -> PromptKeyValues:
        return PromptKeyValues(current.batch.segments, self._pool, [prompt.table for prompt in prompts])

    def _send_layer(self, job: PromptJob, layer: int, read: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
        """Hands one layer's KV of the tokens that the caller does not hold to its stream.

        Args:
            read: keys and values of a range of tokens; asked for frame by frame, so that no whole copy is ever there.
        """
        total, step = len(job.token_ids), tokens_per_frame(self._layout)
        for first in range(job.held_tokens, total, step):
            keys, values = (to_bytes(part) for part in read(first, min(first + step, total)))
            for frame in frames_of_layer(self._layout, layer, job.frame_count, keys, values, first):
                job.outlet.put(frame, frame.size_bytes)
                job.frame_count += 1

    @staticmethod
    def _answer(prompt: PassPrompt, hidden: Tensor, figures: _PassFigures) -> None:
        """Ends a prompt's stream with what its last token came to.

        Args:
            hidden: the last layer's output for the tokens that were computed, [tokens, hidden_size].
        """
        job = prompt.job
        job.outlet.put(
            PrefillOutcome(
                last_hidden=to_bytes(hidden[-1]),
                frame_count=job.frame_count,
                queue_ms=(figures.started_s - job.arrived_s) * 1e3,
                compute_ms=figures.elapsed_s * 1e3,
                batch_prompts=figures.prompts,
                batch_tokens=figures.tokens,
                cached_tokens=prompt.context,
            ),
            0,  # small; and what ends a stream must not be what fails it
        )
        job.outlet.close()

    def _answer_scores(self, job: PromptJob, hidden: Tensor, figures: _PassFigures) -> None:
        """Ends a text's stream with its scores.

        Args:
            hidden: the last layer's output for every token, [tokens, hidden_size].
        """
        for scores in scores_of_text(self._model, job.token_ids, hidden, job.top_logprobs or 0):
            if not self._scheduler.still_wanted([job]):
                return
            job.outlet.put(scores, scores.size_bytes)
            self.health.progress()
        queue_ms, compute_ms = (figures.started_s - job.arrived_s) * 1e3, (time.monotonic() - figures.started_s) * 1e3
        job.outlet.put(ScoreOutcome(queue_ms, compute_ms, figures.prompts, figures.tokens), 0)
        job.outlet.close()
