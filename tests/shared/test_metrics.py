"""One set of numbers, shown to Prometheus and in a snapshot."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace.v1.status_pb2 import GetStatusResponse
from shared.metrics import Gauges, Identity, StatusSnapshot, Telemetry, peak_rss_bytes, rss_bytes


def _telemetry(gauges: Gauges | None = None) -> Telemetry:
    identity = Identity(
        stage="decode", model_digest="ab" * 32, scheme="int8", context_length=2048, layers=30, budget_bytes=10**9
    )
    return Telemetry(identity, gauges)


def _exposed(telemetry: Telemetry) -> dict[tuple[str, str], float]:
    """Sample name and its label beside `stage` ("" where there is none) -> value."""
    registry = CollectorRegistry()
    registry.register(telemetry)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels["stage"] == "decode"
            samples[sample.name, next((v for k, v in sample.labels.items() if k != "stage"), "")] = sample.value
    return samples


def test_totals_are_the_same_in_snapshot_and_prometheus() -> None:
    telemetry = _telemetry()
    telemetry.record_pass(0.2, requests=3, streamed_bytes=4096, generated_tokens=5, draft_tokens=8, accepted_tokens=2)
    telemetry.record_pass(0.4, requests=1, generated_tokens=1)
    telemetry.add(prompt_tokens=17)

    snapshot, exposed = telemetry.snapshot(), _exposed(telemetry)

    expected = {
        "passes": 2,
        "batched_requests": 4,
        "streamed_bytes": 4096,
        "prompt_tokens": 17,
        "generated_tokens": 6,
        "draft_tokens": 8,
        "accepted_tokens": 2,
    }
    assert {name: getattr(snapshot, name) for name in expected} == expected
    assert {name: exposed[f"headrace_{name}_total", ""] for name in expected} == expected
    assert exposed["headrace_pass_seconds_count", ""] == 2
    assert exposed["headrace_pass_seconds_sum", ""] == pytest.approx(0.6)
    assert exposed["headrace_pass_seconds_bucket", "0.25"] == 1


def test_gauges_are_read_where_they_live() -> None:
    queue = ["a", "b"]
    telemetry = _telemetry(Gauges(queued=lambda: len(queue), kv_blocks=lambda: 64))
    assert (telemetry.snapshot().queued, telemetry.snapshot().running, telemetry.snapshot().kv_blocks) == (2, 0, 64)
    queue.clear()
    assert telemetry.snapshot().queued == 0
    assert _exposed(telemetry)["headrace_queued_requests", ""] == 0
    assert _exposed(telemetry)["headrace_kv_blocks", ""] == 64


def test_requests_and_failures_are_counted_by_kind() -> None:
    telemetry = _telemetry()
    for outcome in ("stop", "length", "stop"):
        telemetry.record_request(outcome)
    telemetry.record_failure("CapacityError")
    telemetry.record_first_token(3.0)
    exposed = _exposed(telemetry)
    assert exposed["headrace_requests_total", "stop"] == 2
    assert exposed["headrace_failures_total", "CapacityError"] == 1
    assert exposed["headrace_first_token_seconds_bucket", "2.5"] == 0
    assert exposed["headrace_first_token_seconds_bucket", "5.0"] == 1


def test_a_number_that_prometheus_alone_shows_is_read_when_it_asks() -> None:
    telemetry, queue = _telemetry(), ["a"]
    telemetry.show("letters", "Letters in the queue.", lambda: len(queue))
    queue.append("b")
    assert _exposed(telemetry)["headrace_letters", ""] == 2


def test_a_misspelt_total_is_an_error() -> None:
    with pytest.raises(AttributeError, match="promt_tokens"):
        _telemetry().add(promt_tokens=1)


def test_no_count_is_lost_between_threads() -> None:
    telemetry = _telemetry()

    def count() -> None:
        for _ in range(500):
            telemetry.add(generated_tokens=1)
            telemetry.record_request("stop")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert telemetry.totals.generated_tokens == 2000
    assert _exposed(telemetry)["headrace_requests_total", "stop"] == 2000


def test_the_snapshot_has_the_fields_of_the_status_message_but_for_what_the_server_knows() -> None:
    in_message = set(GetStatusResponse.DESCRIPTOR.fields_by_name) - {"draining"}
    assert set(StatusSnapshot.__dataclass_fields__) == in_message


def test_the_peak_of_memory_follows_what_was_touched() -> None:
    before = peak_rss_bytes()
    held = np.ones(64 * 2**20, dtype=np.uint8)
    assert peak_rss_bytes() >= max(rss_bytes(), held.nbytes)
    assert rss_bytes() > 0
    assert peak_rss_bytes() >= before
