"""Where missing keys and values are computed: on a prefill replica, or in decode's own passes."""

from __future__ import annotations

import logging
import time
from enum import Enum

from decode_service.prefill_client import PrefillClient
from decode_service.sequence import Sequence
from decode_service.short_prompts import ShortPrompts
from shared.errors import HeadraceError, UnavailableError
from shared.kv.handoff import PrefillOutcome
from shared.kv.paged import PagedKeyValues

log = logging.getLogger(__name__)


class LocalPrefill(Enum):
    """Which prompts decode computes itself. What it holds of one already does not count to its length."""

    NEVER = "never"
    """None; where all but a last token is held, that token is in the next pass like any other last token."""
    SHORT = "short"
    """Short ones (`decode_service.short_prompts`): they ride along in a pass that runs anyway."""
    FALLBACK = "fallback"
    """Short ones, and any when no prefill replica answers."""
    ALWAYS = "always"
    """All: one process on one machine, where one read of a layer serves prompts and drafts together."""


class Prompts:
    """Gets prompts computed."""

    def __init__(
        self, local: LocalPrefill, short: ShortPrompts, client: PrefillClient | None, kv: PagedKeyValues
    ) -> None:
        """Without a client every prompt is computed here.

        Args:
            short: says which prompts count as short; told of each handoff.
        """
        self._local = local if client else LocalPrefill.ALWAYS
        self._short = short
        self._client = client
        self._kv = kv

    async def compute(self, sequence: Sequence, timeout_s: float | None) -> PrefillOutcome | None:
        """Fills an admitted sequence's blocks by a handoff; None when what is missing is left to decode's passes.

        A sequence that was preempted is computed here when it cannot be handed off: its loss was decode's doing.

        Raises:
            HeadraceError: as `PrefillClient.prefill`.
        """
        if self._client is None or self._computes_here(sequence):
            return None
        missing, started_s = len(sequence.tokens) - sequence.kv_length, time.monotonic()
        try:
            outcome = await self._client.prefill(
                sequence.request_id,
                sequence.tokens,
                lambda layer, first, keys, values: self._kv.write(sequence.blocks, layer, first, keys, values),
                timeout_s,
                priority=sequence.priority,
                held_tokens=sequence.kv_length,
                cache_salt=sequence.cache_salt,
            )
        except HeadraceError as error:
            falls_back = self._local is LocalPrefill.FALLBACK and isinstance(error, UnavailableError)
            if not (falls_back or sequence.preemptions):
                raise
            # Quoted: a name that its client chose must not look like lines of its own.
            log.warning("computing what request %r lacks here: %s", sequence.request_id, error)
            return None
        self._short.handed_off(missing, time.monotonic() - started_s)
        return outcome

    def _computes_here(self, sequence: Sequence) -> bool:
        missing = len(sequence.tokens) - sequence.kv_length
        if self._local is LocalPrefill.ALWAYS or (missing == 1 and sequence.kv_length > 0):
            return True
        return self._local is not LocalPrefill.NEVER and self._short.is_short(missing)
