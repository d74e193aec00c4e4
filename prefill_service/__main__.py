"""`python -m prefill_service PACK`: one prefill replica."""

from __future__ import annotations

import sys

from shared.allocator import share_one_heap
from shared.threads import wait_passively

share_one_heap()
wait_passively()

from prefill_service.service import main  # noqa: E402  torch is loaded here, after the lines above

if __name__ == "__main__":
    sys.exit(main())
