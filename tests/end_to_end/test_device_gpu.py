"""Service processes on a real CUDA device: streamed or not, the answers that transformers gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headrace.client import Client
from headrace.local import LocalPlan, LocalServices
from tests.end_to_end.conftest import SchemePack
from tests.end_to_end.reference import transformers_greedy, transformers_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
MAX_TOKENS = 24


@pytest.mark.parametrize("draft", ["ngram", "none"])
@pytest.mark.parametrize("prefills", [0, 1], ids=["colocated", "with a prefill service"])
def test_processes_on_a_device_answer_as_transformers_does(
    checkpoint: Path, target_pack: SchemePack, prompts: list[list[int]], prefills: int, draft: str
) -> None:
    oracle = transformers_model(checkpoint)
    on_device = ("--device", "cuda", "--device-memory", "2GiB")
    plan = LocalPlan(
        pack=str(target_pack("fp32")),
        memory="8GiB",
        prefills=prefills,
        draft=draft,
        prefill_command=(sys.executable, "-m", "prefill_service", *on_device),
        decode_command=(sys.executable, "-m", "decode_service", *on_device),
    )
    with LocalServices(plan) as services, Client(services.target) as client:
        found = [client.complete(token_ids=prompt, max_tokens=MAX_TOKENS).token_ids for prompt in prompts]
    assert found == [transformers_greedy(oracle, prompt, MAX_TOKENS) for prompt in prompts]
