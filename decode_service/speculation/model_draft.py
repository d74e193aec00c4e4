"""A model as a draft: a small one with KV of its own, or a low-bit copy of the target that shares the target's KV."""

from __future__ import annotations

import time

from decode_service.choice import choose_next
from decode_service.sequence import Sequence
from decode_service.speculation.draft import DraftKind
from decode_service.warm_up import run_pass
from shared.kv.paged import PagedKeyValues
from shared.limits import CATCH_UP_TOKENS
from shared.model.batch import TokenBatch
from shared.model.model import Model


class ModelDraft:
    """Proposes chains, one token a pass, choosing with the same noise as the target (`decode_service.sampling`).

    A draft with its own pool uses the same block tables as the target. One that shares the target's pool reads the
    verified tokens' keys and values there and writes its own behind them, where verification overwrites them.
    """

    def __init__(self, model: Model, kv: PagedKeyValues, *, shares_target_kv: bool) -> None:
        self.model = model
        self._kv = kv
        self._shares_target_kv = shares_target_kv
        self._passes: list[tuple[int, float]] = []

    @property
    def kind(self) -> DraftKind:
        """See `Draft`."""
        return "self" if self._shares_target_kv else "model"

    def missing(self, sequence: Sequence) -> int:
        """See `ComputingDraft`."""
        return len(sequence.tokens) - self._known_tokens(sequence)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Draft`. The first passes also take in the tokens whose keys and values are missing."""
        proposals: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        wanted = dict(zip(sequences, counts, strict=True))
        contexts = {sequence: self._known_tokens(sequence) for sequence in sequences}
        inputs = {sequence: sequence.tokens[contexts[sequence] :] for sequence in sequences}
        while active := [sequence for sequence in sequences if len(proposals[sequence]) < wanted[sequence]]:
            started_s = time.monotonic()
            chunks = {sequence: inputs[sequence][:CATCH_UP_TOKENS] for sequence in active}
            batch = TokenBatch.of((chunks[sequence], contexts[sequence]) for sequence in active)
            kv = self._kv.for_pass(batch.segments, [sequence.blocks for sequence in active])
            hidden = self.model.forward(batch, kv)
            logits = self.model.logits(hidden[batch.last_rows]).numpy()
            for sequence, row in zip(active, logits, strict=True):
                contexts[sequence] += len(chunks[sequence])
                inputs[sequence] = inputs[sequence][len(chunks[sequence]) :]
                if not inputs[sequence]:
                    token = choose_next(
                        row, sequence.sampling, sequence.tokens, sequence.prompt_tokens, proposals[sequence]
                    )
                    inputs[sequence] = [token]
                    proposals[sequence].append(token)
            self._passes.append((len(batch.token_ids), time.monotonic() - started_s))
        for sequence in sequences:
            sequence.draft_kv_length = contexts[sequence]
        return [proposals[sequence] for sequence in sequences]

    def warm(self, rows: int) -> None:
        """See `ComputingDraft`."""
        run_pass(self.model, self._kv, rows)

    def take_passes(self) -> list[tuple[int, float]]:
        """See `ComputingDraft`."""
        passes, self._passes = self._passes, []
        return passes

    def _known_tokens(self, sequence: Sequence) -> int:
        """Tokens whose keys and values this draft can read: never beyond what the target has verified."""
        if self._shares_target_kv:
            return sequence.kv_length
        return min(sequence.draft_kv_length, sequence.kv_length)
