"""What `import headrace` costs and offers."""

from __future__ import annotations

import subprocess
import sys

import headrace


def test_every_public_name_is_there() -> None:
    assert all(getattr(headrace, name).__name__ == name for name in headrace.__all__)
    assert dir(headrace) == sorted(headrace.__all__)


def test_the_clients_load_no_torch_and_the_package_alone_loads_nothing() -> None:
    program = (
        "import sys, headrace\n"
        "assert not [name for name in sys.modules if name.startswith(('headrace.', 'shared', 'grpc'))]\n"
        "from headrace import AsyncClient, Client\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
