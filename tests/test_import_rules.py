"""The layers of the code: who may import whom.

    prefill_service, decode_service ──▶ shared ──▶ headrace.v1 (generated)
    headrace (client, command line) ──▶ shared

Imports inside functions count like all others; those for type checkers only do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("headrace", "shared", "prefill_service", "decode_service")

MAY_IMPORT = {
    "shared": ("shared", "headrace.v1"),
    "prefill_service": ("prefill_service", "shared", "headrace.v1"),
    "decode_service": ("decode_service", "shared", "headrace.v1"),
    "headrace": ("headrace", "shared"),
}

EDGE = (
    "headrace.v1*",
    "headrace.client*",
    "shared.wire",
    "shared.speed_handoff",
    "shared.server",
    "shared.calls",
    "*_service.__main__",
    "*_service.service",
    "*_service.servicer",
    "decode_service.requests*",
    "decode_service.prefill_client*",
    "decode_service.replicas",
    "decode_service.scoring",
)
"""The only modules that may touch gRPC or protobuf."""
RPC = ("grpc", "google", "grpc_health", "grpc_reflection", "grpc_status", "headrace.v1")

POLICY = (
    "shared.errors",
    "shared.forecast",
    "shared.config",
    "shared.allocator",
    "shared.blocks",
    "shared.limits",
    "shared.shift",
    "shared.process",
    "shared.streaming.plan",
    "shared.streaming.device_plan",
    "decode_service.scheduler",
    "decode_service.sequence",
    "decode_service.speculation.acceptance",
    "decode_service.speculation.ngram",
    "decode_service.text",
    "prefill_service.gathering",
    "prefill_service.scheduler",
    "prefill_service.prompt_cache",
)
"""Plain Python: decisions without tensors or messages."""


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_edge(module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in EDGE)


@cache
def _imports(module: str) -> frozenset[str]:
    """Full names of the modules that a module imports; for a member of a module, the module."""
    return frozenset(_imported_names(ast.parse(MODULES[module].read_text()), module))


def _imported_names(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{module} imports relatively; write the full name"
        for alias in node.names:
            member = f"{node.module}.{alias.name}"
            yield member if member in MODULES else str(node.module)
    for child in children:
        yield from _imported_names(child, module)


def _reachable(module: str) -> dict[str, str]:
    """Everything that is imported with a module, our own and foreign -> how it is reached."""
    paths, open_modules = {module: module}, [module]
    while open_modules:
        current = open_modules.pop()
        packages = [name for name in _enclosing(current) if name in MODULES]
        for name in (*packages, *(_imports(current) if current in MODULES else ())):
            if name not in paths:
                paths[name] = f"{paths[current]} → {name}"
                open_modules.append(name)
    return paths


def _enclosing(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downward(package: str) -> None:
    modules = [module for module in MODULES if _within(module, (package,)) and not module.startswith("headrace.v1")]
    upward = [
        f"{module} imports {name}"
        for module in modules
        for name in sorted(_imports(module))
        if _within(name, PACKAGES) and not _within(name, MAY_IMPORT[package])
    ]
    assert upward == []


def test_only_the_edge_touches_grpc_and_protobuf() -> None:
    inside = [
        f"{module} imports {name}"
        for module in MODULES
        if not _is_edge(module)
        for name in sorted(_imports(module))
        if _within(name, RPC)
    ]
    assert inside == []


@pytest.mark.parametrize("module", POLICY)
def test_policy_is_plain_python(module: str) -> None:
    reached = _reachable(module)
    assert [path for name, path in reached.items() if _within(name, ("torch", *RPC))] == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("headrace.client")])
def test_the_client_needs_no_torch(module: str) -> None:
    assert [path for name, path in _reachable(module).items() if _within(name, ("torch",))] == []


def test_importing_policy_and_client_really_loads_no_torch() -> None:
    clients = [name for name in MODULES if name.startswith("headrace.client")]
    program = (
        "import importlib, sys\n"
        f"for name in {[*POLICY]}: importlib.import_module(name)\n"
        "assert 'grpc' not in sys.modules and 'google.protobuf' not in sys.modules\n"
        f"for name in {clients}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
