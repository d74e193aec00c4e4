"""How fast a job of `bench.decode` could have been on its machine at most.

A pass cannot be faster than reading its streamed layers from disk, nor than reading all layers from memory once, nor
than the matrix products of its tokens take by themselves. Prompts come first, in as few passes as they fit in, then
the other passes that there were:

    least time = max(prompt passes × reading, prompt tokens × product of one among 512 rows)
               + max(other passes × reading, tokens written × product of one among as many rows as these passes had)

Draft tokens that were rejected are no work that had to be done, so they count as rows, not as products. Bandwidths are
measured just before and just after each case, products (layers in the layout that stays, and the output matrix) before
the cases of a batch size, all in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from bench.machine import memory_bytes_per_s
from shared.forecast import at_rows
from shared.pack.reader import Pack
from shared.speed import layer_seconds, output_seconds
from shared.streaming.plan import Residency
from shared.streaming.stream import LayerStream

DISK_S = 1.0
"""How long the disk is measured before and after each case."""


@dataclass(frozen=True)
class Bandwidths:
    """Of the machine, bytes/s."""

    disk: float
    """Of the pack's own layers, past the page cache, with the service's readers."""
    memory: float


@dataclass(frozen=True)
class Products:
    """Seconds of a pack's matrix products by number of rows."""

    layers: int
    layer_s: Mapping[int, float]
    output_s: Mapping[int, float]

    @property
    def prompt_token_s(self) -> float:
        """One of a prompt's tokens, in a pass over as many as were measured; the output matrix is for the last one."""
        rows = max(self.layer_s)
        return self.layers * self.layer_s[rows] / rows

    def token_s(self, rows: float) -> float:
        """One of `rows` tokens that a pass computes and chooses from."""
        return (self.layers * at_rows(self.layer_s, rows) + at_rows(self.output_s, rows)) / rows


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a service has done in a case."""

    tokens: int
    """Written."""
    draft_tokens: int
    prompt_tokens: int
    passes: int
    streamed_bytes_per_pass: float
    pass_prompt_tokens: int
    """Of prompts, that a pass takes at most."""


@dataclass(frozen=True)
class Limit:
    """The least time for a case."""

    least_s: float
    bound_by: str
    """What the passes without prompts are bound by."""


def limit(pack: Pack, done: Done, bandwidths: Bandwidths, products: Products) -> Limit:
    """See above."""
    layers_bytes = pack.spec.layers * pack.layer_layout.data_bytes
    read_s = max(done.streamed_bytes_per_pass / bandwidths.disk, layers_bytes / bandwidths.memory)
    prompt_passes = min(math.ceil(done.prompt_tokens / done.pass_prompt_tokens), done.passes)
    prompts_s = max(prompt_passes * read_s, done.prompt_tokens * products.prompt_token_s)
    other_passes = max(1, done.passes - prompt_passes)
    reading_s = (done.passes - prompt_passes) * read_s
    arithmetic_s = done.tokens * products.token_s(max(1.0, (done.tokens + done.draft_tokens) / other_passes))
    bound_by = "reading" if reading_s >= arithmetic_s else "arithmetic"
    return Limit(prompts_s + max(reading_s, arithmetic_s), bound_by)


def measure_products(pack: Pack) -> Products:
    """Takes some seconds."""
    return Products(pack.spec.layers, layer_seconds(pack).resident, output_seconds(pack))


def measure_bandwidths(pack: Pack) -> Bandwidths:
    """Disk and memory, now."""
    with closing(LayerStream(pack, Residency(frozenset(), slots=min(4, pack.spec.layers)))) as stream:
        started_s, walks = time.monotonic(), 0
        while time.monotonic() - started_s < DISK_S or walks < 2:
            if walks == 1:  # the first one verifies the digests
                before, started_s = stream.streamed_bytes, time.monotonic()
            for _ in stream.walk():
                pass
            walks += 1
        disk = (stream.streamed_bytes - before) / (time.monotonic() - started_s)
    return Bandwidths(disk, memory_bytes_per_s())
