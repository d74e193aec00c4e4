"""Service processes on this machine: real processes that keep or break the launcher's contract."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.errors import InputError, LocalServiceError
from headrace.local import LocalPlan, LocalServices

FAKE_SERVICE = Path(__file__).with_name("fake_service.py")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.touch()
    return path


def plan(
    journal: Path,
    prefill: str = "good",
    decode: str = "good",
    *,
    prefills: int = 1,
    decodes: int = 1,
    ready_timeout_s: float = 60.0,
    grace_s: float = 60.0,
) -> LocalPlan:
    def command(mode: str) -> tuple[str, ...]:
        return (sys.executable, "-S", str(FAKE_SERVICE), str(journal), mode)

    return LocalPlan(
        pack="PACK",
        memory="1GiB",
        prefills=prefills,
        decodes=decodes,
        draft="self",
        draft_pack="DRAFT",
        draft_length=5,
        prefill_command=command(prefill),
        decode_command=command(decode),
        ready_timeout_s=ready_timeout_s,
        grace_s=grace_s,
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started_pids(journal: Path) -> list[int]:
    return [int(line.split()[2]) for line in journal.read_text().splitlines() if line.split()[1] == "started"]


def test_all_services_run_inside_the_block_and_none_after_it(journal: Path) -> None:
    with LocalServices(plan(journal, prefills=2, decodes=2)) as services:
        assert len(services.prefills) == len(services.decodes) == 2
        assert services.addresses == tuple(f"127.0.0.1:{pid}" for pid in services.pids)
        assert services.target == services.addresses[2:]
        pids = services.pids
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


def test_decode_is_told_where_prefill_is_and_what_to_draft_with(journal: Path) -> None:
    with LocalServices(plan(journal, prefills=2)) as services:
        first, second = (ready.address for ready in services.prefills)
    lines = [line.split(maxsplit=3) for line in journal.read_text().splitlines() if " started " in line]
    common = "--listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory 1GiB"
    assert {arguments for stage, _, _, arguments in lines if stage == "prefill"} == {f"PACK {common}"}
    assert [arguments for stage, _, _, arguments in lines if stage == "decode"] == [
        f"PACK --prefill {first},{second} {common} --draft self --draft-pack DRAFT --draft-length 5"
    ]


def test_every_service_is_told_which_device_computes(journal: Path) -> None:
    with LocalServices(dataclasses.replace(plan(journal), device="cuda:1", device_memory="45%")):
        pass
    started = [line for line in journal.read_text().splitlines() if " started " in line]
    assert len(started) == 2
    assert all("--device cuda:1 --device-memory 45%" in line for line in started)


def test_without_prefill_services_decode_is_told_of_none(journal: Path) -> None:
    with LocalServices(plan(journal, prefills=0)) as services:
        assert (services.prefills, len(services.addresses)) == ((), 1)
    started = [line for line in journal.read_text().splitlines() if " started " in line]
    assert len(started) == 1
    assert "--prefill" not in started[0]


def test_a_plan_without_a_decode_service_is_refused() -> None:
    for counts in ({"decodes": 0}, {"prefills": -1}):
        with pytest.raises(InputError, match="at least one decode service"):
            LocalPlan(pack="PACK", memory="1GiB", **counts)


def test_decode_is_stopped_before_prefill(journal: Path) -> None:
    with LocalServices(plan(journal, decodes=2)):
        pass
    stopped = [line.split()[0] for line in journal.read_text().splitlines() if line.endswith("stopped")]
    assert stopped == ["decode", "decode", "prefill"]


def test_a_service_that_ends_before_it_is_ready_is_an_error_with_its_last_lines(journal: Path) -> None:
    with pytest.raises(LocalServiceError, match=r"decode-0 ended before it was ready, exit code 1(.|\n)*no such layer"):
        LocalServices(plan(journal, decode="fail")).start()
    assert len(started_pids(journal)) == 2
    assert not any(map(is_alive, started_pids(journal)))


def test_a_service_that_is_not_ready_in_time_is_an_error(journal: Path) -> None:
    with pytest.raises(LocalServiceError, match="prefill-0 was not ready in time"):
        LocalServices(plan(journal, "silent", ready_timeout_s=0.0)).start()
    assert not any(map(is_alive, started_pids(journal)))


def test_a_command_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(LocalServiceError, match="cannot run no-such-program: No such file"):
        LocalServices(LocalPlan(pack="PACK", memory="1GiB", prefill_command=("no-such-program",))).start()


def test_a_service_that_outlives_its_grace_time_is_killed_and_reported(journal: Path) -> None:
    services = LocalServices(plan(journal, decode="stubborn", grace_s=0.0))
    services.start()
    with pytest.raises(LocalServiceError, match="decode-0 did not stop within"):
        services.stop()
    assert not any(map(is_alive, services.pids))


def test_an_exit_code_other_than_0_is_reported(journal: Path) -> None:
    with (
        pytest.raises(LocalServiceError, match="prefill-0 ended with exit code 3"),
        LocalServices(plan(journal, "sour")),
    ):
        pass


def test_an_error_inside_the_block_is_not_hidden_by_one_while_stopping(journal: Path) -> None:
    with pytest.raises(ValueError, match="mine"), LocalServices(plan(journal, "sour")):
        raise ValueError("mine")


def test_waiting_ends_when_a_service_ends_by_itself(journal: Path) -> None:
    services = LocalServices(plan(journal, decode="crash"))
    services.start()
    with pytest.raises(LocalServiceError, match=r"decode-0 ended by itself, exit code 1(.|\n)*out of luck"):
        services.wait()
    with pytest.raises(LocalServiceError, match="decode-0 ended with exit code 1"):
        services.stop()


def test_settings_that_cannot_work_are_told_in_the_services_own_words(journal: Path) -> None:
    services = LocalServices(plan(journal, "refuse"))
    with pytest.raises(InputError, match=r"^prefill-0: the budget is too small$"):
        services.start()


def test_one_of_two_services_that_ends_by_itself_is_told_and_leaves_the_rest_running(journal: Path) -> None:
    services = LocalServices(plan(journal, prefills=2))
    services.start()
    os.kill(services.pids[1], signal.SIGKILL)
    while is_alive(services.pids[1]):
        pass
    assert all(map(is_alive, (services.pids[0], services.pids[2])))
    services.stop()
    assert services.lost == ("prefill-1 ended by itself, exit code -9",)


def test_log_lines_are_passed_on_with_the_services_name(journal: Path) -> None:
    lines: list[tuple[str, str]] = []
    with LocalServices(plan(journal), lambda service, line: lines.append((service, line))):
        pass
    assert {("prefill-0", "prefill is loading"), ("decode-0", "decode is loading")} <= set(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
@pytest.mark.parametrize("thread", [False, True], ids=["from the main thread", "from a thread that has ended"])
def test_services_die_with_a_parent_that_is_killed_and_not_before(journal: Path, thread: bool) -> None:
    start = "thread = threading.Thread(target=services.start); thread.start(); thread.join()"
    program = f"""
        import sys, threading
        from tests.headrace.test_local import plan
        from headrace.local import LocalServices
        from pathlib import Path
        services = LocalServices(plan(Path(sys.argv[1])))
        {start if thread else "services.start()"}
        print(*services.pids, flush=True)
        services.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        assert select.select(watched, [], [], 0)[0] == []
        parent.send_signal(signal.SIGKILL)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 60)[0] == [descriptor]
        os.close(descriptor)


def test_ctrl_c_while_starting_leaves_nothing_behind(journal: Path) -> None:
    program = """
        import sys
        from tests.headrace.test_local import plan
        from headrace.local import LocalServices
        from pathlib import Path
        log = lambda service, line: print(line, flush=True)
        LocalServices(plan(Path(sys.argv[1]), decode="silent"), log).start()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        while parent.stdout.readline() != "decode is loading\n":
            pass
        parent.send_signal(signal.SIGINT)
        _, stderr = parent.communicate()
    assert "KeyboardInterrupt" in stderr
    assert len(started_pids(journal)) == 2
    assert not any(map(is_alive, started_pids(journal)))
