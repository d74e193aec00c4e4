"""What the prompts of a pass need not compute: prefixes of earlier prompts, and of each other. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_service.scheduler import PromptJob
from shared.blocks import BlockPool
from shared.errors import CapacityError
from shared.prefix_cache import PrefixCache


@dataclass(eq=False)
class PassPrompt:
    """One prompt in a pass: what it reads, what it computes, and where that stays."""

    job: PromptJob
    table: list[int]
    """Blocks of its leading tokens: first those that others have filled or fill in this pass, then those it fills."""
    reused: int
    """Blocks of the first kind."""
    context: int
    """Tokens in them."""
    count: int
    """Tokens computed behind them; 0 once it has left the pass."""

    @property
    def own(self) -> list[int]:
        """Blocks of the second kind."""
        return self.table[self.reused :]


class PromptCache:
    """Complete blocks of prompts, kept for prompts to come. Used by one thread, for one pass at a time.

    A block is known, and found by other prompts of the same pass, from the moment that a prompt is to fill it. So it is
    forgotten again when that does not happen.
    """

    def __init__(self, pool: BlockPool, model_digest: str) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool, model_digest)
        self._prompts: list[PassPrompt] = []

    @property
    def block_count(self) -> int:
        """Blocks in all."""
        return self._pool.block_count

    @property
    def blocks_cached(self) -> int:
        """Blocks that prompts to come may use. Any thread may ask."""
        return self._pool.used_count

    def known_tokens(self, job: PromptJob) -> int:
        """Leading tokens that a pass which began now would not compute for a prompt, at least."""
        return self._cache.known_tokens(job.token_ids, job.cache_salt) if _reuses(job) else 0

    def begin(self, jobs: Sequence[PromptJob]) -> list[PassPrompt]:
        """Finds for each prompt what is known or comes in this pass before it, and blocks for what it adds."""
        # Held until the last prompt has its blocks: what one needs makes no room for another.
        held = [self._cache.match(job.token_ids, job.cache_salt) for job in jobs if _reuses(job)]
        self._prompts = [self._prompt(job) for job in jobs]
        for table in held:
            self._pool.release(table)
        return list(self._prompts)

    def drop_cancelled(self) -> None:
        """Takes prompts out that nobody waits for, but for the tokens that others of the pass build on."""
        needed: set[int] = set()
        for prompt in reversed(self._prompts):
            if prompt.job.cancelled:
                self._shorten(prompt, needed)
            needed.update(prompt.table[: prompt.reused])
        self._prompts = [prompt for prompt in self._prompts if prompt.count]

    def end(self, *, filled: bool) -> None:
        """The pass is over; blocks that it has not filled are forgotten."""
        for prompt in self._prompts:
            if not filled:
                self._cache.forget(prompt.own)
            self._pool.release(prompt.table)
        self._prompts = []

    def check_integrity(self) -> None:
        """Raises BlockIntegrityError unless every block is free, known, or held by a prompt of the pass."""
        self._pool.check_integrity([self._cache.blocks, *(prompt.table for prompt in self._prompts)])

    def _prompt(self, job: PromptJob) -> PassPrompt:
        if not _reuses(job):
            return PassPrompt(job, [], 0, 0, len(job.token_ids))
        table = self._cache.match(job.token_ids, job.cache_salt)
        reused, size = len(table), self._pool.block_tokens
        # The block of the last token would never be found by the same prompt again.
        table += self._allocate((len(job.token_ids) - 1) // size - reused)
        self._cache.insert(job.token_ids, job.cache_salt, table)
        return PassPrompt(job, table, reused, reused * size, len(job.token_ids) - reused * size)

    def _allocate(self, most: int) -> list[int]:
        """As many blocks as there are, the first ones of a prompt being worth most."""
        try:
            return self._cache.allocate(most)
        except CapacityError:
            return self._cache.allocate(self._cache.free_count)

    def _shorten(self, prompt: PassPrompt, needed: set[int]) -> None:
        """Leaves a prompt only the tokens of its own blocks up to the last that is needed, or nothing."""
        kept = max((index + 1 for index, block in enumerate(prompt.own) if block in needed), default=0)
        if prompt.own[kept:]:
            self._cache.forget(prompt.own[kept:])
        kept_blocks = prompt.reused + kept if kept else 0
        self._pool.release(prompt.table[kept_blocks:])
        del prompt.table[kept_blocks:]
        prompt.count = kept * self._pool.block_tokens


def _reuses(job: PromptJob) -> bool:
    """Scores need every token computed."""
    return job.top_logprobs is None
