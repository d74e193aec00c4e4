"""`python -m prefill_service PACK`: one prefill replica."""

from __future__ import annotations

import sys

from shared.threads import wait_passively

wait_passively()

from prefill_service.service import main  # noqa: E402  torch is loaded here, after the line above

if __name__ == "__main__":
    sys.exit(main())
