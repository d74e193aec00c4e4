"""Certificates for tests: made by openssl, one for each use, signed by itself."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest


@dataclass(frozen=True)
class Pair:
    """A self-signed certificate and its key."""

    certificate: Path
    key: Path

    def credentials(self) -> Any:
        """A server's, which asks clients for this very certificate."""
        pair, authority = (self.key.read_bytes(), self.certificate.read_bytes()), self.certificate.read_bytes()
        return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=True)


def self_signed(folder: Path, name: str = "headrace.test") -> Pair:
    """A certificate for a DNS name, in files of that folder; skips the test where openssl is missing."""
    if not shutil.which("openssl"):
        pytest.skip("making certificates needs the openssl program")
    made = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} "
        f"-addext subjectAltName=DNS:{name} -keyout {made.key} -out {made.certificate}"
    )
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return made
