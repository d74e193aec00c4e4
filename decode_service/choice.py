"""The one rule by which a token follows others; target and draft both use it.

Logits are processed in this order; everything is off unless a request asks for it:

1. repetition penalty over the prompt's and the generated tokens            `decode_service.shaping`
2. presence and frequency penalties over the generated tokens
3. logit bias
4. bad tokens, and before min_tokens all tokens that would end the answer, are ruled out
5. temperature                                                              `decode_service.sampling`
6. top-k
7. top-p, of the probabilities that top-k left
8. min-p
9. the best of what is left is chosen, after noise from seed and position unless the temperature is 0

Penalties depend on the tokens before a place and on nothing else. A draft token sees the draft tokens before it as
they would be if they were accepted, so where the target compares it, both have counted the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decode_service.sampling import SamplingParams, choose_token
from decode_service.shaping import shaped_logits


def choose_next(
    logits: NDArray[np.float32],
    params: SamplingParams,
    tokens: Sequence[int],
    prompt_tokens: int,
    proposed: Sequence[int] = (),
) -> int:
    """The token that follows `tokens` and `proposed`.

    Args:
        logits: [vocabulary], of the model after all of them; left as it is.
        params: how to choose.
        tokens: the sequence so far.
        prompt_tokens: how many of them are the prompt.
        proposed: draft tokens behind them.

    Raises:
        DataLossError: the logits hold NaN or infinity.
    """
    position = len(tokens) + len(proposed)
    if params.shaping.applies(position - prompt_tokens):
        logits = shaped_logits(logits, params.shaping, [*tokens, *proposed], prompt_tokens)
    return choose_token(logits, params, position)
