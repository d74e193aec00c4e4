"""Real service processes on one machine: the same answers from any of them, and a good end for all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.client import AsyncClient, Client
from headrace.client_status import statuses
from headrace.errors import CallError
from headrace.local import LocalPlan, LocalServices
from headrace.types import ServerStatus
from headrace.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.wire import layout_to_wire
from tests.end_to_end.reference import transformers_greedy, transformers_model
from tests.end_to_end.stack import NARROW, ONE_TRY, answers, until

MEMORY = "1GiB"
MAX_TOKENS = 40
NAMES = {"prefill": "headrace.v1.PrefillService", "decode": "headrace.v1.DecodeService"}


@dataclass(frozen=True)
class Fleet:
    """Running services, and every line they have logged."""

    services: LocalServices
    log: list[tuple[str, str]]

    def status(self, stage: str) -> tuple[ServerStatus, ...]:
        """Of one stage's services."""
        ready = self.services.prefills if stage == "prefill" else self.services.decodes
        return statuses(service.address for service in ready)


@pytest.fixture(scope="module")
def fleet(endless_pack: Path) -> Iterator[Fleet]:
    """Two prefill and two decode processes."""
    log: list[tuple[str, str]] = []
    plan = LocalPlan(pack=str(endless_pack), memory=MEMORY, prefills=2, decodes=2, draft="ngram")
    with LocalServices(plan, lambda service, line: log.append((service, line))) as services:
        yield Fleet(services, log)


@pytest.fixture(scope="module")
def expected(endless_checkpoint: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    model = transformers_model(endless_checkpoint)
    return [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]


def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"token_ids": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]


async def test_two_and_two_processes_share_the_work_and_answer_as_transformers_does(
    fleet: Fleet, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    async with AsyncClient(fleet.services.target) as client:
        # Both channels have to be up before calls are spread over them.
        while not all(status.generated_tokens for status in fleet.status("decode")):
            await answers(client, requests(prompts)[:2], at_once=True)
        at_once = await answers(client, requests(prompts) * 2, at_once=True)
        alone = await answers(client, requests(prompts), at_once=False)
    assert [answer.token_ids for answer in at_once] == expected * 2
    assert [answer.token_ids for answer in alone] == expected
    assert all(status.generated_tokens > 0 for status in fleet.status("decode"))
    assert all(status.prompt_tokens > 0 for status in fleet.status("prefill"))
    assert len({status.model_digest for stage in NAMES for status in fleet.status(stage)}) == 1
    assert all(status.peak_rss_bytes < status.budget_bytes for stage in NAMES for status in fleet.status(stage))


@pytest.mark.parametrize("stage", NAMES)
def test_reflection_lists_the_service_with_its_methods_and_health_says_serving(fleet: Fleet, stage: str) -> None:
    address = (fleet.services.prefills if stage == "prefill" else fleet.services.decodes)[0].address
    with grpc.insecure_channel(address) as channel:
        ask = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAMES[stage]),
        ]
        listed, described = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(ask))
        names = {service.name for service in listed.list_services_response.service}
        assert {NAMES[stage], "headrace.v1.StatusService", "grpc.health.v1.Health"} <= names
        assert described.file_descriptor_response.file_descriptor_proto
        for name in ("", NAMES[stage]):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_tell_what_the_status_service_tells(fleet: Fleet) -> None:
    with Client(fleet.services.target) as client:
        client.complete(token_ids=[5, 6] * 20, max_tokens=20)
    for stage, ready in (("prefill", fleet.services.prefills), ("decode", fleet.services.decodes)):
        for service, status in zip(ready, fleet.status(stage), strict=True):
            found = metrics(service.metrics)
            for name in ("passes", "batched_requests", "prompt_tokens", "generated_tokens", "accepted_tokens"):
                assert found[f"headrace_{name}_total"] == getattr(status, name), name
            assert found["headrace_layers"] == found["headrace_resident_layers"] == status.layers == 4
            assert found["headrace_budget_bytes"] == status.budget_bytes == 1 << 30
            assert found["headrace_queued_requests"] == found["headrace_running_requests"] == 0
            assert found["headrace_pass_seconds_count"] == status.passes
            assert 0 < found["headrace_rss_bytes"] <= found["headrace_peak_rss_bytes"]
    assert sum(status.prompt_tokens for status in fleet.status("prefill")) > 0
    decodes = [metrics(service.metrics) for service in fleet.services.decodes]
    assert sum(found["headrace_first_token_seconds_count"] for found in decodes) > 0


