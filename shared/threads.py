"""How compute threads wait for work. To be set before torch loads OpenMP, hence free of imports."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Lets idle compute threads sleep rather than spin, unless the environment says otherwise.

    Arithmetic shares its cores with readers, gRPC and, on one machine, the other service. Spinning made two services
    on two cores ten times slower (`docs/design.md`).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
