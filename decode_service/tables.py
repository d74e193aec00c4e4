"""Which KV blocks each sequence holds: taken as it grows, shared where sequences begin alike. Plain Python.

Nothing but complete blocks is ever shared, and a sequence writes only behind its `kv_length`, where no complete block
lies: so a block with two owners is never written, and none has to be copied first. `check_integrity` confirms it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as AnySequence

from decode_service.sequence import Sequence
from shared.blocks import BlockIntegrityError, BlockPool
from shared.errors import InvalidRequestError
from shared.prefix_cache import PrefixCache


class BlockTables:
    """The block tables of all sequences that hold any. Not thread safe: the scheduler's lock is around every call."""

    def __init__(
        self, pool: BlockPool, model_digest: str, *, overcommit: float = 1.0, shares_prefixes: bool = True
    ) -> None:
        """Starts with an empty pool.

        Args:
            overcommit: blocks that admitted sequences may all together still grow to, as a multiple of what there is;
                1.0 admits nobody who could run out.
            shares_prefixes: false computes every prompt from its first token.
        """
        self._pool = pool
        self._cache = PrefixCache(pool, model_digest)
        self._overcommit = overcommit
        self._shares_prefixes = shares_prefixes
        self._sequences: set[Sequence] = set()
        self._owners: Counter[int] = Counter()
        """Block -> sequences that hold it."""
        self._drafted: set[int] = set()
        """Blocks that a draft model's own pool holds completely too."""

    @property
    def held_count(self) -> int:
        """Blocks that sequences hold."""
        return len(self._owners)

    @property
    def free_count(self) -> int:
        """Blocks that can be had: nobody holds them, or only the cache."""
        return self._pool.block_count - len(self._owners)

    @property
    def cached_count(self) -> int:
        """Blocks that are kept for prompts to come, and given up when memory is needed."""
        return self._pool.used_count - len(self._owners)

    def require_possible(self, sequence: Sequence) -> None:
        """Raises InvalidRequestError if a sequence could not even grow up alone."""
        if self._pool.blocks_for(sequence.most_tokens) > self._pool.block_count:
            most = self._pool.block_count * self._pool.block_tokens
            raise InvalidRequestError(
                f"prompt and max_tokens make {sequence.most_tokens} tokens, this server's KV memory holds {most}; "
                "ask for less or give the service a larger budget"
            )

    def admit(self, sequence: Sequence, *, overcommits: bool) -> bool:
        """Gives a sequence blocks for all tokens that it has, starting with those that hold its longest known prefix.

        There must be one block more for everybody who may still grow: whoever is admitted is not preempted at once.
        A sequence that is alone always fits.

        Args:
            overcommits: false admits it only if nobody could run out.

        Returns:
            Whether it fitted; if not, nothing has changed.
        """
        shared = self._match(sequence)
        if not self._fits(sequence, shared, (), overcommits):
            self._give_back(shared)
            return False
        sequence.blocks = shared + self._take(self._pool.blocks_for(len(sequence.tokens)) - len(shared))
        sequence.kv_length = len(shared) * self._pool.block_tokens
        sequence.draft_kv_length = self._drafted_tokens(shared)
        sequence.findable_blocks = len(shared)
        self._sequences.add(sequence)
        return True

    def fewest_victims(
        self, sequence: Sequence, candidates: AnySequence[Sequence], *, overcommits: bool
    ) -> AnySequence[Sequence] | None:
        """The first few of the candidates without whom the sequence would fit; None if it would not without any."""
        shared = self._match(sequence)
        try:
            for count in range(len(candidates) + 1):
                if self._fits(sequence, shared, candidates[:count], overcommits):
                    return candidates[:count]
            return None
        finally:
            self._give_back(shared)

    def cover(self, sequence: Sequence, tokens: int) -> bool:
        """Grows a table until it holds that many tokens; false, and nothing has changed, where blocks are missing."""
        missing = self._pool.blocks_for(tokens) - len(sequence.blocks)
        if missing > self.free_count:
            return False
        self._grow(sequence, missing)
        return True

    def stretch(self, sequence: Sequence, tokens: int) -> None:
        """Grows a table towards that many tokens as far as there are blocks."""
        self._grow(sequence, min(self._pool.blocks_for(tokens) - len(sequence.blocks), self.free_count))

    def trim(self, sequence: Sequence) -> None:
        """Takes blocks back that were given for drafts and are not needed for the tokens that there are."""
        needed = self._pool.blocks_for(sequence.needed_tokens)
        self._give_back(sequence.blocks[needed:])
        del sequence.blocks[needed:]

    def filled(self, sequence: Sequence) -> None:
        """Keys and values have been added: those of its prompt's complete blocks can be found from now on."""
        self._note_drafted(sequence)
        complete = min(sequence.kv_length, sequence.prompt_tokens) // self._pool.block_tokens
        if complete > sequence.findable_blocks:
            self._remember(sequence, complete * self._pool.block_tokens)
            sequence.findable_blocks = complete

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Takes all blocks of a sequence back; its complete ones can still be found, until others need them.

        Args:
            forget: nothing that it has computed may be found again.
        """
        if forget:
            self._cache.forget(sequence.blocks)
        else:
            self._note_drafted(sequence)
            self._remember(sequence, sequence.kv_length)
        self._give_back(sequence.blocks)
        sequence.blocks = []
        sequence.kv_length = sequence.draft_kv_length = 0
        self._sequences.discard(sequence)

    def check_integrity(self) -> None:
        """Compares counts, tables and the cache.

        Raises:
            BlockIntegrityError: a block is leaked, has other owners than tables say, or is shared and could be written.
        """
        tables = [sequence.blocks for sequence in self._sequences]
        self._pool.check_integrity([*tables, self._cache.blocks])
        if self._owners != Counter(block for table in tables for block in table):
            raise BlockIntegrityError("owners are counted otherwise than tables hold blocks")
        for sequence in self._sequences:
            writable = sequence.blocks[sequence.kv_length // self._pool.block_tokens :]
            if shared := [block for block in writable if self._pool.reference_count(block) > 1]:
                raise BlockIntegrityError(f"blocks {shared} are shared and may yet be written")

    def _fits(
        self, sequence: Sequence, shared: AnySequence[int], gone: Collection[Sequence], overcommits: bool
    ) -> bool:
        """Whether there is room for a sequence that holds its shared blocks already, once others are gone."""
        theirs = Counter(block for other in gone for block in other.blocks)
        held = self.held_count - sum(self._owners[block] == count for block, count in theirs.items())
        growth = [self._growth(other) for other in self._sequences if other not in gone]
        at_first = self._pool.blocks_for(len(sequence.tokens)) - len(shared)
        at_most = self._pool.blocks_for(sequence.most_tokens) - len(shared)
        growing = sum(blocks > 0 for blocks in growth) + (at_most > at_first)
        limit = self._pool.block_count * (self._overcommit if overcommits else 1.0)
        return at_first + growing <= self._pool.block_count - held and held + sum(growth) + at_most <= limit

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that it may still come to need."""
        return self._pool.blocks_for(sequence.most_tokens) - len(sequence.blocks)

    def _match(self, sequence: Sequence) -> list[int]:
        if not self._shares_prefixes:
            return []
        blocks = self._cache.match(sequence.tokens, sequence.cache_salt)
        self._owners.update(blocks)
        return blocks

    def _remember(self, sequence: Sequence, tokens: int) -> None:
        if self._shares_prefixes:
            self._cache.insert(sequence.tokens[:tokens], sequence.cache_salt, sequence.blocks)

    def _note_drafted(self, sequence: Sequence) -> None:
        """A draft model's own keys and values are good for as many tokens as were drafted and then accepted."""
        sequence.draft_kv_length = min(sequence.draft_kv_length, sequence.kv_length)
        self._drafted.update(sequence.blocks[: sequence.draft_kv_length // self._pool.block_tokens])

    def _drafted_tokens(self, blocks: AnySequence[int]) -> int:
        """Leading tokens that a draft model's own pool holds too."""
        missing = (number for number, block in enumerate(blocks) if block not in self._drafted)
        return next(missing, len(blocks)) * self._pool.block_tokens

    def _grow(self, sequence: Sequence, count: int) -> None:
        if count > 0:
            sequence.blocks += self._take(count)

    def _take(self, count: int) -> list[int]:
        blocks = self._cache.allocate(count)
        self._drafted.difference_update(blocks)
        self._owners.update(blocks)
        return blocks

    def _give_back(self, blocks: AnySequence[int]) -> None:
        self._pool.release(blocks)
        for block in blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
