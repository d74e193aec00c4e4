"""Command-line options that both services share, and the process around them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from shared.config import parse_address, parse_bytes
from shared.errors import HeadraceError
from shared.process import LOG_LEVELS, exit_with_parent, setup_logging
from shared.server import ServerOptions, TlsFiles

VERIFY_HELP = "compare a layer's digest when it is new or has changed, or whenever it is read (%(default)s)"
DEVICE_HELP = "what computes; CUDA has not been tried on a GPU yet (%(default)s)"
CONFIGURATION_EXIT = 2
"""Exit code when the settings cannot work."""


def service_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options of every service."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("pack", type=Path, metavar="PACK", help="folder made by `headrace pack`")
    add = parser.add_argument
    add("--memory", default="50%", metavar="SIZE", help="budget of this process, as in 2GiB or 800MB (%(default)s)")
    add("--device", default="cpu", metavar="cpu|cuda|cuda:N", help=DEVICE_HELP)
    add("--device-memory", metavar="SIZE", help="budget on that device, as in 20GiB or 80%% (90%%)")
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0 takes a free one (%(default)s)")
    add("--metrics", default="127.0.0.1:0", metavar="HOST:PORT|off", help="Prometheus endpoint (%(default)s)")
    add("--context-length", type=positive, metavar="TOKENS", help="longest sequence served (the model's)")
    add("--queue-limit", type=positive, default=1024, metavar="N", help="most waiting requests (%(default)s)")
    add("--threads", type=positive, default=os.cpu_count(), metavar="N", help="compute threads (%(default)s)")
    add("--verify", choices=("first", "always"), default="first", help=VERIFY_HELP)
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="for calls in flight when stopped (%(default)s)")
    add("--tls-certificate", type=Path, metavar="PEM")
    add("--tls-key", type=Path, metavar="PEM")
    add("--tls-client-ca", type=Path, metavar="PEM", help="clients must show a certificate signed by it")
    add("--show-runtime", action="store_true", help="print what this process takes without weights, and exit")
    add("--log-level", choices=LOG_LEVELS, default="info")
    add("--exit-with-parent", action="store_true", help="stop when the launching process dies")
    return parser


def server_options(arguments: argparse.Namespace) -> ServerOptions:
    """Where and how to listen.

    Raises:
        ConfigurationError: an address cannot be read.
    """
    tls = None
    if arguments.tls_certificate and arguments.tls_key:
        tls = TlsFiles(certificate=arguments.tls_certificate, key=arguments.tls_key, client_ca=arguments.tls_client_ca)
    return ServerOptions(
        address=parse_address(arguments.listen),
        metrics_address=None if arguments.metrics == "off" else parse_address(arguments.metrics),
        tls=tls,
        grace_s=arguments.grace,
    )


def run_service(
    parser: argparse.ArgumentParser, serve: Callable[[argparse.Namespace], Awaitable[None]], argv: list[str] | None
) -> int:
    """Parses, serves until told to stop, and returns the exit code; errors are one line on stderr."""
    arguments = parser.parse_args(argv)
    if bool(arguments.tls_certificate) != bool(arguments.tls_key):
        parser.error("--tls-certificate and --tls-key go together")
    if arguments.exit_with_parent:
        exit_with_parent()
    setup_logging(arguments.log_level)
    # What the imports made lives for ever: a full collection over it would stop readers and engine for 0.1 s.
    gc.freeze()
    try:
        asyncio.run(_serve(serve, arguments))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION_EXIT
    return 0


async def _serve(serve: Callable[[argparse.Namespace], Awaitable[None]], arguments: argparse.Namespace) -> None:
    arguments.memory_bytes = parse_bytes(arguments.memory)
    await serve(arguments)


def positive(text: str) -> int:
    """Reads a number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
