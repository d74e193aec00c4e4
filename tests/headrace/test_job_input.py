"""The batch's input file."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import InputError
from headrace.job_input import Job, read_jobs

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
    assert read_jobs(path) == (
        Job("a", {"prompt": "Water", "max_tokens": 3, "stop": "."}),
        Job("b", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "seed": 1}),
        Job("c", {"token_ids": [1, 2], "stop_token_ids": [7], "top_k": 2, "top_p": 0.9, "stop": ["x", "y"]}),
    )


def test_token_ids_that_name_fields_of_logit_bias_become_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, '{"id": "a", "prompt": "x", "logit_bias": {"0": -100, "319": 2.5}, "min_tokens": 2}')
    assert read_jobs(path) == (Job("a", {"prompt": "x", "logit_bias": {0: -100, 319: 2.5}, "min_tokens": 2}),)


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
