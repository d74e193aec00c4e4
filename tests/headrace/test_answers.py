"""The batch's output file, and the partial one beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.answers import Answers
from headrace.errors import InputError

KEYS = {"a": "key-a", "b": "key-b", "c": "key-c"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "out.jsonl"


def partial(out: Path) -> Path:
    return out.with_name("out.jsonl.partial")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_published_whole_in_the_order_of_the_jobs(out: Path) -> None:
    with Answers(out, KEYS) as answers:
        for name in "bca":
            answers.append({"id": name, "text": f"{name} ü\n"})
            assert lines(partial(out))[-1] == {"id": name, "text": f"{name} ü\n", "key": f"key-{name}"}
        assert not out.exists()
        answers.publish()
    assert lines(out) == [{"id": name, "text": f"{name} ü\n"} for name in "abc"]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_a_second_run_keeps_answers_and_tries_errors_again(out: Path) -> None:
    with Answers(out, KEYS) as answers:
        answers.append({"id": "a", "text": "one"})
        answers.append({"id": "b", "error": {"status": "UNAVAILABLE", "message": "down"}})
    with Answers(out, KEYS) as answers:
        assert list(answers) == [{"id": "a", "text": "one"}]
        answers.append({"id": "b", "text": "two"})
        answers.append({"id": "c", "text": "three"})
        answers.publish()
    assert [answer["text"] for answer in lines(out)] == ["one", "two", "three"]
    assert not partial(out).exists()


def test_published_errors_leave_the_answers_for_a_run_that_tries_those_alone(out: Path) -> None:
    with Answers(out, {"a": "key-a", "b": "key-b"}) as answers:
        answers.append({"id": "a", "text": "one"})
        answers.append({"id": "b", "error": {}})
        answers.publish()
    assert [answer["id"] for answer in lines(out)] == ["a", "b"]
    with Answers(out, KEYS) as answers:
        assert [answer["id"] for answer in answers] == ["a"]


@pytest.mark.parametrize("tail", ['{"id": "b", "key": "key-b", "te', '{"id": "b"}\n', "\0\0\0\n", "[]\n"])
def test_a_line_that_was_not_finished_is_cut_off(out: Path, tail: str) -> None:
    with Answers(out, KEYS) as answers:
        answers.append({"id": "a", "text": "one"})
    with partial(out).open("a") as file:
        file.write(tail)
    with Answers(out, KEYS) as answers:
        assert [answer["id"] for answer in answers] == ["a"]
        answers.append({"id": "b", "text": "two"})
    assert [record["id"] for record in lines(partial(out))] == ["a", "b"]


def test_an_answer_to_another_request_or_from_another_model_does_not_count(out: Path) -> None:
    with Answers(out, KEYS) as answers:
        answers.append({"id": "a", "text": "one"})
        answers.append({"id": "b", "text": "two"})
    with Answers(out, {**KEYS, "b": "changed"}) as answers:
        assert [answer["id"] for answer in answers] == ["a"]


def test_two_runs_cannot_write_the_same_file(out: Path) -> None:
    with Answers(out, KEYS), pytest.raises(InputError, match="another run"):
        Answers(out, KEYS)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        Answers(tmp_path / "file" / "out.jsonl", KEYS)
