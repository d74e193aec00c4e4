"""Which KV blocks are free and who owns the others. Bookkeeping only: the tensors live in `shared.kv`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shared.errors import CapacityError


class BlockIntegrityError(AssertionError):
    """Block tables and reference counts disagree: a defect of this program, never of a request."""


class BlockPool:
    """Reference-counted KV blocks, numbered from 0.

    A block table is a sequence's list of blocks. Every table that holds a block owns one reference to it; the block
    is free again when the last one is released. Not thread safe: whoever shares a pool between threads holds a lock
    around every call (the scheduler does).

    Args:
        block_count: blocks in the pool, 0 or more.
        block_tokens: tokens whose keys and values fit into one block, 1 or more.
    """

    def __init__(self, block_count: int, block_tokens: int = 16) -> None:
        if block_count < 0 or block_tokens < 1:
            raise ValueError(f"a pool of {block_count} blocks of {block_tokens} tokens is not possible")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._free = list(range(block_count - 1, -1, -1))
        self._references = [0] * block_count

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Blocks with at least one owner."""
        return self.block_count - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of this many tokens needs."""
        if tokens < 0:
            raise ValueError(f"a sequence cannot have {tokens} tokens")
        return -(-tokens // self.block_tokens)

    def reference_count(self, block: int) -> int:
        """Owners of a block; more than one means that its contents must not be changed."""
        self._require_known([block])
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one owner; all or none.

        Raises:
            CapacityError: fewer are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise CapacityError(
                f"{count} KV blocks of {self.block_tokens} tokens are needed, {len(self._free)} of {self.block_count} "
                "are free; wait for other requests to finish or give the service a larger budget"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Adds an owner to each block; all or none.

        Raises:
            RuntimeError: a block is free or unknown; a defect of the caller.
        """
        self._require_known(blocks)
        if free := [block for block in blocks if not self._references[block]]:
            raise RuntimeError(f"cannot share blocks {free}: they are free")
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes an owner from each block and frees those without any; all or none.

        Raises:
            RuntimeError: a block is unknown or would lose more owners than it has; a defect of the caller.
        """
        self._require_known(blocks)
        excess = [block for block, owners in Counter(blocks).items() if owners > self._references[block]]
        if excess:
            raise RuntimeError(f"blocks {excess} released more often than they are owned")
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the counts with all block tables that exist; cheap enough to run whenever the service is idle.

        Raises:
            BlockIntegrityError: names the blocks that are leaked, doubly owned, free yet owned, or unknown.
        """
        owners: Counter[int] = Counter()
        faults: list[str] = []
        for number, table in enumerate(tables):
            within = Counter(table)
            owners.update(within)
            if twice := sorted(block for block, times in within.items() if times > 1):
                faults.append(f"table {number} holds blocks {twice} twice")
        if unknown := sorted(block for block in owners if not 0 <= block < self.block_count):
            faults.append(f"blocks {unknown} are owned but not in the pool of {self.block_count}")

        counted = [(block, count, owners[block]) for block, count in enumerate(self._references)]
        if leaked := [block for block, count, owned in counted if count > owned]:
            faults.append(f"blocks {leaked} are leaked: counted more often than tables hold them")
        if doubly := [block for block, count, owned in counted if 0 < count < owned]:
            faults.append(f"blocks {doubly} are doubly owned: held by more tables than counted")
        if free_yet_owned := [block for block, count, owned in counted if not count and owned]:
            faults.append(f"blocks {free_yet_owned} are free yet owned")
        if sorted(self._free) != [block for block, count, _ in counted if not count]:
            faults.append("the free list does not hold exactly the blocks without owners")
        if faults:
            raise BlockIntegrityError("; ".join(faults))

    def _require_known(self, blocks: Sequence[int]) -> None:
        if unknown := [block for block in blocks if not 0 <= block < self.block_count]:
            raise RuntimeError(f"blocks {unknown} are not in the pool of {self.block_count}")
