"""Log-probabilities are those of torch's log-softmax, in a stated order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.logprobs import token_logprobs


@pytest.mark.parametrize("scale", [0.1, 5.0, 1000.0])
def test_log_probabilities_are_those_of_torch_and_the_likeliest_come_first(scale: float) -> None:
    logits = (np.random.default_rng(1).normal(size=(3, 49_152)) * scale).astype(np.float32)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    chosen = [7, 49_151, 0]
    reported = token_logprobs(logits, chosen, 20)
    for row, token in enumerate(chosen):
        assert reported[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-4, rel=1e-6)
        best = expected[row].topk(20)
        assert [token_id for token_id, _ in reported[row].top] == best.indices.tolist()
        assert [logprob for _, logprob in reported[row].top] == pytest.approx(best.values.tolist(), abs=1e-4, rel=1e-6)


def test_rows_without_a_token_are_left_out_and_equal_tokens_are_listed_by_id() -> None:
    logits = np.array([[1, 2, 2, 0, 2], [0, 0, 0, 0, 0]], dtype=np.float32)
    (only,) = token_logprobs(logits, [3], 2)
    assert [token_id for token_id, _ in only.top] == [1, 2]
    assert [token_id for token_id, _ in token_logprobs(logits, [0, 0], 20)[1].top] == [0, 1, 2, 3, 4]
    assert token_logprobs(logits, [0, 0], 0)[1].top == ()
