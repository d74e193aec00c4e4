"""The decode engine: draft, verify, accept, again and again, for all running sequences at once."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from decode_service.choice import choose_next
from decode_service.scheduler import DecodeScheduler
from decode_service.sequence import Sequence
from decode_service.speculation.acceptance import accept
from decode_service.speculation.proposer import Proposer
from decode_service.text.output import Emission
from decode_service.turn import Turn, turns
from decode_service.warm_up import MostRows, run_pass, warm_up
from shared.engine import Engine
from shared.errors import HeadraceError
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.logprobs import token_logprobs
from shared.metrics import Telemetry
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.tensors import from_bytes

log = logging.getLogger(__name__)


class DecodeEngine(Engine[Sequence]):
    """Warms up, and then runs passes on one thread until the scheduler is closed and empty."""

    def __init__(
        self,
        model: Model,
        kv: PagedKeyValues,
        proposer: Proposer,
        scheduler: DecodeScheduler,
        telemetry: Telemetry,
        prompt_tokens: int,
        warm_rows: MostRows | None = None,
    ) -> None:
        """Prepares the engine.

        Args:
            proposer: drafts, and learns from what is accepted.
            prompt_tokens: most tokens of prompts computed here in a pass.
            warm_rows: sizes up to which passes are run before the first request; None: none are.
        """
        super().__init__("decode-engine", model)
        self._kv = kv
        self._proposer = proposer
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._prompt_tokens = prompt_tokens
        self._warm_rows = warm_rows
        self._warm = threading.Event()

    def wait_until_warm(self) -> None:
        """Returns when the passes before the first request are over, well or not: health tells."""
        self._warm.wait()

    def _run(self) -> None:
        try:
            if self._warm_rows:
                self._warm_up(self._warm_rows)
        finally:
            self._warm.set()
        super()._run()

    def _warm_up(self, most: MostRows) -> None:
        """On the engine's thread, as passes are: threads and memory that they use are those of later ones."""
        started_s = time.monotonic()
        try:
            with torch.inference_mode(), self.health.working():
                warm_up(partial(run_pass, self._model, self._kv), most.target, self._proposer.passed)
                self._proposer.warm_up(most.draft)
                self._model.finish()
        except Exception as error:
            # What cannot be read now may be readable later: the engine tries again, and its health says so meanwhile.
            if not isinstance(error, HeadraceError):
                log.exception("warming up failed")
        log.info("warmed up in %.1f s", time.monotonic() - started_s)

    def _next_batch(self, timeout_s: float | None) -> list[Sequence] | None:
        return self._scheduler.next_batch(timeout_s)

    def _let_go(self, batch: list[Sequence]) -> None:
        self._scheduler.pass_done(batch)

    def _fail(self, batch: list[Sequence], error: Exception) -> None:
        for sequence in batch:
            if not sequence.ended:
                sequence.fail(error)

    def _run_batch(self, batch: list[Sequence]) -> None:
        """Draft, verify, accept."""
        self._choose_handed_off(batch)
        living = turns((sequence for sequence in batch if not sequence.ended), self._prompt_tokens)
        if living:
            self._run_pass(self._propose(living))

    def _choose_handed_off(self, batch: list[Sequence]) -> None:
        """After a handoff the next token needs no pass: its features came with the keys and values."""
        for sequence in batch:
            if sequence.last_hidden is not None:
                hidden = from_bytes(sequence.last_hidden, self._model.dtype)[None]
                sequence.last_hidden = None
                logits = self._model.logits(hidden)
                sequence.emit(self._extend(sequence, [self._choose(sequence, logits, [], 0)], logits))

    def _propose(self, living: list[Turn]) -> list[Turn]:
        drafting = [turn.sequence for turn in living if turn.drafts]
        beside = [len(turn.tokens) for turn in living if not turn.drafts]
        # A pass adds one token more than the draft proposes, and neither may go beyond max_tokens or the blocks.
        rooms = [min(sequence.remaining_tokens - 1, _room(sequence)) for sequence in drafting]
        proposals = dict(zip(drafting, self._proposer.propose(drafting, rooms, beside), strict=True))
        return [turn.proposing(proposals.get(turn.sequence, [])) for turn in living]

    def _run_pass(self, living: list[Turn]) -> None:
        """One pass over all that is missing and proposed; the target's own choices are kept."""
        started_s, streamed_before = time.monotonic(), self._model.streamed_bytes
        batch = TokenBatch.of((turn.inputs, turn.sequence.kv_length) for turn in living)
        kv = self._kv.for_pass(batch.segments, [turn.sequence.blocks for turn in living])
        hidden = self._model.forward(batch, kv)
        scores = self._scores(hidden, batch, living)
        advances = [self._advance(turn, logits) for turn, logits in zip(living, scores, strict=True)]
        elapsed_s = time.monotonic() - started_s
        self._proposer.passed(len(batch.token_ids), elapsed_s)
        self._telemetry.record_pass(
            elapsed_s,
            requests=len(living),
            streamed_bytes=self._model.streamed_bytes - streamed_before,
            draft_tokens=sum(len(turn.proposal) for turn in living),
            accepted_tokens=sum(accepted for accepted, _ in advances),
        )
        # Last, so that whoever has the whole answer finds it in the totals.
        for turn, (_, emission) in zip(living, advances, strict=True):
            if emission is not None:
                turn.sequence.emit(emission)

    def _scores(self, hidden: Tensor, batch: TokenBatch, living: list[Turn]) -> list[Tensor]:
        """Each turn's logits, [scored, vocab_size]: for all turns in one product."""
        ends = [segment.rows.stop for segment in batch.segments]
        rows = [range(end - turn.scored, end) for turn, end in zip(living, ends, strict=True)]
        needed = hidden[[row for part in rows for row in part]]
        return list(self._model.logits(needed).split([len(part) for part in rows]))

    def _advance(self, turn: Turn, logits: Tensor) -> tuple[int, Emission | None]:
        """Moves a sequence on by what the pass computed for it.

        Returns:
            How many draft tokens were accepted, and what is new for the reader.
        """
        sequence = turn.sequence
        chosen = (
            accept(turn.proposal, partial(self._choose, sequence, logits, turn.proposal)) if turn.reaches_end else []
        )
        accepted = max(0, len(chosen) - 1)
        sequence.passes += 1
        sequence.kv_length += len(turn.tokens) + accepted
        self._proposer.verified(sequence, chosen)
        sequence.draft_tokens += len(turn.proposal)
        sequence.accepted_tokens += accepted
        return accepted, self._extend(sequence, chosen, logits) if chosen else None

    def _extend(self, sequence: Sequence, chosen: list[int], logits: Tensor) -> Emission:
        """Adds the tokens chosen from the first rows of logits, [rows, vocab_size], as far as the answer goes."""
        before = sequence.generated_tokens
        emission = sequence.append(chosen)
        if sequence.top_logprobs is not None:
            logprobs = token_logprobs(logits.numpy(), emission.token_ids, sequence.top_logprobs)
            emission = replace(emission, logprobs=logprobs)
        self._telemetry.add(generated_tokens=sequence.generated_tokens - before)
        if not before:
            self._telemetry.record_first_token(sequence.first_token_s - sequence.arrived_s)
        return emission

    @staticmethod
    def _choose(sequence: Sequence, logits: Tensor, proposal: list[int], row: int) -> int:
        """The target's token after the sequence and `proposal[:row]`, from float32 logits [rows, vocab_size]."""
        return choose_next(
            logits[row].numpy(), sequence.sampling, sequence.tokens, sequence.prompt_tokens, proposal[:row]
        )


def _room(sequence: Sequence) -> int:
    """Tokens that its blocks hold beyond those that there are."""
    return len(sequence.blocks) * BLOCK_TOKENS - len(sequence.tokens)
