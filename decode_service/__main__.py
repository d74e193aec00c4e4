"""`python -m decode_service PACK --prefill ADDRESS`: one decode replica."""

from __future__ import annotations

import sys

from shared.threads import wait_passively

wait_passively()

from decode_service.service import main  # noqa: E402  torch is loaded here, after the line above

if __name__ == "__main__":
    sys.exit(main())
