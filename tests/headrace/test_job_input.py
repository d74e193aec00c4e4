"""The batch's input file."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from headrace import job_input
from headrace.errors import InputError
from headrace.job_input import INDEX_BYTES, read_jobs
from headrace.job_line import Job

EXAMPLES = Path(__file__).parents[2] / "examples"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_messages_and_token_ids_are_read_with_their_options(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '\ufeff{"id": "a", "prompt": "Water", "max_tokens": 3, "stop": "."}',
        "",
        '{"id": "b", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "seed": 1}',
        '{"id": "c", "token_ids": [1, 2], "stop_token_ids": [7], "top_k": 2, "top_p": 0.9, "stop": ["x", "y"]}',
    )
    assert tuple(read_jobs(path)) == (
        Job("a", {"prompt": "Water", "max_tokens": 3, "stop": "."}),
        Job("b", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "seed": 1}),
        Job("c", {"token_ids": [1, 2], "stop_token_ids": [7], "top_k": 2, "top_p": 0.9, "stop": ["x", "y"]}),
    )


def test_token_ids_that_name_fields_of_logit_bias_become_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "a", "prompt": "x", "logit_bias": {"0": -100, "319": 2.5}, "min_tokens": 2}')
    assert tuple(read_jobs(path)) == (Job("a", {"prompt": "x", "logit_bias": {0: -100, 319: 2.5}, "min_tokens": 2}),)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"prompt": "x"}', 'needs an "id"'),
        ('{"id": 3, "prompt": "x"}', 'needs an "id"'),
        ('{"id": "b"}', "exactly one of prompt, messages and token_ids"),
        ('{"id": "b", "prompt": "x", "max_new_tokens": 3}', "unknown field 'max_new_tokens'"),
        ('{"id": "b", "prompt": "x", "temperature": NaN}', "temperature must be"),
        ('{"id": "b", "prompt": "x", "logit_bias": {"x": 1}}', "logit_bias must be"),
        ('{"id": "b", "prompt": "x", "logit_bias": {"01": 1}}', "logit_bias must be"),
        ('{"id": "a", "prompt": "x"}', "id 'a' is taken by line 1"),
        ('{"id": "%s", "prompt": "x"}' % ("b" * 129), "at most 128"),
    ],
)
def test_a_faulty_line_is_named_by_its_number(tmp_path: Path, line: str, fault: str) -> None:
    with pytest.raises(InputError, match=rf"line 2: .*{fault}"):
        read_jobs(written(tmp_path, '{"id": "a", "prompt": "x"}', line))


def test_text_that_is_not_utf8_is_a_faulty_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "\xff"}\n')
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        read_jobs(path)


def test_all_faulty_lines_are_told_together_up_to_a_screenful(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"25 faulty line(.|\n)*line 20: (.|\n)*and 5 more$") as error:
        read_jobs(written(tmp_path, *["{"] * 25))
    assert "line 21" not in str(error.value)


def test_a_missing_and_an_empty_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_jobs(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="has no jobs"):
        read_jobs(written(tmp_path, ""))


def test_every_repeated_id_is_told_with_the_line_that_took_it_first(tmp_path: Path) -> None:
    lines = [json.dumps({"id": name, "prompt": "x"}) for name in "abaccb"]
    with pytest.raises(InputError) as error:
        read_jobs(written(tmp_path, *lines))
    assert str(error.value).splitlines()[1:] == [
        "  line 3: id 'a' is taken by line 1; make ids unique",
        "  line 5: id 'c' is taken by line 4; make ids unique",
        "  line 6: id 'b' is taken by line 2; make ids unique",
    ]


def test_jobs_are_found_by_their_ids(tmp_path: Path) -> None:
    jobs = read_jobs(written(tmp_path, *[json.dumps({"id": f"j{number}", "prompt": "x"}) for number in range(50)]))
    assert [jobs.find(f"j{number}") for number in range(50)] == list(range(50))
    assert jobs.find("j50") is None
    assert jobs.key(7, "m") == jobs[7].key("m")


def test_memory_follows_the_number_of_lines_and_not_what_they_say(tmp_path: Path) -> None:
    """A million lines take 40 MB at most, whatever their length; counted here for 8,000 lines of 1 kB."""
    count = 8_000
    path, filling = tmp_path / "in.jsonl", "x" * 1000
    with path.open("w") as file:
        file.writelines(json.dumps({"id": f"j{number}", "prompt": filling}) + "\n" for number in range(count))
    tracemalloc.start()
    try:
        jobs = read_jobs(path)
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(jobs) == count
    assert held_bytes < INDEX_BYTES * count + 64_000
    assert peak_bytes < 2 * INDEX_BYTES * count + 64_000 < path.stat().st_size / 10


def test_a_line_that_changed_since_it_was_checked_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "a", "prompt": "x"}', '{"id": "b", "prompt": "x"}')
    jobs = read_jobs(path)
    path.write_text(path.read_text().replace('"b", "prompt": "x"', '"b", "prompt": "y"'))
    assert jobs[0].id == "a"
    with pytest.raises(InputError, match="line 2 of .* changed while the batch ran"):
        jobs[1]
    path.unlink()
    with pytest.raises(InputError, match="any more"):
        jobs[0]


def test_a_line_that_no_request_can_be_is_refused_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_input, "LONGEST_LINE_BYTES", 1 << 20)
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "%s"}\n{"id": "b", "prompt": "x"}\n{' % ("x" * (5 << 20)))
    with pytest.raises(InputError, match=r"2 faulty line(.|\n)*line 1: longer than 1 MiB(.|\n)*line 3: not JSON"):
        read_jobs(path)


def test_a_pipe_is_refused_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        read_jobs(tmp_path / "pipe")


def test_a_key_tells_requests_and_models_apart() -> None:
    job = Job("a", {"prompt": "Water", "max_tokens": 3})
    assert job.key("m") == Job("a", {"max_tokens": 3, "prompt": "Water"}).key("m")
    assert len({job.key("m"), job.key("n"), Job("b", job.options).key("m"), Job("a", {"prompt": "x"}).key("m")}) == 4


def test_the_example_reports_are_sound() -> None:
    jobs = read_jobs(EXAMPLES / "reports.jsonl")
    assert len(jobs) >= 24
    for job in jobs:
        system, user = job.options["messages"]
        assert system == jobs[0].options["messages"][0]
        assert 90 <= len(user["content"].split("\n\n")[1].split()) <= 220
        assert (job.options["max_tokens"], job.options["temperature"]) == (64, 0)
