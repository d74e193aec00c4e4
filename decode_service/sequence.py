"""One request on its way through decode: its tokens, lengths and blocks. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from decode_service.sampling import SamplingParams
from decode_service.text.output import Emission, TextOutput
from shared.outlet import Outlet


class Phase(Enum):
    """Where a sequence is on its way; only the scheduler moves it."""

    WAITING = "waiting"
    """Holds no blocks: for the first time, or again after it was preempted."""
    FILLING = "filling"
    """Holds blocks; a handoff may be writing to them."""
    RUNNING = "running"
    """Takes part in passes."""
    ENDED = "ended"
    """Has given everything back."""


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt, and what the model has written after it.

    Owned by the scheduler's lock where blocks and phases are concerned, and by the engine's thread otherwise.
    """

    request_id: str
    tokens: list[int]
    """Prompt and generated tokens."""
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    output: TextOutput
    """Turns tokens into text and decides where the answer ends."""
    outlet: Outlet[Emission]
    """Where the answer goes."""
    on_admitted: Callable[[], None]
    """Called, from any thread, whenever it has been given blocks: at first, and after each time it was preempted."""
    priority: int = 0
    """-100 to 100; the higher goes first."""
    cache_salt: str = ""
    """Keys and values are shared only between sequences of one salt."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report with each token's log-probability; None reports neither."""

    phase: Phase = Phase.WAITING
    number: int = 0
    """Order of arrival."""
    blocks: list[int] = field(default_factory=list)
    """Block table; covers all tokens that there are, and room for drafts where there is any."""
    kv_length: int = 0
    """Tokens whose keys and values are in the pool: all but the last, once the prompt has arrived."""
    draft_kv_length: int = 0
    """Tokens whose keys and values a draft model has in its own pool."""
    findable_blocks: int = 0
    """Leading blocks that others can find."""
    cached_tokens: int = 0
    """Leading prompt tokens whose keys and values were there before anything was computed."""
    preemptions: int = 0
    """How often it gave its blocks up to be computed again."""
    last_hidden: bytes | None = None
    """The last token's final features after a handoff, until the next token is chosen from them."""
    ended: bool = False
    """The answer is complete, or nobody waits for it any more."""
    failed: bool = False
    """It ended with an error: what was computed for it is not to be trusted."""
    in_pass: bool = False
    """The engine works on it now; its blocks must stay."""

    draft_tokens: int = 0
    accepted_tokens: int = 0
    passes: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.generated_tokens

    @property
    def most_tokens(self) -> int:
        """The length it may grow to."""
        return self.prompt_tokens + self.max_tokens

    @property
    def needed_tokens(self) -> int:
        """Tokens that its blocks must have room for in the next pass, without any draft."""
        return len(self.tokens) + (self.last_hidden is not None)

    def append(self, chosen: list[int]) -> Emission:
        """Adds chosen tokens up to the one that ends the answer, and returns what is new for the reader."""
        emission = self.output.push(chosen)
        now_s = time.monotonic()
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s
        self.tokens.extend(emission.token_ids)
        return emission

    def emit(self, emission: Emission) -> None:
        """Passes it on to the reader, and ends the answer where it ends."""
        self.outlet.put(emission, len(emission.token_ids))
        if emission.finish is not None:
            self.ended = True
            self.outlet.close()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error."""
        self.ended = self.failed = True
        self.outlet.close(error)
