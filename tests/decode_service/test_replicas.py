"""Which replicas there are: names resolved again and again, and who is set aside for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode_service.replicas import FAILED_ASIDE_S, MISMATCHED_ASIDE_S, RESOLVE_S, Replica, Replicas
from decode_service.resolver import Target, resolve
from shared.errors import ConfigurationError, UnavailableError
from tests.end_to_end.stack import until


class Fleet:
    """Names and a clock that a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.problems: list[str] = []
        self.look_ups = 0
        self.now_s = 100.0

    async def look_up(self, targets: Sequence[Target]) -> tuple[dict[str, str], list[str]]:
        self.look_ups += 1
        return dict.fromkeys(self.addresses, ""), list(self.problems)

    def replicas(self) -> Replicas:
        return Replicas(
            ["dns:///prefill:1"],
            sample=lambda replicas, count: list(replicas[:count]),
            look_up=self.look_up,
            clock=lambda: self.now_s,
        )


async def addresses_of(replicas: Replicas) -> list[str]:
    return [replica.address for replica in await replicas.known()]


async def test_new_replicas_are_found_and_old_ones_forgotten_without_any_call_waiting() -> None:
    fleet = Fleet("127.0.0.1:1", "127.0.0.1:2")
    replicas = fleet.replicas()
    assert await addresses_of(replicas) == ["127.0.0.1:1", "127.0.0.1:2"]
    fleet.addresses = ["127.0.0.1:2", "127.0.0.1:3"]
    assert await addresses_of(replicas) == ["127.0.0.1:1", "127.0.0.1:2"]
    fleet.now_s += RESOLVE_S
    await replicas.known()
    await until(lambda: fleet.look_ups == 2)
    assert await addresses_of(replicas) == ["127.0.0.1:2", "127.0.0.1:3"]
    assert fleet.look_ups == 2
    await replicas.close()


async def test_a_failure_makes_it_look_again_soon() -> None:
    fleet = Fleet("127.0.0.1:1")
    replicas = fleet.replicas()
    await replicas.known()
    replicas.look_again()
    fleet.now_s += 1.0
    fleet.addresses = ["127.0.0.1:2"]
    replicas.look_again()
    await until(lambda: fleet.look_ups == 2)
    assert await addresses_of(replicas) == ["127.0.0.1:2"]
    await replicas.close()


async def test_where_a_name_has_no_answer_now_those_of_before_stay(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("127.0.0.1:1")
    replicas = fleet.replicas()
    await replicas.known()
    fleet.addresses, fleet.problems = [], ["dns:///prefill:1 cannot be resolved: try again"]
    for look_ups in (2, 3):
        fleet.now_s += RESOLVE_S
        assert await addresses_of(replicas) == ["127.0.0.1:1"]
        await until(lambda: fleet.look_ups == look_ups)  # noqa: B023
    assert caplog.messages == ["prefill replicas: dns:///prefill:1 cannot be resolved: try again"]
    await replicas.close()


async def test_a_name_without_any_address_is_unavailable_and_says_why() -> None:
    fleet = Fleet()
    fleet.problems = ["dns:///prefill:1 cannot be resolved: unknown"]
    with pytest.raises(UnavailableError, match="cannot be resolved: unknown"):
        await fleet.replicas().known()


async def test_who_failed_or_does_not_fit_is_asked_last_for_a_while() -> None:
    fleet = Fleet("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    replicas = fleet.replicas()
    first, second, third = await replicas.known()

    async def order() -> list[Replica]:
        untried, chosen = [first, second, third], []
        while untried:
            chosen.append(await replicas.least_busy(untried))
            untried.remove(chosen[-1])
        return chosen

    # Nobody answers at these addresses, so asking two of them for their load sets both aside.
    first.mismatched("another model")
    second.failed("killed")
    assert (await order())[0] is third
    fleet.now_s += FAILED_ASIDE_S
    assert not second.is_aside
    assert first.is_aside
    fleet.now_s += MISMATCHED_ASIDE_S
    assert not first.is_aside
    await replicas.close()


async def test_load_is_what_a_replica_said_and_what_was_sent_since() -> None:
    fleet = Fleet()
    replica = Replica("127.0.0.1:1", lambda: fleet.now_s, channel=None)
    with replica.calling(10):
        replica._asked_s, replica._queued_tokens = fleet.now_s, 10
        assert replica.load_tokens == 10
        fleet.now_s += 0.1
        with replica.calling(7):
            assert (replica.load_tokens, replica.calls) == (17, 2)
    assert (replica.load_tokens, replica.calls) == (10, 0)


async def test_every_form_of_target_becomes_addresses_and_keeps_the_name_that_certificates_show() -> None:
    texts = [
        "127.0.0.1:5",
        "[::1]:6",
        "dns:///127.0.0.1:7",
        "unix:/run/prefill.sock",
        "ipv4:127.0.0.1:8",
        "127.0.0.1:5",
        "dns:///localhost:9",
    ]
    expected = ["127.0.0.1:5", "[::1]:6", "127.0.0.1:7", "unix:/run/prefill.sock", "ipv4:127.0.0.1:8"]
    addresses, problems = await resolve([Target.parse(text) for text in texts])
    assert (list(addresses)[:5], problems) == (expected, [])
    assert [addresses[address] for address in expected] == [""] * 5
    assert addresses["127.0.0.1:9"] == "localhost"


async def test_a_name_that_cannot_be_resolved_is_a_problem_with_its_name() -> None:
    addresses, (problem,) = await resolve([Target.parse("127.0.0.1:5"), Target.parse("no.such.name.invalid:1")])
    assert list(addresses) == ["127.0.0.1:5"]
    assert problem.startswith("no.such.name.invalid:1 cannot be resolved: ")


@pytest.mark.parametrize(
    "text", ["", "prefill", "prefill:", "prefill:0", "prefill:70000", "dns://8.8.8.8/prefill:1", ":5"]
)
def test_what_is_no_target_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a prefill target; write host:port, dns:///name:port"):
        Target.parse(text)
