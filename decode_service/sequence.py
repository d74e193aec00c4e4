"""One request on its way through decode: its tokens, lengths and blocks. Plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from decode_service.sampling import SamplingParams
from decode_service.text.output import Emission, TextOutput
from shared.outlet import Outlet


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
    """Called, from any thread, once the blocks are reserved."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report with each token's log-probability; None reports neither."""

    blocks: list[int] = field(default_factory=list)
    """Block table; covers the prompt and all that may be generated."""
    kv_length: int = 0
    """Tokens whose keys and values are in the pool: all but the last, once the prompt has arrived."""
    draft_kv_length: int = 0
    """Tokens whose keys and values a draft model has in its own pool."""
    last_hidden: bytes | None = None
    """The prompt's final features, until the first token is chosen from them."""
    ended: bool = False
    """The answer is complete, or nobody waits for it any more."""
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
        self.ended = True
        self.outlet.close(error)
