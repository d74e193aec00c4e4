"""Writes `docs/api.md` from the protos and their comments: `python docs/api_from_protos.py [OUT]` (`make docs`)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PACKAGE = ".headrace.v1."
FILES = ("decode", "prefill", "kv_cache", "logprobs", "status")
"""In reading order: what users call first."""
BEGIN = """# The API

Made from `protos/headrace/v1` by `make docs`; the comments there are the source. Health and reflection are gRPC's own
(`grpc.health.v1`, `grpc.reflection.v1alpha`). How to call it: [the client library](client.md), or the stubs of any
language (`examples/stub_client.py`, `examples/node`).

Status codes carry `google.rpc.ErrorInfo`; messages say what was wrong, what was found, and what to do.
"""
# Numbers of fields in descriptor.proto: a comment's path consists of them and of positions.
FILE_MESSAGES, FILE_ENUMS, FILE_SERVICES = 4, 5, 6
SERVICE_METHODS, MESSAGE_FIELDS, MESSAGE_ONEOFS, ENUM_VALUES = 2, 2, 8, 2


def main() -> None:
    """Writes the page."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/api.md"
    files = {Path(file.name).stem: file for file in _descriptors() if file.package == PACKAGE.strip(".")}
    if missing := set(files) - set(FILES):
        sys.exit(f"error: name the place of {', '.join(sorted(missing))}.proto on the page, in FILES")
    out.write_text("\n".join([BEGIN, *(line for name in FILES for line in _Page(files[name]).lines())]))


def _descriptors() -> Sequence[FileDescriptorProto]:
    protos = ROOT / "protos"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "set"
        names = [str(path.relative_to(protos)) for path in sorted(protos.rglob("*.proto"))]
        arguments = [f"--descriptor_set_out={found}", "--include_source_info", *names]
        if protoc.main(["protoc", f"-I{protos}", *arguments]):
            sys.exit(1)
        return list(FileDescriptorSet.FromString(found.read_bytes()).file)


class _Page:
    """One proto file as Markdown."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): [" ".join(part.split()) for part in place.leading_comments.split("\n\n")]
            for place in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Services first, then messages, then enums, each in the file's order."""
        yield f"## {Path(self._file.name).name}\n"
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (FILE_SERVICES, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (FILE_MESSAGES, index))
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (FILE_ENUMS, index))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {service.name}\n\n{self._comment(path)}\n"
        yield "| call | takes | returns | |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            taken = ("stream of " if method.client_streaming else "") + _link(method.input_type)
            returned = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            comment = self._cell((*path, SERVICE_METHODS, index))
            yield f"| `{method.name}` | {taken} | {returned} | {comment} |"
        yield ""

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {message.name}\n\n{self._comment(path)}\n"
        if not message.field:
            return
        yield "| | field | type | |\n|---|---|---|---|"
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        for index, field in enumerate(message.field):
            comment = self._cell((*path, MESSAGE_FIELDS, index))
            if field.HasField("oneof_index") and not field.proto3_optional:
                comment += f" *One of* `{message.oneof_decl[field.oneof_index].name}`."
            yield f"| {field.number} | `{field.name}` | {_type(field, maps)} | {comment} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"### {enum.name}\n\n{self._comment(path)}\n\n| | value | |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            yield f"| {value.number} | `{value.name}` | {self._cell((*path, ENUM_VALUES, index))} |"
        yield ""

    def _comment(self, path: tuple[int, ...]) -> str:
        return "\n\n".join(self._comments.get(path, []))

    def _cell(self, path: tuple[int, ...]) -> str:
        return " ".join(self._comments.get(path, [])).replace("|", "\\|")


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {_type(key, maps)} to {_type(value, maps)}"
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    shown = _link(field.type_name) if field.type_name else scalar
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return "repeated " * repeated + "optional " * field.proto3_optional + shown


def _link(full_name: str) -> str:
    name = full_name.removeprefix(PACKAGE)
    return f"[{name}](#{name.lower()})" if full_name.startswith(PACKAGE) else full_name.strip(".")


if __name__ == "__main__":
    main()
