"""Real processes whose memory budget holds a quarter of the layers: the same answers, inside the budget."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace._child import Child, Ready
from headrace.client import AsyncClient
from headrace.client_status import statuses
from shared.pack.reader import Pack
from tests.conftest import Smollm2Pack, TinyCheckpoint, TinyPack
from tests.end_to_end.reference import transformers_greedy, transformers_model
from tests.end_to_end.stack import answers
from tests.models import smollm2_gguf

MEBIBYTE = 1 << 20
Answer = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode process of one pack."""

    prefill: Ready
    decode: Ready


@contextmanager
def pair(pack: Path, *, quarter: bool, decode_options: Sequence[str] = (), context: int = 512) -> Iterator[Pair]:
    """Runs both processes, with room for all layers or for a quarter of them, and ends them well."""
    common = ["--context-length", str(context)]
    prefill_command = [sys.executable, "-m", "prefill_service", str(pack), *common, "--pass-tokens", str(context)]
    decode_command = [sys.executable, "-m", "decode_service", str(pack), *common, "--batch", "8", *decode_options]
    with running("prefill", [*prefill_command, *memory(pack, prefill_command, quarter)]) as prefill:
        decode_command += ["--prefill", prefill.address]
        # Half of what is left over becomes blocks of keys and values.
        with running("decode", [*decode_command, *memory(pack, decode_command, quarter, share=0.5)]) as decode:
            yield Pair(prefill, decode)


@contextmanager
def running(name: str, command: Sequence[str]) -> Iterator[Ready]:
    child = Child(name, command, queue.SimpleQueue())
    try:
        yield child.wait_ready(time.monotonic() + 300)
        child.terminate()
        assert child.wait_exit(time.monotonic() + 60)
        assert child.exit_code == 0, child.told(name)
    finally:
        child.kill()


def memory(pack: Path, command: Sequence[str], quarter: bool, share: float = 1.0) -> list[str]:
    """The option that states a budget: what the service itself names as its least, and a quarter of the layers."""
    if not quarter:
        return ["--memory", "3GiB"]
    refused = subprocess.run([*command, "--memory", "1MiB"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    least = re.search(r"the smallest that works is (\d+) MiB", refused.stderr)
    assert least is not None, refused.stderr
    opened = Pack.open(pack)
    layers_bytes = opened.spec.layers * opened.layer_layout.data_bytes
    return ["--memory", f"{int(least[1]) * MEBIBYTE + int(layers_bytes / 4 / share)}"]


async def answered(pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[Answer], list[Answer]]:
    """The answers one after another, and all at once."""
    requests: list[dict[str, Any]] = [{"token_ids": prompt, "max_tokens": max_tokens} for prompt in prompts]
    async with AsyncClient(pair.decode.address) as client:
        alone = await answers(client, requests[::4], at_once=False)
        at_once = await answers(client, requests, at_once=True)
    return [answer.token_ids for answer in alone], [answer.token_ids for answer in at_once]


def check_streaming(pair: Pair) -> None:
    """About a quarter of the layers stayed in memory, the others came from the disk, and all within the budget."""
    for status in statuses([pair.prefill.address, pair.decode.address]):
        assert status.layers / 10 <= status.resident_layers <= status.layers * 0.4
        assert status.streamed_bytes > 0
        assert status.peak_rss_bytes <= status.budget_bytes


async def test_a_quarter_of_the_layers_in_memory_gives_the_answers_of_transformers(
    tiny_model: TinyCheckpoint, tiny_pack: TinyPack, prompts: list[list[int]]
) -> None:
    model: dict[str, Any] = {"hidden": 256, "intermediate": 1536, "layers": 12, "heads": 8, "scale": 0.08}
    with pair(tiny_pack("fp32", **model), quarter=True, decode_options=["--draft", "ngram"]) as processes:
        alone, at_once = await answered(processes, prompts, 8)
        check_streaming(processes)
    oracle = transformers_model(tiny_model(**model))
    expected = [transformers_greedy(oracle, prompt, 8) for prompt in prompts]
    assert at_once == expected
    assert alone == expected[::4]


SMOLLM2_PROMPTS = (
    "The pump in cellar 7",
    "Shift report, 14 March.\nCrew: three. Weather: rain since noon.\nSummary:",
    "Inlet gate 2 was found half open at 06:10. The lock was intact. " * 8 + "What happened?",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[list[list[int]], list[Answer]]:
    """Eight prompts and the answers of transformers."""
    from transformers import AutoTokenizer

    file = smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    oracle = transformers_model(file.parent, file.name)
    plain = [tokenizer(text)["input_ids"] for text in SMOLLM2_PROMPTS]
    chats = [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )["input_ids"]
        for text in SMOLLM2_PROMPTS
    ]
    prompts = [*plain, *chats]
    return prompts, [transformers_greedy(oracle, prompt, 24) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("quarter", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("draft", ["none", "ngram"])
async def test_the_real_model_in_float32_gives_the_answers_of_transformers(
    smollm2_pack: Smollm2Pack, smollm2: tuple[list[list[int]], list[Answer]], quarter: bool, draft: str
) -> None:
    prompts, expected = smollm2
    with pair(smollm2_pack("fp32"), quarter=quarter, decode_options=["--draft", draft]) as processes:
        alone, at_once = await answered(processes, prompts, 24)
        if quarter:
            check_streaming(processes)
    assert at_once == expected
    assert alone == expected[::4]
