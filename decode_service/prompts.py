"""Where a prompt is computed: on a prefill replica, or in decode's own passes."""

from __future__ import annotations

import logging
from enum import Enum

from decode_service.prefill_client import PrefillClient
from decode_service.sequence import Sequence
from shared.errors import UnavailableError
from shared.kv.handoff import PrefillOutcome
from shared.kv.paged import PagedKeyValues

log = logging.getLogger(__name__)


class LocalPrefill(Enum):
    """Which prompts decode computes itself."""

    NEVER = "never"
    SHORT = "short"
    """Short ones: they ride along in a pass that runs anyway."""
    FALLBACK = "fallback"
    """Short ones, and any when no prefill replica answers."""
    ALWAYS = "always"
    """All: one process on one machine, where one read of a layer serves prompts and drafts together."""


class Prompts:
    """Gets prompts computed."""

    def __init__(
        self, local: LocalPrefill, short_tokens: int, client: PrefillClient | None, kv: PagedKeyValues
    ) -> None:
        """Without a client every prompt is computed here.

        Args:
            short_tokens: the longest prompt that counts as short.
        """
        self._local = local if client else LocalPrefill.ALWAYS
        self._short_tokens = short_tokens
        self._client = client
        self._kv = kv

    async def compute(self, sequence: Sequence, timeout_s: float | None) -> PrefillOutcome | None:
        """Fills an admitted sequence's blocks by a handoff; None when its prompt is to be computed in decode's passes.

        Raises:
            HeadraceError: as `PrefillClient.prefill`.
        """
        if self._client is None or self._computes_here(sequence):
            return None
        try:
            return await self._client.prefill(
                sequence.request_id,
                sequence.tokens,
                lambda layer, first, keys, values: self._kv.write(sequence.blocks, layer, first, keys, values),
                timeout_s,
            )
        except UnavailableError as error:
            if self._local is not LocalPrefill.FALLBACK:
                raise
            log.warning("computing the prompt of request %s here: %s", sequence.request_id, error)
            return None

    def _computes_here(self, sequence: Sequence) -> bool:
        if self._local in (LocalPrefill.SHORT, LocalPrefill.FALLBACK):
            return sequence.prompt_tokens <= self._short_tokens
        return self._local is LocalPrefill.ALWAYS
