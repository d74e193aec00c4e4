"""Which repetitions of `bench.forecast` count, and what is told of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.disturbance import Watch
from bench.forecast_result import Pilot, Repetition, Result
from bench.services import Started

PILOT = Pilot(prompt_tokens=300, shared_tokens=160, draft_length=0, acceptance=0.0, tokens_a_pass=1.0)


def repetition(before_s: float, after_s: float, measured_s: float) -> Repetition:
    return Repetition(before_s, after_s, measured_s, tokens_a_pass=1.0, others_share=0.0)


def result(*repetitions: Repetition) -> Result:
    return Result(
        arrangement="together",
        draft="none",
        memory="1GiB",
        reports=32,
        output_tokens=120,
        pilot=PILOT,
        draft_length=0,
        at_once=16,
        resident_layers=4,
        bound_by="arithmetic",
        repetitions=repetitions,
    )


def test_a_job_is_held_against_the_mean_of_the_forecasts_around_it() -> None:
    assert repetition(1.0, 1.1, 2.1).ratio == pytest.approx(2.0)


def test_repetitions_in_which_the_machine_changed_are_dropped_and_the_middle_of_the_others_counts() -> None:
    steady = [repetition(1.0, 1.1, measured_s) for measured_s in (1.3, 1.0, 1.2)]
    found = result(repetition(1.0, 2.0, 9.0), *steady)
    assert found.steady == steady
    assert found.middle.measured_s == 1.2
    assert found.changed == pytest.approx(2.0)


def test_where_the_machine_always_changed_the_middle_is_still_told_but_none_is_steady() -> None:
    found = result(*(repetition(1.0, 2.0, measured_s) for measured_s in (1.0, 2.0, 3.0)))
    assert (found.steady, found.middle.measured_s) == ([], 2.0)


def test_others_are_those_that_the_measurement_does_not_know() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        known, unknown = Watch([lambda: Started("", child.pid).processor_s]), Watch([])
        assert child.stdout is not None
        child.stdout.readline()
        assert unknown.others_share() > known.others_share()
        child.communicate(b"\n")
