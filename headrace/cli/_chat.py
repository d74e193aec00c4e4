"""A conversation on the terminal: a line is a turn, and every answer sees all turns before it."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from headrace.cli import _options as options
from headrace.client import Client
from headrace.errors import CallError
from headrace.request import Request, RequestOptions

_HELP = "a line is a message; Ctrl-C stops an answer, /new starts over, Ctrl-D or /exit ends"


def converse(client: Client, settings: RequestOptions, opening: list[dict[str, str]]) -> None:
    """Answers lines of standard input until it ends. What was not answered to its end is no part of the history.

    Args:
        settings: of every answer.
        opening: messages before the first turn.

    Raises:
        InvalidRequest: the settings cannot be served, whatever is said.
        CallError: a call failed, where nobody sits at the terminal who could go on.
        KeyboardInterrupt: Ctrl-C while no answer is on its way.
    """
    first: RequestOptions = {**settings, "messages": [*opening, {"role": "user", "content": ""}]}
    Request(**first)  # refused before anything is typed
    signal.signal(signal.SIGTERM, _leave)
    interactive = sys.stdin.isatty()
    if interactive:
        options.messages.print(_HELP, style="dim")
    history = list(opening)
    while (said := _read_turn(interactive)) is not None:
        if said == "/new":
            history = list(opening)
            continue
        asked = [*history, {"role": "user", "content": said}]
        try:
            history = [*asked, {"role": "assistant", "content": _stream(client, settings, asked)}]
        except KeyboardInterrupt:
            options.messages.print("\nstopped; your message is dropped", style="dim")
        except CallError as error:
            if not interactive:
                raise
            options.messages.print(f"error: {error}; your message is dropped", style="red", markup=False)


def _read_turn(interactive: bool) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip()


def _stream(client: Client, settings: RequestOptions, messages: list[dict[str, str]]) -> str:
    text = []
    asked: RequestOptions = {**settings, "messages": messages}
    with client.generate(**asked) as generation:
        for chunk in generation:
            print(chunk.text, end="", flush=True)
            text.append(chunk.text)
    print(flush=True)
    return "".join(text)


def _leave(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the conversation, where Ctrl-C ends an answer."""
    sys.exit(130)
