"""The batch's output file, and the partial one beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.answers import Answers
from headrace.errors import InputError
from headrace.job_input import JobFile, read_jobs

MODEL = "m"


@pytest.fixture
def jobs(tmp_path: Path) -> JobFile:
    return job_file(tmp_path, "abc")


def job_file(folder: Path, names: str, prompt: str = "Water") -> JobFile:
    path = folder / "in.jsonl"
    path.write_text("".join(f'{{"id": "{name}", "prompt": "{prompt}"}}\n' for name in names))
    return read_jobs(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "out.jsonl"


def partial(out: Path) -> Path:
    return out.with_name("out.jsonl.partial")


def errors(out: Path) -> Path:
    return out.with_name("out.errors.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(answers: Answers, name: str, text: str) -> None:
    answers.append("abc".index(name), {"id": name, "text": text}, failed=False)


def fail(answers: Answers, name: str) -> None:
    answers.append("abc".index(name), {"id": name, "error": {"status": "UNAVAILABLE"}}, failed=True)


def kept(answers: Answers) -> str:
    return "".join(name for index, name in enumerate("abc") if index in answers)


def test_answers_are_published_whole_in_the_order_of_the_jobs(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL) as answers:
        for index in (1, 2, 0):
            line = {"id": "abc"[index], "text": "ü\n"}
            answers.append(index, line, failed=False)
            record = {"id": line["id"], "key": jobs.key(index, MODEL), "failed": False, "line": line}
            assert lines(partial(out))[-1] == record
        assert not out.exists()
        answers.publish()
    assert lines(out) == [{"id": name, "text": "ü\n"} for name in "abc"]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_a_second_run_keeps_answers_and_tries_errors_again_if_told_to(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL) as answers:
        append(answers, "a", "one")
        fail(answers, "b")
    with Answers(out, jobs, MODEL) as answers:
        assert (kept(answers), answers.failures, list(answers.pending())) == ("ab", 1, [2])
    with Answers(out, jobs, MODEL, retry_failed=True) as answers:
        assert (kept(answers), answers.failures, list(answers.pending())) == ("a", 0, [1, 2])
        append(answers, "b", "two")
        append(answers, "c", "three")
        answers.publish()
    assert [answer["text"] for answer in lines(out)] == ["one", "two", "three"]
    assert not partial(out).exists()


def test_an_answer_that_came_later_outweighs_the_failure_before_it(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL) as answers:
        fail(answers, "a")
    with Answers(out, jobs, MODEL, retry_failed=True) as answers:
        append(answers, "a", "one")
    with Answers(out, jobs, MODEL) as answers:
        assert (kept(answers), answers.failures) == ("a", 0)


def test_published_errors_leave_the_answers_for_a_run_that_tries_those_alone(out: Path, tmp_path: Path) -> None:
    with Answers(out, job_file(tmp_path, "ab"), MODEL) as answers:
        append(answers, "a", "one")
        fail(answers, "b")
        answers.publish()
    assert ([answer["id"] for answer in lines(out)], [line["id"] for line in lines(errors(out))]) == (["a"], ["b"])
    with Answers(out, job_file(tmp_path, "abc"), MODEL, retry_failed=True) as answers:
        assert kept(answers) == "a"


def test_trying_failures_again_needs_a_run_that_had_some(out: Path, jobs: JobFile) -> None:
    with pytest.raises(InputError, match="nothing to try again"):
        Answers(out, jobs, MODEL, retry_failed=True)


def test_an_old_file_of_errors_does_not_outlive_a_run_without_any(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL) as answers:
        for name in "abc":
            fail(answers, name)
        answers.publish()
    assert (len(lines(errors(out))), out.read_bytes()) == (3, b"")
    with Answers(out, jobs, MODEL, retry_failed=True) as answers:
        for name in "cab":
            append(answers, name, name)
        answers.publish()
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_answers_can_be_published_as_they_were_finished(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL, ordered=False) as answers:
        for name in "cab":
            append(answers, name, name)
        answers.publish()
    assert [answer["id"] for answer in lines(out)] == ["c", "a", "b"]


@pytest.mark.parametrize("tail", ['{"id": "b", "key": "key-b", "te', '{"id": "b"}\n', "\0\0\0\n", "[]\n"])
def test_a_line_that_was_not_finished_is_cut_off(out: Path, jobs: JobFile, tail: str) -> None:
    with Answers(out, jobs, MODEL) as answers:
        append(answers, "a", "one")
    with partial(out).open("a") as file:
        file.write(tail)
    with Answers(out, jobs, MODEL) as answers:
        assert kept(answers) == "a"
        append(answers, "b", "two")
    assert [record["id"] for record in lines(partial(out))] == ["a", "b"]


def test_an_answer_to_another_request_or_from_another_model_does_not_count(
    out: Path, jobs: JobFile, tmp_path: Path
) -> None:
    with Answers(out, jobs, MODEL) as answers:
        append(answers, "a", "one")
        append(answers, "b", "two")
    with Answers(out, jobs, "another") as answers:
        assert kept(answers) == ""
    (tmp_path / "other").mkdir()
    with Answers(out, job_file(tmp_path / "other", "abc", "Wine"), MODEL) as answers:
        assert kept(answers) == ""
    with Answers(out, jobs, MODEL) as answers:
        assert kept(answers) == "ab"


def test_two_runs_cannot_write_the_same_file(out: Path, jobs: JobFile) -> None:
    with Answers(out, jobs, MODEL), pytest.raises(InputError, match="another run"):
        Answers(out, jobs, MODEL)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, jobs: JobFile) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        Answers(tmp_path / "file" / "out.jsonl", jobs, MODEL)
