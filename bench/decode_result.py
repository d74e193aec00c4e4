"""What `bench.decode` measures: one configuration of a service, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

PEER = "transformers"
"""In the place of a draft: the same prompts by that library, greedy, one by one."""


@dataclass(frozen=True)
class Case:
    """One configuration of the service and the load on it."""

    memory: str
    batch: int
    draft: str


@dataclass(frozen=True)
class Result:
    """What one case measured in one round."""

    memory: str
    batch: int
    draft: str
    requests: int
    tokens: int
    wall_s: float
    """First request sent to last answer received: prompts included."""
    decode_tokens_per_s: float
    """Without prompts: tokens after each request's first ÷ the time from the first to the last of them."""
    tokens_per_pass: float
    """Of one sequence."""
    passes: int
    streamed_bytes_per_pass: float
    disk_bytes_per_s: float
    limit_tokens_per_s: float
    """See `bench.decode_limits`."""
    peak_rss_bytes: int
    resident_layers: int
    equal_texts: int
    """Answers equal to those of the first case."""
    draft_tokens: dict[str, int]
    """By category of prompt."""
    accepted_tokens: dict[str, int]
    prompt_tokens: int = 0
    """Computed: without those that were found in the cache."""
    bound_by: str = "reading"
    """What the limit of all passes without prompts comes from: reading, or arithmetic."""

    @property
    def case(self) -> Case:
        return Case(self.memory, self.batch, self.draft)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def acceptance(self) -> float:
        return sum(self.accepted_tokens.values()) / max(1, sum(self.draft_tokens.values()))
