"""Trying products on this machine: whether they are right, and how long they take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Components = Mapping[str, Tensor]
Product = Callable[[Tensor, Components], Tensor]

COLUMNS, OUTPUTS = 1024, 256
"""A quarter of a million weights: half a MiB in bfloat16."""
WEIGHTS = 4
"""Of each product: the nearest cache could hold a single one."""
TURNS = 12
FAR_BEHIND = 3.0
"""Times the best."""
ALONE = (1, 2, 3, 5, 9)
"""Numbers of rows that are held against the same rows among others."""
AMONG = 33
SHAPES = ((96, 640), (64, 128), (100, 72), (7, 33))
"""(outputs, columns), of which nf4 takes the first two."""
TOLERANCE = 2**-6
"""Difference to the first candidate ÷ the largest value of the row: two roundings to bfloat16, and sums in another
order, are less than half of it."""


def is_right(product: Product, reference: Product, weight: Components) -> bool:
    """Whether a product is the reference up to rounding, and its rows do not depend on how many there are."""
    columns = weight["weight"].shape[1] * (2 if weight["weight"].dtype == torch.uint8 else 1)
    x = torch.randn(AMONG, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[AMONG // 2] = 1  # with the largest weights, the largest sum
    found, expected = product(x, weight), reference(x, weight).float()
    if ((found.float() - expected).abs() > TOLERANCE * expected.abs().amax(1, keepdim=True)).any():
        return False
    return all(
        torch.equal(product(x[:rows], weight), found[:rows]) and torch.equal(product(x[-rows:], weight), found[-rows:])
        for rows in ALONE
    )


def times_s(tried: Sequence[tuple[Product, Sequence[Components]]], rows: Sequence[int]) -> list[list[float]]:
    """Processor time of each product, which other programs hardly change, for each number of rows.

    All are timed in turns, and the least time counts. What is far behind after the first turn has no others.

    Args:
        tried: products with weights of `OUTPUTS` rows and `COLUMNS` columns, which take turns as well.
    """
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(count, COLUMNS, generator=random).to(torch.bfloat16) for count in rows]
    least = [[math.inf] * len(rows) for _ in tried]
    running = list(range(len(tried)))
    for turn in range(TURNS):
        for place, x in enumerate(inputs):
            for number in running:
                product, weights = tried[number]
                elapsed_s = _processor_s(product, x, weights[turn % len(weights)])
                least[number][place] = min(least[number][place], elapsed_s)
        means = [statistics.geometric_mean(column) for column in least]
        running = [number for number in running if means[number] <= FAR_BEHIND * min(means)]
    return least


def _processor_s(product: Product, x: Tensor, weight: Components) -> float:
    started_s = time.process_time()
    product(x, weight)
    return time.process_time() - started_s
