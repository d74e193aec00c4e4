"""Parts are worked on by all cores, with one thread each, and nothing else is changed by it."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from shared.parallel import in_parallel


def test_results_come_in_order_from_threads_in_which_torch_uses_no_others() -> None:
    before = torch.get_num_threads()
    meeting = threading.Barrier(os.cpu_count() or 1)  # passed only if as many parts are worked on at a time

    def work(part: int) -> tuple[int, int, str]:
        meeting.wait()
        return part, torch.get_num_threads(), threading.current_thread().name

    parts = range(3 * meeting.parties)
    results = in_parallel(work, parts)
    assert [part for part, _, _ in results] == list(parts)
    assert {threads for _, threads, _ in results} == {1}
    assert threading.current_thread().name not in {name for _, _, name in results}
    assert torch.get_num_threads() == before
    with_own = threading.Thread(target=lambda: results.append((0, torch.get_num_threads(), "")))
    with_own.start()
    with_own.join()
    assert results[-1][1] == before


def test_the_first_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda part: 1 // part, [1, 0, 2])
