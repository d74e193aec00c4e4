"""Runs a benchmark by its name, with errors that say what to do: `python -m bench NAME …`."""

from __future__ import annotations

import runpy
import sys

from shared.errors import ConfigurationError, HeadraceError


def main() -> None:
    """Runs `bench.NAME` as a program."""
    if len(sys.argv) < 2:
        raise SystemExit("name a benchmark; `headrace bench` lists them")
    name = sys.argv.pop(1)
    try:
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        missing = f"bench.{name} needs the package {error.name}, which is not installed"
        print(f"error: {missing}; install headrace[bench] (or headrace[dev] for transformers)", file=sys.stderr)
        sys.exit(2)
    except (HeadraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


if __name__ == "__main__":
    main()
