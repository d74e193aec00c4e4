"""Every command that calls services: encrypted, with a certificate of its own, and with metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from tests.certificates import Pair, self_signed
from tests.headrace.fake_decode import FakeDecode, served
from tests.headrace.processes import run

SECRET = "Bearer s3cret"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return self_signed(tmp_path_factory.mktemp("tls"))


def proofs(pair: Pair) -> list[str]:
    own = ["--certificate", str(pair.certificate), "--key", str(pair.key)]
    return ["--tls", "--ca-file", str(pair.certificate), *own, "--server-name", "headrace.test"]


@pytest.fixture(params=["generate", "score", "batch", "status"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A command without its target."""
    jobs = tmp_path / "in.jsonl"
    jobs.write_text(json.dumps({"id": "j", "prompt": "Water"}) + "\n")
    return {
        "generate": ["generate", "Water", "--target"],
        "score": ["score", "Water", "--target"],
        "batch": ["batch", str(jobs), str(tmp_path / "out.jsonl"), "--target"],
        "status": ["status"],
    }[request.param]


async def test_commands_talk_over_tls_prove_who_they_are_and_send_metadata_with_every_call(
    command: list[str], pair: Pair, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    sent = ["--metadata", f"authorization=@{token}", "--metadata", "x-team=a=b"]
    fake = FakeDecode()
    async with served(fake, pair.credentials()) as address:
        code, _, stderr = await run("-v", *command, address, *proofs(pair), *sent)
    assert code == 0, stderr
    assert fake.metadata
    assert {(each["authorization"], each["x-team"]) for each in fake.metadata} == {(SECRET, "a=b")}


async def test_who_cannot_prove_itself_gets_an_error_of_one_line_without_secrets(pair: Pair) -> None:
    fake = FakeDecode()
    async with served(fake, pair.credentials()) as address:
        arguments = ["--target", address, "--metadata", f"authorization={SECRET}", "--timeout", "1s"]
        code, stdout, stderr = await run("generate", "Water", *arguments, "--ca-file", str(pair.certificate))
    assert (code, stdout, fake.requests) == (1, "", [])
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert "s3cret" not in stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--certificate", "c.pem"), "a client certificate needs its key"),
        (("--ca-file", "absent.pem"), "cannot read absent.pem: No such file"),
        (("--metadata", "s3cret"), "--metadata number 1 is not NAME=VALUE"),
        (("--metadata", "=s3cret"), "--metadata number 1 is not NAME=VALUE"),
        (("--metadata", "a=1", "--metadata", "a=s3cret"), "--metadata a is given twice"),
        (("--metadata", "a=@absent"), "--metadata a: absent cannot be read: No such file"),
        (("--metadata", "Authorization=s3cret"), "a name has lower-case letters"),
        (("--metadata", "a=s3cret\n"), "must be printable ASCII"),
    ],
)
def test_options_that_cannot_work_are_told_before_anything_is_called(
    command: list[str], arguments: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, [*command, "127.0.0.1:1", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert "s3cret" not in result.stderr
