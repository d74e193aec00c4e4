"""The decode engine: draft, verify, accept, again and again, for all running sequences at once."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import torch

from decode_service.sampling import choose_token
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Sequence
from decode_service.speculation.acceptance import accept
from decode_service.speculation.draft import Draft
from shared.errors import HeadraceError
from shared.health import EngineHealth
from shared.kv.paged import PagedKeyValues
from shared.metrics import Telemetry
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.tensors import from_bytes

log = logging.getLogger(__name__)


class DecodeEngine:
    """Runs passes on one thread until the scheduler is closed and empty."""

    def __init__(
        self,
        model: Model,
        kv: PagedKeyValues,
        draft: Draft,
        scheduler: DecodeScheduler,
        telemetry: Telemetry,
        draft_length: int,
    ) -> None:
        """Prepares the engine.

        Args:
            draft_length: most tokens proposed for a sequence in a pass.
        """
        self._model = model
        self._kv = kv
        self._draft = draft
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._draft_length = draft_length
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)

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
            while (batch := self._scheduler.next_batch(self.health.retry_s)) is not None:
                try:
                    with self.health.working():
                        if batch:
                            self._step(batch)
                        else:
                            self._model.probe()
                except Exception as error:
                    self._fail(batch, error)
                finally:
                    self._scheduler.pass_done(batch)

    def _step(self, batch: list[Sequence]) -> None:
        self._choose_first_tokens([sequence for sequence in batch if sequence.last_hidden is not None])
        batch = [sequence for sequence in batch if not sequence.ended]
        if batch:
            proposals = self._draft.propose(batch, [self._draft_limit(sequence) for sequence in batch])
            self._verify(batch, proposals)

    def _choose_first_tokens(self, sequences: list[Sequence]) -> None:
        """The first token needs no pass: its features came with the handoff."""
        for sequence in sequences:
            if sequence.last_hidden is not None:
                hidden = from_bytes(sequence.last_hidden, self._model.dtype)[None]
                sequence.last_hidden = None
                self._extend(sequence, [self._choose(sequence, self._model.logits(hidden), 0)])
                self._telemetry.record_first_token(sequence.first_token_s - sequence.arrived_s)

    def _verify(self, batch: list[Sequence], proposals: list[list[int]]) -> None:
        """One pass over each sequence's last token and its proposal; the target's own choices are kept."""
        started_s, streamed_before = time.monotonic(), self._model.streamed_bytes
        tokens = TokenBatch.of(
            (sequence.tokens[sequence.kv_length :] + proposal, sequence.kv_length)
            for sequence, proposal in zip(batch, proposals, strict=True)
        )
        kv = self._kv.for_pass(tokens.segments, [sequence.blocks for sequence in batch])
        logits = self._model.logits(self._model.forward(tokens, kv))
        accepted_tokens = 0
        for sequence, proposal, segment in zip(batch, proposals, tokens.segments, strict=True):
            chosen = accept(proposal, partial(self._choose, sequence, logits[segment.rows]))
            sequence.kv_length += len(chosen)
            sequence.passes += 1
            sequence.draft_tokens += len(proposal)
            sequence.accepted_tokens += len(chosen) - 1
            accepted_tokens += len(chosen) - 1
            self._extend(sequence, chosen)
        self._telemetry.record_pass(
            time.monotonic() - started_s,
            requests=len(batch),
            streamed_bytes=self._model.streamed_bytes - streamed_before,
            draft_tokens=sum(map(len, proposals)),
            accepted_tokens=accepted_tokens,
        )

    def _extend(self, sequence: Sequence, chosen: list[int]) -> None:
        before = len(sequence.tokens)
        sequence.append(chosen)
        self._telemetry.add(generated_tokens=len(sequence.tokens) - before)

    def _draft_limit(self, sequence: Sequence) -> int:
        """A pass adds one token more than the draft proposes, and the reserved blocks end at max_tokens."""
        return min(self._draft_length, sequence.remaining_tokens - 1)

    @staticmethod
    def _choose(sequence: Sequence, logits: torch.Tensor, row: int) -> int:
        """The target's token at `row` places behind the sequence, from float32 logits [rows, vocab_size]."""
        return choose_token(logits[row].numpy(), sequence.sampling, len(sequence.tokens) + row)

    @staticmethod
    def _fail(batch: list[Sequence], error: Exception) -> None:
        if not isinstance(error, HeadraceError):
            log.exception("a decode pass failed")
        for sequence in batch:
            if not sequence.ended:
                sequence.fail(error)
