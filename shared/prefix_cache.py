"""Blocks of KV that may serve again, found by what they hold. Plain Python; the tensors live in `shared.kv`."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from shared.blocks import BlockPool


@dataclass(frozen=True)
class _Entry:
    block: int
    tokens: tuple[int, ...]
    """What the block holds; compared on a hit, so that not even a collision of hashes could mix prompts up."""


class PrefixCache:
    """Complete blocks by a hash chain over everything before them: model digest, salt, and all tokens.

    The cache is one owner of its blocks among others: a block leaves the cache only when nobody else holds it. The
    least recently used leave first, of one prefix the last block before the first, so no block outlives the ones before
    it. Not thread safe, like the pool.
    """

    def __init__(self, pool: BlockPool, model_digest: str) -> None:
        self._pool = pool
        self._digest = model_digest
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """Least recently used first."""

    @property
    def blocks(self) -> list[int]:
        """The block table of the cache itself, for `BlockPool.check_integrity`."""
        return [entry.block for entry in self._entries.values()]

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and those that nobody but the cache holds."""
        held_alone = sum(self._pool.reference_count(entry.block) == 1 for entry in self._entries.values())
        return self._pool.free_count + held_alone

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The blocks that hold the longest known prefix; the caller becomes an owner of each.

        Never the whole prompt: its last token is always computed, since what follows it is not in the cache.
        """
        found = self._known(tokens, salt)
        self._touch(found)
        blocks = [self._entries[key].block for key in found]
        self._pool.share(blocks)
        return blocks

    def known_tokens(self, tokens: Sequence[int], salt: str) -> int:
        """How many leading tokens `match` would find now."""
        return len(self._known(tokens, salt)) * self._pool.block_tokens

    def insert(self, tokens: Sequence[int], salt: str, blocks: Sequence[int]) -> None:
        """Makes the complete blocks of a sequence known; those that are known already stay as they are.

        Args:
            tokens: those whose keys and values are in `blocks`, or will be before anyone reads them.
            blocks: the sequence's block table; the cache becomes another owner.
        """
        keys = []
        for (key, part), block in zip(self._chain(tokens, salt), blocks, strict=False):
            if key not in self._entries:
                self._entries[key] = _Entry(block, part)
                self._pool.share([block])
            keys.append(key)
        self._touch(keys)

    def forget(self, blocks: Sequence[int]) -> None:
        """Drops blocks that do not hold what they were to hold, because their pass failed.

        Blocks behind them stay, and are found again once the ones before them are known again.
        """
        bad = set(blocks)
        for key in [key for key, entry in self._entries.items() if entry.block in bad]:
            self._pool.release([self._entries.pop(key).block])

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks, and gives up as many cached ones as that needs; all or none.

        Raises:
            CapacityError: not even without the cache are so many free.
        """
        victims = self._oldest_unused(count - self._pool.free_count)
        if self._pool.free_count + len(victims) >= count:
            self._pool.release([self._entries.pop(key).block for key in victims])
        return self._pool.allocate(count)

    def _oldest_unused(self, count: int) -> list[bytes]:
        """Up to `count` entries that nobody else holds, the least recently used first."""
        unused = (key for key, entry in self._entries.items() if self._pool.reference_count(entry.block) == 1)
        return list(islice(unused, max(0, count)))

    def _known(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """The keys of the longest known prefix, without the last token."""
        found: list[bytes] = []
        for key, part in self._chain(tokens[:-1], salt):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != part:
                break
            found.append(key)
        return found

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def _chain(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """The key and tokens of each complete block; a key stands for all tokens up to its block's end."""
        size = self._pool.block_tokens
        key = hashlib.sha256(f"{self._digest}\0{salt}".encode()).digest()
        for start in range(0, len(tokens) - size + 1, size):
            part = tuple(tokens[start : start + size])
            key = hashlib.sha256(key + array("I", part).tobytes()).digest()
            yield key, part
