"""trace.pftrace, read back with Perfetto's own message classes."""

import collections
import gzip
import itertools

import numpy as np
import pytest

from prism_plugins import cli
from prism_plugins.cli_run import load_view
from prism_plugins.emit.perfetto import write_perfetto
from prism_plugins.emit.spans import SpanKind, device_spans
from prism_plugins.emit.wire import number, varint
from prism_plugins.program.model import EventKind

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
BEGIN, END, COUNTER = 1, 2, 4


@pytest.fixture
def view(run):
    return load_view(run)


def read(path):
    """(tracks by uuid, slices by track uuid, flow → (begins, ends), counters by track uuid)."""
    trace = protos.Trace()
    trace.ParseFromString(gzip.decompress(path.read_bytes()))
    tracks, slices, counters = {}, collections.defaultdict(list), collections.defaultdict(list)
    flows = collections.defaultdict(lambda: ([], []))
    names, open_slices = {}, {}
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("interned_data"):
            assert packet.sequence_flags == 1
            names[sequence] = (
                {e.iid: e.name for e in packet.interned_data.event_names},
                {e.iid: e.name for e in packet.interned_data.debug_annotation_names},
                {e.iid: e.str.decode() for e in packet.interned_data.debug_annotation_string_values},
            )
        event = packet.track_event
        if event.type == BEGIN:
            assert event.track_uuid not in open_slices, "slices of a track neither overlap nor nest"
            event_names, arg_names, texts = names[sequence]
            args = {
                arg_names[a.name_iid]: texts[a.string_value_iid] if a.string_value_iid else a.int_value
                for a in event.debug_annotations
            }
            open_slices[event.track_uuid] = (packet.timestamp, event_names[event.name_iid], args)
            for flow in event.flow_ids:
                flows[flow][0].append((event.track_uuid, packet.timestamp))
            for flow in event.terminating_flow_ids:
                flows[flow][1].append((event.track_uuid, packet.timestamp))
        elif event.type == END:
            start, name, args = open_slices.pop(event.track_uuid)
            slices[event.track_uuid].append((start, packet.timestamp, name, args))
        elif event.type == COUNTER:
            counters[event.track_uuid].append((packet.timestamp, event.double_counter_value))
    assert not open_slices
    return tracks, slices, flows, counters


def rank_of(tracks, uuid):
    process = tracks[tracks[uuid].parent_uuid].process
    return process.pid - 1_000_000


def test_all_ranks_at_block_level(view, tmp_path):
    written = write_perfetto(tmp_path / "t.pftrace", view)
    assert (written.ranks, written.left_out, written.detailed) == (8, 0, 0)
    tracks, slices, flows, _ = read(tmp_path / "t.pftrace")
    processes = [t.process for t in tracks.values() if t.HasField("process")]
    assert sorted(p.pid - 1_000_000 for p in processes) == list(range(8))
    for uuid, found in slices.items():
        for before, after in itertools.pairwise(found):
            assert after[0] >= before[1]
        rank = rank_of(tracks, uuid)
        if tracks[uuid].name == "phases":
            program, _ = view.timed_program(rank)
            phases = [p for p, _, _ in program.iter_phases() if not p.kind.startswith(("send", "recv"))]
            assert [s[2] for s in found] == [p.kind for p in phases]
            assert [s[3].get("micro-batch", -1) for s in found] == [p.microbatch for p in phases]
            assert max(s[1] for s in found) <= view.timeline.iteration_time_ns + 1
            assert {s[3]["prism_source"] for s in found} == {program.source}
    paired = [flow for flow in flows.values() if flow[1]]
    micro_batches = view.job.layout.num_microbatches
    assert len(paired) == len(flows) == 2 * micro_batches * 4  # forward and backward, four pairs of ranks
    for begins, ends in paired:
        assert len(begins) == len(ends) == 1
        sender, receiver = rank_of(tracks, begins[0][0]), rank_of(tracks, ends[0][0])
        assert abs(sender - receiver) == 4


def test_chosen_ranks_op_by_op(view, tmp_path):
    written = write_perfetto(tmp_path / "t.pftrace", view, detailed=(0, 1))
    assert (written.ranks, written.detailed) == (6, 2)
    tracks, slices, flows, counters = read(tmp_path / "t.pftrace")
    program, times = view.timed_program(0)
    spans = device_spans(program, times)
    mine = {tracks[u].name: found for u, found in slices.items() if rank_of(tracks, u) == 0}
    kernels = int((spans.kind != SpanKind.COMMUNICATION).sum())
    assert len(mine["stream 0"]) == kernels
    total = sum(end - start for start, end, *_ in mine["stream 0"])
    length = (spans.end_ns - spans.start_ns)[spans.kind != SpanKind.COMMUNICATION]
    assert total == pytest.approx(length.sum(), rel=0.01)
    assert all("prism_cost" in args for *_, args in mine["stream 0"])
    reductions = [f for f in flows.values() if {rank_of(tracks, u) for u, _ in f[0]} == {0, 1}]
    of_group = [
        program.comms[r].group for r in program.events["ref"][program.events["kind"] == EventKind.COMM]
    ]
    assert len(reductions) == of_group.count(0), "each tp collective joins both members"
    memory = [p for u, p in counters.items() if rank_of(tracks, u) == 0 and "memory" in tracks[u].name]
    peak = max(value for _, value in memory[0])
    assert peak == (1 << 30) + 4096 * 11008 * 2


def test_a_size_limit_is_told(view, tmp_path):
    written = write_perfetto(tmp_path / "t.pftrace", view, max_bytes=1)
    assert (written.ranks, written.left_out) == (1, 7)


def test_class_by_class(view, tmp_path, monkeypatch):
    monkeypatch.setattr("prism_plugins.emit.perfetto.MAX_CELLS", 0)
    assert write_perfetto(tmp_path / "t.pftrace", view).by_class
    assert len(read(tmp_path / "t.pftrace")[2]) == 2 * view.job.layout.num_microbatches * 4


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**28 - 1])
def test_padded_varints_are_the_same_number(value):
    packet = protos.TracePacket()
    packet.ParseFromString(number(10, value, 4))
    assert packet.trusted_packet_sequence_id == value
    assert len(varint(value, 4)) == max(4, len(varint(value)))


def test_command(run, capsys):
    assert cli.main(["trace", "latest", "--ranks", "0", "--format", "perfetto"]) == 0
    out = capsys.readouterr().out
    assert "trace.pftrace" in out
    assert "7 ranks by phase, 1 op by op" in out
    assert np.any([t.name == "stream 0" for t in read(run.trace)[0].values()])
    assert not run.kineto.exists()
