"""The outlet: a thread fills it without ever waiting, and one coroutine empties it in order."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.errors import CapacityError
from shared.outlet import Outlet


async def drained(outlet: Outlet[int]) -> list[int]:
    return [item async for item in outlet]


async def test_items_come_in_order_and_then_the_stream_ends() -> None:
    outlet = Outlet[int]()
    for item in range(5):
        outlet.put(item)
    outlet.close()
    assert await drained(outlet) == [0, 1, 2, 3, 4]


async def test_an_error_comes_after_the_items_that_were_put_before_it() -> None:
    outlet = Outlet[int]()
    outlet.put(1)
    outlet.put(2)
    outlet.close(CapacityError("no room"))
    reader = outlet.__aiter__()
    assert [await anext(reader), await anext(reader)] == [1, 2]
    with pytest.raises(CapacityError, match="no room"):
        await anext(reader)


async def test_the_first_end_is_the_one_that_counts() -> None:
    outlet = Outlet[int]()
    outlet.close(CapacityError("no room"))
    outlet.close()
    with pytest.raises(CapacityError, match="no room"):
        await drained(outlet)


async def test_pending_is_the_size_of_what_the_reader_has_not_finished_with() -> None:
    outlet = Outlet[str]()
    outlet.put("a", 10)
    outlet.put("b", 5)
    assert outlet.pending == 15
    reader = outlet.__aiter__()
    assert await anext(reader) == "a"
    assert outlet.pending == 15, "an item counts until the reader asks for the next one"
    assert await anext(reader) == "b"
    assert outlet.pending == 5
    outlet.close()
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
    assert outlet.pending == 0


async def test_a_thread_and_a_coroutine_pass_everything_on_in_order() -> None:
    outlet = Outlet[int]()
    count = 20_000

    def produce() -> None:
        for item in range(count):
            outlet.put(item, 3)
        outlet.close()

    thread = threading.Thread(target=produce)
    thread.start()
    assert await drained(outlet) == list(range(count))
    thread.join()
    assert outlet.pending == 0


async def test_a_waiting_reader_wakes_for_each_item_and_for_the_end() -> None:
    outlet = Outlet[int]()
    reader = outlet.__aiter__()
    with ThreadPoolExecutor(1) as engine:
        for item in range(3):
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.get_running_loop().run_in_executor(engine, outlet.put, item)
            assert await waiting == item
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.get_running_loop().run_in_executor(engine, outlet.close)
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_a_reader_that_is_gone_does_not_hold_up_whoever_fills() -> None:
    outlet = Outlet[int]()
    outlet.put(1)
    reader = outlet.__aiter__()
    assert await anext(reader) == 1
    await reader.aclose()
    for item in range(100):
        outlet.put(item, 7)
    outlet.close()
    assert outlet.pending == 701


def test_filling_goes_on_when_the_loop_is_gone() -> None:
    async def make() -> Outlet[int]:
        return Outlet[int]()

    outlet = asyncio.run(make())
    outlet.put(1)
    outlet.close()
    assert outlet.pending == 1
