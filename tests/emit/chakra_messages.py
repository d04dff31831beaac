"""Chakra execution traces, read with message classes built from Chakra's own schema (chakra_et_def.proto, mlcommons/chakra at
version 1.0.0) by a reader that follows its protolib.py."""

import pathlib
import re

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
