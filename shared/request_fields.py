"""Checks of fields that requests of both services have. Plain Python."""

from __future__ import annotations

from shared.errors import InvalidRequestError
from shared.logprobs import MAX_TOP_LOGPROBS

LONGEST_NAME = 128
"""Characters of a request's id and of its salt."""
MOST_PRIORITY = 100


def check_name(field: str, text: str) -> None:
    """Raises InvalidRequestError for a request_id or cache_salt that is too long."""
    if len(text) > LONGEST_NAME:
        raise InvalidRequestError(f"{field} has {len(text)} characters; at most {LONGEST_NAME} are allowed")


def check_priority(priority: int) -> None:
    """Raises InvalidRequestError for a priority out of range."""
    if abs(priority) > MOST_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}; it must be from {-MOST_PRIORITY} to {MOST_PRIORITY}")


def check_top_logprobs(count: int) -> None:
    """Raises InvalidRequestError for more alternatives than are reported."""
    if count > MAX_TOP_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}")