def metrics(address: str) -> dict[str, float]:
    """What a Prometheus server would read, without labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics") as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith("headrace_"))
    return {name.partition("{")[0]: float(value) for name, value in samples}


def test_killing_a_client_in_the_middle_of_a_stream_frees_its_blocks(fleet: Fleet) -> None:
    address = fleet.services.decodes[0].address
    program = """
        import signal, sys
        from headrace.client import Client
        with Client(sys.argv[1]) as client:
            for chunk in client.generate(token_ids=[3, 4, 5], max_tokens=4000):
                print(len(chunk.token_ids), flush=True)
    """
    before = fleet.status("decode")[0].generated_tokens
    command = [sys.executable, "-c", textwrap.dedent(program), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline()
        assert fleet.status("decode")[0].kv_blocks_used > 0
        client.kill()
    asyncio.run(until(lambda: fleet.status("decode")[0].kv_blocks_used == 0))
    status = fleet.status("decode")[0]
    assert (status.running, status.queued) == (0, 0)
    assert status.generated_tokens - before < 4000


def test_what_users_write_does_not_appear_in_any_log(fleet: Fleet) -> None:
    secret = "Marmalade-4711"
    chat = [{"role": "user", "content": secret}]
    good: list[dict[str, Any]] = [{"prompt": f"about {secret}"}, {"messages": chat}]
    bad: list[dict[str, Any]] = [
        {"prompt": secret * 4000},
        {"prompt": secret, "max_tokens": 100_000},
        {"messages": chat, "temperature": 5, "stop_token_ids": [9999], "stop": secret},
    ]
    with Client(fleet.services.target, retry=ONE_TRY) as client:
        for request in good:
            client.complete(**{"max_tokens": 4} | request)
        for request in bad:
            with pytest.raises(CallError):
                client.complete(**{"max_tokens": 4} | request)
        with pytest.raises(CallError):
            client.complete(f"and {secret}", max_tokens=4000, timeout_s=0.2)
    assert any("INVALID_ARGUMENT" in line for _, line in fleet.log)
    assert [line for line in fleet.log if "armalade" in line[1] or "4711" in line[1]] == []


async def test_a_prefill_process_that_is_killed_costs_no_request_and_the_others_end_well(
    endless_pack: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    log: list[str] = []
    plan = LocalPlan(pack=str(endless_pack), memory=MEMORY, prefills=2, draft="none")
    services = LocalServices(plan, lambda service, line: log.append(line))
    services.start()
    long = [{"token_ids": [3 + number, *range(2, 300)] * 10, "max_tokens": 2} for number in range(8)]
    try:
        async with AsyncClient(services.target, retry=ONE_TRY) as client:
            calls = [asyncio.create_task(client.complete(**request)) for request in long]
            await until(lambda: statuses([services.addresses[0]])[0].running > 0)
            os.kill(services.pids[0], signal.SIGKILL)
            found = await asyncio.gather(*calls)
            # What a service logs comes through a pipe, perhaps a moment after its answers.
            await until(lambda: any(f"replica {services.addresses[0]} is asked last" in line for line in log))
            again = await answers(client, long, at_once=True)
            short = await answers(client, requests(prompts), at_once=True)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in again]
        assert [answer.token_ids for answer in short] == expected
        (status,) = statuses(services.target)
        assert status.kv_blocks_used == 0
    finally:
        services.stop()
    assert services.lost == ("prefill-0 ended by itself, exit code -9",)


async def test_asked_to_stop_each_process_finishes_what_it_has_refuses_the_rest_and_ends_well(
    endless_pack: Path,
) -> None:
    with LocalServices(LocalPlan(pack=str(endless_pack), memory=MEMORY, draft="none")) as services:
        (decode,), (prefill,) = services.target, [service.address for service in services.prefills]
        async with stalled(decode, 400) as answer:
            await drained(decode, services.pids[1])
            assert (await rest_of(answer))[-1].result.finish_reason == decode_pb2.FINISH_REASON_LENGTH
        async with stalled_prefill(prefill, endless_pack, 3000) as handoff:
            await drained(prefill, services.pids[0])
            assert (await rest_of(handoff))[-1].result.frame_count == 4


async def test_calls_that_outlive_the_grace_time_are_cut_off_and_the_process_still_ends_well(
    endless_pack: Path,
) -> None:
    hasty = {
        f"{stage}_command": (sys.executable, "-m", f"{stage}_service", "--grace", "0.1")
        for stage in ("prefill", "decode")
    }
    with LocalServices(LocalPlan(pack=str(endless_pack), memory=MEMORY, draft="none", **hasty)) as services:
        prefill, decode = services.addresses
        for call, pid in (
            (stalled(decode, 4000), services.pids[1]),
            (stalled_prefill(prefill, endless_pack, 3000), services.pids[0]),
        ):
            async with call as unfinished:
                os.kill(pid, signal.SIGTERM)
                await until(lambda pid=pid: not is_alive(pid))
                with pytest.raises(grpc.aio.AioRpcError) as cut_off:
                    await rest_of(unfinished)
            assert cut_off.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@asynccontextmanager
async def stalled(address: str, max_tokens: int) -> AsyncIterator[Any]:
    """An answer of which the client has read one event, and reads no more until it is told to."""
    request = decode_pb2.GenerateRequest(
        prompt=decode_pb2.Prompt(tokens=decode_pb2.TokenPrompt(ids=[3, 4, 5])),
        stopping=decode_pb2.Stopping(max_tokens=max_tokens),
    )
    async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(request)
        await call.read()
        yield call


@asynccontextmanager
async def stalled_prefill(address: str, path: Path, tokens: int) -> AsyncIterator[Any]:
    """A handoff of which the caller has read one event, and reads no more until it is told to."""
    pack = Pack.open(path)
    request = prefill_pb2.PrefillRequest(
        token_ids=[3] * tokens,
        model_digest=pack.manifest.model_digest,
        kv_layout=layout_to_wire(layout_of(pack)),
    )
    async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        await call.read()
        yield call


async def drained(address: str, pid: int) -> None:
    """Asks a process to stop, and waits until it says that it does not serve and refuses new calls."""
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(pid, signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = [
            decode_pb2_grpc.DecodeServiceStub(channel).Complete(decode_pb2.CompleteRequest()),
            prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest()).read(),
        ]
        codes = [await code_of(call) for call in refused]
    assert grpc.StatusCode.UNAVAILABLE in codes
    assert is_alive(pid)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


async def rest_of(call: Any) -> list[Any]:
    """The events that are still to come."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_batch_command_answers_a_file_and_prints_its_table(
    endless_pack: Path, endless_checkpoint: Path, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "pump 3 leaks", "max_tokens": 12},
        {"id": "b", "messages": [{"role": "user", "content": "fence down at gate 2"}], "max_tokens": 12},
        {"id": "c", "token_ids": [9, 8, 7], "max_tokens": 12, "temperature": 0.8, "seed": 4},
        {"id": "d", "token_ids": [3, 4, 5], "max_tokens": 12},
    ]
    source, out, report = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "report.json"))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        str(Path(sys.executable).with_name("headrace")),
        "batch",
        str(source),
        str(out),
        "--pack",
        str(endless_pack),
    ]
    command += ["--memory", MEMORY, "--json", str(report)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in found] == ["a", "b", "c", "d"]
    assert {answer["usage"]["completion_tokens"] for answer in found} == {12}
    assert {answer["finish_reason"] for answer in found} == {"length"}
    for row in (
        "reports done",
        "prompt tokens",
        "generated tokens",
        "tokens/s",
        "bytes streamed",
        "peak memory, decode",
    ):
        assert row in run.stdout
    summary = json.loads(report.read_text())
    assert (summary["done"], summary["failed"], summary["generated_tokens"]) == (4, 0, 48)
    assert {service["stage"]: service["generated_tokens"] for service in summary["services"]} == {
        "prefill": 0,
        "decode": 48,
    }
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(endless_checkpoint)
    oracle = transformers_greedy(transformers_model(endless_checkpoint), [3, 4, 5], 12)
    assert found[3]["text"] == tokenizer.decode(oracle, skip_special_tokens=True)
