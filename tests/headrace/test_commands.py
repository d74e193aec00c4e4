"""The commands, as processes of their own, against a scripted decode service."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.generate import generate
from headrace.request import Request
from tests.headrace.fake_decode import FakeDecode, echo, failing, hanging, served
from tests.headrace.processes import run, start


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": f"j{n}", "prompt": f"Water {n}"}) + "\n" for n in range(12)))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


async def test_batch_answers_a_file_prints_a_table_and_writes_it_as_json(jobs: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    async with served(FakeDecode()) as address:
        code, stdout, stderr = await run("batch", str(jobs), str(out), "--target", address, "--json", str(report))
    assert (code, stderr) == (0, "")
    assert ids(out) == [f"j{n}" for n in range(12)]
    rows = ("reports done", "accepted draft tokens per pass", "bytes streamed", f"decode {address}", "per 8 h shift")
    assert all(row in stdout for row in rows)
    assert json.loads(report.read_text())["generated_tokens"] == 48


async def test_a_batch_never_writes_over_its_own_requests(jobs: Path, tmp_path: Path) -> None:
    other_name = tmp_path / "link.jsonl"
    other_name.symlink_to(jobs)
    for out in (jobs, other_name):
        code, _, stderr = await run("batch", str(jobs), str(out), "--target", "127.0.0.1:1")
        assert (code, ids(jobs)) == (2, [f"j{n}" for n in range(12)])
        assert "is the file of requests" in stderr.replace("\n", " ")


async def test_batch_exits_with_1_when_a_line_failed(jobs: Path, tmp_path: Path) -> None:
    async with served(FakeDecode(failing(grpc.StatusCode.DATA_LOSS))) as address:
        code, _, stderr = await run("batch", str(jobs), str(tmp_path / "out.jsonl"), "--target", address)
    assert code == 1
    assert "DATA_LOSS: as scripted" in stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either --target"),
        (("--target", "127.0.0.1:1", "--pack", "."), "give either --target"),
        (("--pack", "."), "need --memory"),
        (("--pack", "absent", "--memory", "1GiB"), "absent is no pack"),
        (("--pack", ".", "--memory", "1GiB", "--draft", "self"), "needs a draft pack"),
        (("--pack", ".", "--memory", "1GiB", "--colocate", "--prefills", "2"), "leave --prefills out"),
        (("--pack", ".", "--memory", "1GiB", "--tls"), "go with --target"),
        (("--target", "localhost"), "has no port"),
        (("--target", "127.0.0.1:1", "--shift", "0h"), "longer than nothing"),
        (("--target", "127.0.0.1:1", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_batch_says_what_is_wrong_with_its_options(
    jobs: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, ["batch", str(jobs), str(tmp_path / "out.jsonl"), *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_batch_continues_without_losing_or_repeating_a_line(
    jobs: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "out.jsonl"
    proceed, stuck = asyncio.Event(), asyncio.Event()

    async def half(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(fake.requests) > 6:
            stuck.set()
            await proceed.wait()
        async for event in echo(request, context):
            yield event

    fake = FakeDecode(half)
    async with served(fake) as address:
        command = ("batch", str(jobs), str(out), "--target", address, "--concurrency", "1")
        first = await start(*command)
        await stuck.wait()
        first.send_signal(how)
        _, stderr = await first.communicate()
        assert first.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130), stderr
        assert b"Traceback" not in stderr
        assert not out.exists()
        proceed.set()
        code, _, stderr_again = await run(*command)
    assert code == 0
    assert "6 of 12 reports were answered by an earlier run" in stderr_again
    assert ids(out) == [f"j{n}" for n in range(12)]
    assert [request.request_id for request in fake.requests] == [f"j{n}" for n in [*range(7), *range(6, 12)]]


async def test_generate_streams_to_the_terminal(tmp_path: Path) -> None:
    async with served(FakeDecode()) as address:
        assert (await run("generate", "Water", "--target", address))[:2] == (0, "Water\n")
        code, stdout, stderr = await run("generate", "-", "--target", address, "--chat", stdin="How high?")
    assert (code, stdout) == (0, "How high?\n")
    assert "3 prompt tokens, 4 generated (stop)" in stderr


async def test_generate_sends_every_option_and_prints_the_answer_as_json() -> None:
    fake = FakeDecode()
    numbers = ["--max-tokens", "5", "--min-tokens", "2", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25"]
    numbers += ["--min-p", "0.125", "--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--seed", "7"]
    numbers += ["--frequency-penalty", "0.75", "--logit-bias", "8=-100", "--logit-bias", "9=2.5", "--priority", "-3"]
    lists = ["--bad-token-id", "3", "--bad-token-id", "4", "--stop", "end", "--stop", "fin", "--stop-token-id", "9"]
    rest = ["--ignore-eos", "--logprobs", "--top-logprobs", "1", "--cache-salt", "s", "--request-id", "r1", "--json"]
    async with served(fake) as address:
        code, stdout, stderr = await run("generate", "Water", "--target", address, *numbers, *lists, *rest)
        assert (await run("generate", "4, 5", "--token-ids", "--target", address))[0] == 0
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert (found["text"], found["token_ids"]) == ("Water", [1, 2, 3, 4])
    assert (found["finish_reason"], found["seed"]) == ("stop", 7)
    assert found["logprobs"] == [{"logprob": -0.5, "top": [[9, -0.25]]}] * 4
    assert found["usage"]["accepted_tokens"] == 2
    request, second = fake.requests
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5, 0.75)
    assert (dict(sampling.logit_bias), list(sampling.bad_token_ids)) == ({8: -100, 9: 2.5}, [3, 4])
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (5, 2, True)
    assert (list(stopping.strings), list(stopping.token_ids)) == (["end", "fin"], [9])
    assert (request.priority, request.cache_salt, request.request_id) == (-3, "s", "r1")
    assert list(second.prompt.tokens.ids) == [4, 5]


async def test_generate_sends_tools_documents_and_variables_of_the_template(tmp_path: Path) -> None:
    tools, documents = tmp_path / "tools.json", tmp_path / "documents.json"
    tools.write_text('[{"name": "gauge", "description": "Reads it.", "parameters": {"type": "object"}}]')
    documents.write_text('[{"title": "Log", "text": "2 m"}]')
    beside = ["--tools", str(tools), "--documents", str(documents)]
    beside += ["--template-variable", "enable_thinking=false", "--template-variable", 'tone="dry"']
    fake = FakeDecode()
    async with served(fake) as address:
        code, stdout, _ = await run("generate", "How high?", "--chat", "--target", address, *beside)
        talk = await run("generate", "--chat", "--target", address, *beside, stdin="Hi\nYou\n")
    assert (code, stdout, talk) == (0, "How high?\n", (0, "Hi\nHiHiYou\n", ""))
    assert len(fake.requests) == 3
    for request in fake.requests:
        chat = request.prompt.chat
        (tool,) = chat.tools
        assert (tool.name, tool.description, json.loads(tool.parameters_json)) == (
            "gauge",
            "Reads it.",
            {"type": "object"},
        )
        assert [dict(document.fields) for document in chat.documents] == [{"title": "Log", "text": "2 m"}]
        assert len(chat.template_variables) == 2


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--tools", None, "cannot be read: No such file"),
        ("--tools", "[{]", "is not JSON"),
        ("--tools", "{}", "must hold a JSON list"),
        ("--tools", "[]", "must hold a JSON list"),
        ("--documents", "\xe9", "is not JSON"),
        ("--documents", '[{"title": 1}]', "documents must be a list"),
        ("--tools", '[{"description": "nameless"}]', "tools must be a list"),
    ],
)
def test_files_of_tools_and_documents_that_cannot_be_used_are_told(
    tmp_path: Path, option: str, content: str | None, says: str
) -> None:
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    for prompt in (["x"], []):
        result = CliRunner().invoke(app, ["generate", *prompt, "--chat", "--target", "127.0.0.1:1", option, str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr


def test_generate_offers_every_field_of_a_request() -> None:
    offered = set(inspect.signature(generate).parameters)
    renamed = {"bad_token_ids": "bad_token_id", "stop_token_ids": "stop_token_id", "messages": "chat"}
    renamed["template_variables"] = "template_variable"
    fields = {renamed.get(field.name, field.name) for field in dataclasses.fields(Request)}
    assert fields - offered == set()


async def test_a_conversation_keeps_its_history_until_it_is_started_over() -> None:
    fake = FakeDecode()
    said = "Hi\n\n  You\n/new\nAgain\n/exit\nnever\n"
    async with served(fake) as address:
        command = ("generate", "--chat", "--system", "Be brief.", "--target", address, "--max-tokens", "3")
        code, stdout, stderr = await run(*command, stdin=said)
    assert (code, stderr) == (0, "")
    assert stdout == "Be brief.Hi\nBe brief.HiBe brief.HiYou\nBe brief.Again\n"  # the service echoes all it was told
    turns = [[(turn.role, turn.content) for turn in request.prompt.chat.messages] for request in fake.requests]
    system = ("system", "Be brief.")
    assert turns == [
        [system, ("user", "Hi")],
        [system, ("user", "Hi"), ("assistant", "Be brief.Hi"), ("user", "You")],
        [system, ("user", "Again")],
    ]
    assert all(request.stopping.max_tokens == 3 for request in fake.requests)


async def test_ctrl_c_stops_an_answer_and_leaves_it_out_of_the_conversation() -> None:
    async def first_hangs(request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in hanging(request, context) if len(fake.requests) == 1 else echo(request, context):
            yield event

    fake = FakeDecode(first_hangs)
    async with served(fake) as address:
        process = await start("generate", "--chat", "--target", address)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Long\n")
        assert await process.stdout.readexactly(3) == b"Wat"
        process.send_signal(signal.SIGINT)
        await fake.cancelled.wait()
        stdout, stderr = await process.communicate(b"Short\n")
    assert (process.returncode, stdout) == (0, b"Short\n"), stderr
    assert [turn.content for turn in fake.requests[1].prompt.chat.messages] == ["Short"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a prompt, or --chat"),
        (("--chat", "--json"), "--json is for one answer"),
        (("x", "--system", "y"), "--system needs --chat"),
        (("1", "--chat", "--token-ids"), "exclude each other"),
        (("x", "--template-variable", "a=1"), "need --chat"),
        (("x", "--chat", "--template-variable", "tone=dry"), "is not NAME=JSON"),
        (("x", "--chat", "--template-variable", "tone"), "is not NAME=JSON"),
        (("x", "--chat", "--template-variable", "a=[1]"), "template_variables must be"),
        (("1 b", "--token-ids"), "the prompt is numbers"),
        (("x", "--logit-bias", "8"), "is not ID=BIAS"),
        (("x", "--top-p", "0"), "top_p must be above 0"),
        (("x", "--top-logprobs", "2"), "logprobs is not set"),
    ],
)
def test_generate_says_what_is_wrong_with_its_options(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["generate", "--target", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


async def test_generate_shows_a_chunk_before_the_answer_ends_and_ctrl_c_cancels_the_call() -> None:
    fake = FakeDecode(hanging)
    async with served(fake) as address:
        process = await start("generate", "Water", "--target", address)
        assert process.stdout is not None
        assert await process.stdout.readexactly(3) == b"Wat"
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
        await fake.cancelled.wait()
    assert process.returncode == 130
    assert b"Traceback" not in stderr


async def test_serve_tells_why_a_service_did_not_start(tmp_path: Path) -> None:
    code, _, stderr = await run("serve", "--pack", str(tmp_path), "--memory", "1GiB")
    assert code == 2
    assert stderr.startswith("error: prefill-0: ")
