"""Chakra execution traces, read with Chakra's own schema."""

import pathlib

import pytest

from prism_plugins import cli
from prism_plugins.cli_run import load_view
from prism_plugins.emit.chakra import write_chakra
from prism_plugins.emit.spans import SpanKind, device_spans
from tests.emit.chakra_messages import read

pytest.importorskip("google.protobuf")


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
