"""How commands reach services: encrypted or not, proving who calls, and what travels with every call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.client import Client
from headrace.errors import InputError
from headrace.tls import Tls
from shared.config import parse_duration


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options of every command that calls services."""

    tls: Annotated[
        bool,
        typer.Option("--tls", help="Encrypt calls, as the next four options do too."),
    ] = False
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", metavar="PEM", help="Authorities to trust (the system's).")
    ] = None
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="PEM", help="Your own, where services ask; with --key.")
    ] = None
    key: Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Its private key.")] = None
    server_name: Annotated[
        str | None, typer.Option("--server-name", help="The name in the services' certificate, if not the target's.")
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            metavar="NAME=VALUE",
            help="Send it with every call; NAME=@FILE reads a secret that no process list shows; repeatable.",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether any of the options was."""
        return self.encrypts or bool(self.metadata)

    @property
    def encrypts(self) -> bool:
        """Whether calls are encrypted."""
        return self.tls or any(
            given is not None for given in (self.ca_file, self.certificate, self.key, self.server_name)
        )

    def client(self, target: str, timeout: str) -> Client:
        """A client whose calls have that deadline, as users write it.

        Raises:
            InputError: the target or an option cannot be used.
        """
        return Client(target, timeout_s=parse_duration(timeout), tls=self.read_tls(), metadata=self.read_metadata())

    def read_tls(self) -> Tls | None:
        """For clients. None: not encrypted.

        Raises:
            InputError: only one of certificate and key is given, or a file cannot be used.
        """
        if not self.encrypts:
            return None
        found = Tls(ca=self.ca_file, certificate=self.certificate, key=self.key, server_name=self.server_name)
        found.read()  # told before anything is opened
        return found

    def read_metadata(self) -> dict[str, str]:
        """For clients.

        Raises:
            InputError: one is not NAME=VALUE, is given twice, or its file cannot be read; values are not repeated.
        """
        pairs: dict[str, str] = {}
        for number, text in enumerate(self.metadata or (), 1):
            name, equals, value = text.partition("=")
            if not (name and equals):  # what has no "=" may be a secret
                raise InputError(f"--metadata number {number} is not NAME=VALUE or NAME=@FILE")
            if name in pairs:
                raise InputError(f"--metadata {name} is given twice; give it once")
            pairs[name] = _from_file(name, Path(value[1:])) if value.startswith("@") else value
        return pairs


def _from_file(name: str, path: Path) -> str:
    """The file's text, without white space around it: editors end files with a line break."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"--metadata {name}: {path} cannot be read: {reason}") from None
