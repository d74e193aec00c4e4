"""Which passes are run before the first request, and which of them are learned from."""

from __future__ import annotations

from decode_service.warm_up import WARM_UP_S, warm_up


class Machine:
    """Passes that take so many seconds for each row, and twice that the first time."""

    def __init__(self, row_s: float) -> None:
        self.row_s, self.now_s = row_s, 0.0
        self.ran: list[int] = []
        self.learned: list[tuple[int, float]] = []

    def run(self, rows: int) -> None:
        self.now_s += rows * self.row_s * (1 if rows in self.ran else 2)
        self.ran.append(rows)

    def warm_up(self, most_rows: int) -> None:
        warm_up(self.run, most_rows, lambda rows, s: self.learned.append((rows, s)), lambda: self.now_s)


def test_every_size_is_learned_twice_but_not_what_its_first_pass_took() -> None:
    machine = Machine(row_s=2**-20)
    machine.warm_up(100)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert sorted(machine.ran) == sorted(3 * sizes)
    assert sorted(machine.learned) == sorted(2 * [(rows, rows * machine.row_s) for rows in sizes])


def test_small_sizes_come_first_where_time_is_short() -> None:
    machine = Machine(row_s=WARM_UP_S / 16)
    machine.warm_up(128)
    assert machine.ran == [1, 1, 2, 2, 4]
    assert [rows for rows, _ in machine.learned] == [1, 2]


def test_a_pass_that_takes_long_is_run_once() -> None:
    machine = Machine(row_s=WARM_UP_S)
    machine.warm_up(128)
    assert machine.ran == [1]
    assert machine.learned == []
