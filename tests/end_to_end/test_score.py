"""Scores of texts through both services: transformers' numbers, in every form of prompt, from any replica."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.client import Client
from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidRequest
from headrace.score import Score, perplexity
from tests.conftest import TinyCheckpoint, TinyPack
from tests.end_to_end.stack import decode_replica, prefill_replica, services, until
from tests.headrace.test_commands import run

TEXT = "report 04711 for site 12: the water level at the mill is normal, the headrace is clear of ice. " * 3
CHAT = [{"role": "user", "content": "How is the water?"}, {"role": "assistant", "content": "Cold."}]


@pytest.fixture(scope="module")
def pack(tiny_pack: TinyPack) -> Path:
    return tiny_pack("fp32")


def expected(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' log-probability of each token but the first, given those before it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1], dim=-1)
    return logprobs[range(len(token_ids) - 1), token_ids[1:]]


def assert_as_expected(score: Score, checkpoint: Path, token_ids: list[int]) -> None:
    values = expected(checkpoint, token_ids)
    assert list(score.token_ids) == token_ids
    assert score.logprobs[0] is None
    found = torch.tensor([logprob for logprob in score.logprobs if logprob is not None])
    torch.testing.assert_close(found, values, rtol=0, atol=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-values.mean().item()), rel=1e-4)


async def test_every_form_of_prompt_gets_the_scores_that_transformers_finds(
    pack: Path, tiny_model: TinyCheckpoint
) -> None:
    checkpoint = tiny_model()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    chat_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    async with services(pack) as decode:
        by_text = await decode.client.score(TEXT, top_logprobs=3)
        by_ids = await decode.client.score(token_ids=ids)
        by_chat = await decode.client.score(messages=CHAT)
        with Client(decode.address) as client:
            sync = await asyncio.to_thread(client.score, TEXT, top_logprobs=3)
        await decode.idle()
    assert_as_expected(by_text, checkpoint, ids)
    assert_as_expected(by_ids, checkpoint, ids)
    assert_as_expected(by_chat, checkpoint, chat_ids)
    assert (sync.logprobs, sync.top, sync.model_digest) == (by_text.logprobs, by_text.top, by_text.model_digest)
    assert [len(top) for top in by_text.top] == [0] + [3] * (len(ids) - 1)
    assert all(top[0][1] >= top[1][1] >= top[2][1] for top in by_text.top[1:])
    both = -(by_text.total_logprob + by_chat.total_logprob) / (len(ids) + len(chat_ids) - 2)
    assert perplexity([by_text, by_chat]) == pytest.approx(math.exp(both))


async def test_one_token_has_no_perplexity(pack: Path) -> None:
    async with services(pack) as decode:
        score = await decode.client.score(token_ids=[7])
    assert (score.token_ids, score.logprobs, score.perplexity) == ((7,), (None,), None)


async def test_without_prefill_replicas_scores_are_a_failed_precondition_that_says_what_to_do(pack: Path) -> None:
    async with decode_replica(pack) as decode:
        with pytest.raises(FailedPrecondition, match="start it with --prefill"):
            await decode.client.score("water")


async def test_what_cannot_be_scored_is_refused_by_name(pack: Path) -> None:
    async with services(pack) as decode:
        for wanted, options in (
            ("context holds 512", {"token_ids": [3] * 513}),
            ("outside the vocabulary", {"token_ids": [999]}),
            ("top_logprobs must be an integer from 0 to 20", {"token_ids": [3], "top_logprobs": 21}),
            ("exactly one of", {}),
        ):
            with pytest.raises(InvalidRequest, match=wanted):
                await decode.client.score(**options)  # type: ignore[arg-type]


async def test_a_replica_that_is_gone_costs_nothing_and_a_deadline_ends_the_wait(pack: Path) -> None:
    async with prefill_replica(pack) as gone:
        address = gone.address
    async with (
        prefill_replica(pack, computes=False) as waiting,
        prefill_replica(pack) as replica,
        decode_replica(pack, address, replica.address) as decode,
        decode_replica(pack, waiting.address) as stalled,
    ):
        for _ in range(3):
            assert len((await decode.client.score(token_ids=[3, 4, 5])).logprobs) == 3
        assert replica.telemetry.totals.passes == 3
        with pytest.raises(DeadlineExceeded):
            await stalled.client.score(token_ids=[3, 4, 5], timeout_s=0.2)
        await until(lambda: waiting.scheduler.queued == 0)


async def test_the_command_prints_perplexities_or_one_json_object_a_text(pack: Path, tmp_path: Path) -> None:
    file, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    file.write_text("water level normal")
    lines.write_text('{"text": "mill"}\n\n{"token_ids": [3, 4, 5]}\n')
    async with services(pack) as decode:
        given = ["--target", decode.address, "--text", str(file), "--jsonl", str(lines)]
        code, stdout, stderr = await run("score", *given, "--json", "--top-logprobs", "2")
        assert (code, stderr) == (0, "")
        scores = [json.loads(line) for line in stdout.splitlines()]
        assert [score["name"] for score in scores] == [str(file), "line 1", "line 3"]
        expected = await decode.client.score("water level normal", top_logprobs=2)
        assert scores[0]["logprobs"] == list(expected.logprobs)
        assert scores[0]["perplexity"] == expected.perplexity
        assert scores[2]["token_ids"] == [3, 4, 5]
        code, stdout, stderr = await run("score", *given)
        assert (code, stderr) == (0, "")
        assert f"{expected.perplexity:.3f}" in stdout
        assert "all" in stdout
        code, stdout, _ = await run("score", "--target", decode.address, stdin="water level normal")
        assert (code, f"{expected.perplexity:.3f}" in stdout) == (0, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 must be one of"),
        ('{"text": "a", "token_ids": [1]}', "line 1 must be one of"),
        ('{"prompt": "a"}', "line 1 must be one of"),
    ],
)
async def test_the_command_refuses_lines_that_are_no_texts(tmp_path: Path, line: str, message: str) -> None:
    lines = tmp_path / "bad.jsonl"
    lines.write_text(line + "\n")
    code, stdout, stderr = await run("score", "--target", "127.0.0.1:1", "--jsonl", str(lines))
    assert (code, stdout) == (2, "")
    assert message in stderr


async def test_the_command_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    code, _, stderr = await run("score", "--target", "127.0.0.1:1", "--text", str(tmp_path / "none.txt"))
    assert code == 2
    assert "none.txt cannot be read: No such file or directory" in stderr
