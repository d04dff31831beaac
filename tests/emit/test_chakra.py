"""Chakra execution traces, read with message classes built from Chakra's own schema (tests/emit/chakra_et_def.proto,
mlcommons/chakra at version 1.0.0) by a reader that follows its protolib.py."""

import pathlib
import re

import pytest

from prism_plugins import cli
from prism_plugins.cli_run import load_view
from prism_plugins.emit.chakra import write_chakra
from prism_plugins.emit.spans import SpanKind, device_spans

pytest.importorskip("google.protobuf")
PROTO = pathlib.Path(__file__).with_name("chakra_et_def.proto")
SCALARS = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "fixed64": 6, "fixed32": 7, "bool": 8, "string": 9,
    "bytes": 12, "uint32": 13, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18,
}  # fmt: skip


def message_classes():
    """Compile the schema without protoc: its messages, enums and fields as a descriptor."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    text = re.sub(r"//[^\n]*", "", PROTO.read_text())
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    enums = re.findall(r"enum (\w+) \{(.*?)\}", text, re.S)
    for name, body in enums:
        enum = file.enum_type.add(name=name)
        for value, number in re.findall(r"(\w+) = (\d+);", body):
            enum.value.add(name=value, number=int(number))
    for name, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text):
        message = file.message_type.add(name=name)
        if "oneof" in body:
            message.oneof_decl.add(name="value")
        inside = re.search(r"oneof \w+ \{(.*?)\}", body, re.S)
        for repeated, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body):
            entry = message.field.add(name=field, number=int(number), label=3 if repeated else 1)
            if kind in SCALARS:
                entry.type = SCALARS[kind]
            else:
                entry.type = 14 if kind in dict(enums) else 11
                entry.type_name = f".ChakraProtoMsg.{kind}"
            if inside and f"{kind} {field} = {number};" in inside[1]:
                entry.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    get = lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))  # noqa: E731
    return get("GlobalMetadata"), get("Node")


def read(path):
    """(metadata, nodes), each message behind its length as a varint."""
    metadata_class, node_class = message_classes()
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        assert size > 0, "Chakra's reader stops at an empty message"
        messages.append(data[at : at + size])
        at += size
    assert at == len(data)
    metadata = metadata_class.FromString(messages[0])
    return metadata, [node_class.FromString(m) for m in messages[1:]]


def attributes(node):
    return {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}


def test_nodes_are_the_kernels_and_calls_of_the_rank(run, tmp_path):
    view = load_view(run)
    program, times = view.timed_program(4)
    write_chakra(tmp_path / "r.et", program, times, view.costs)
    metadata, nodes = read(tmp_path / "r.et")
    assert metadata.version == "1.0.0"
    spans = device_spans(program, times)
    assert [n.id for n in nodes] == list(range(len(spans.row)))
    for node, kind in zip(nodes, spans.kind.tolist(), strict=True):
        found = attributes(node)
        assert found["prism_source"] == program.source
        assert found["is_cpu_op"] is False
        assert all(dep < len(nodes) for dep in node.data_deps)
        if kind == SpanKind.COMMUNICATION:
            assert found["comm_size"] > 0
            assert node.type in (5, 6, 7)
        else:
            assert node.type == 4
    collective = next(n for n in nodes if n.type == 7)
    assert attributes(collective)["comm_type"] == 0  # ALL_REDUCE
    received = next(n for n in nodes if n.type == 6)
    assert (attributes(received)["comm_src"], attributes(received)["comm_dst"]) == (0, 4)


def test_dependencies_are_acyclic_and_respect_the_times(run, tmp_path):
    view = load_view(run)
    for rank in (0, 4):
        program, times = view.timed_program(rank)
        write_chakra(tmp_path / "r.et", program, times, view.costs)
        _, nodes = read(tmp_path / "r.et")
        for node in nodes:
            for dep in node.data_deps:
                assert dep < node.id
                assert nodes[dep].start_time_micros <= node.start_time_micros
        waits = [n for n in nodes if len(n.data_deps) > 1]
        assert waits, "what follows a wait depends on the communication too"


def test_command(run, capsys):
    assert cli.main(["trace", "latest", "--format", "chakra", "--ranks", "0-1"]) == 0
    paths = [pathlib.Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [p.name for p in paths] == ["rank0.et", "rank1.et"]
    assert read(paths[0])[1]
