"""The predicted job as one Perfetto trace (``trace.pftrace``): a process per rank, a track per stream.

All ranks are drawn at block level: phases, sends and receives with a flow from sender to receiver, and collectives
other than those inside a layer's phase. Chosen ranks also get every kernel and collective, flows between the members
of a collective, and counters of allocated memory and NIC use. Ranks with equal times share an encoded template in
which only rank, tracks and flows are replaced, so cost follows classes.

Written in Perfetto's own format (protos/perfetto/trace/trace_packet.proto, track_event/track_event.proto), gzipped,
which ui.perfetto.dev and trace_processor read as it is.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins.emit.files import replaced_file
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.memory_curve import allocated_curve
from prism_plugins.emit.spans import DeviceSpans, SpanKind, communicator_of_lane, device_spans
from prism_plugins.emit.trace_layout import disjoint
from prism_plugins.emit.trace_names import kernel_name, nccl_kernel_name
from prism_plugins.emit.wire import block, fixed64, number, varint
from prism_plugins.program.model import Program
from prism_plugins.simulate.prices import comm_ranks
from prism_plugins.simulate.timeline import OpTimes

MAX_BYTES = 400 << 20
"""Before compression, which makes it 5 to 10 times smaller; what a browser opens."""
MAX_CELLS = 256
"""Templates at most; a job with more kinds of ranks is drawn class by class, as each class's first rank."""

_PACKET = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60
_DEBUG, _TYPE, _NAME_IID, _TRACK, _COUNTER, _DOUBLE, _FLOW, _FLOW_END = 4, 9, 10, 11, 30, 44, 47, 48
_BEGIN, _END, _COUNT = 1, 2, 4
_WIDTH = 4
"""Bytes of the padded varints that are replaced for every rank."""
_TRACKS = 256
"""Track numbers of a rank."""
_MEMORY_TRACK, _NIC_TRACK, _FIRST_TRACK = 1, 2, 8
_PID_BASE = 1_000_000
"""pid 0 is the idle process."""
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_SOURCE = "\0source"
"""Stands for how the rank's program is known, which ranks of one template differ in."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace holds."""

    ranks: int
    """Drawn at block level."""
    left_out: int
    """Ranks that the size limit left out."""
    detailed: int
    by_class: bool
    """Ranks of a class are drawn with the times of its first rank."""
    nbytes: int
    """Before compression."""


def write_perfetto(
    path: Path, view: JobView, *, detailed: Collection[int] = (), max_bytes: int = MAX_BYTES
) -> Written:
    """Write the trace; the file appears when it is complete. The view needs a timeline.

    Args:
        detailed: Ranks drawn op by op.
        max_bytes: Stop adding ranks at block level when this much is written.
    """
    from prism_plugins.program.infer import program_of

    cells = view.cell_of_rank()
    by_class = len(np.unique(cells)) > MAX_CELLS
    if by_class:
        cells = np.array([view.job.class_of(rank) for rank in range(view.world_size)])
    templates: dict[int, _Template] = {}
    size = drawn = 0
    with (
        replaced_file(path) as temporary,
        gzip.GzipFile(fileobj=temporary, filename="", mode="wb", compresslevel=2, mtime=0) as out,
    ):
        for rank in sorted(detailed):
            program, times = view.timed_program(rank)
            template = _Template(_detailed_tracks(view, program, times), program)
            size += out.write(template.of(view, program))
        for rank in range(view.world_size):
            if rank in detailed:
                continue
            if size > max_bytes:
                break
            cell = int(cells[rank])
            if cell not in templates:
                program, times = view.timed_program(rank)
                templates[cell] = _Template(_block_tracks(program, times), program)
            size += out.write(templates[cell].of(view, program_of(view.job, rank)))
            drawn += 1
    return Written(
        ranks=drawn,
        left_out=view.world_size - drawn - len(detailed),
        detailed=len(detailed),
        by_class=by_class,
        nbytes=size,
    )


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────


class _Slice(msgspec.Struct, frozen=True, gc=False):
    start_ns: int
    end_ns: int
    name: str
    args: tuple[tuple[str, str | int], ...] = ()
    flows: tuple[tuple[int, bool], ...] = ()
    """(index into ``Program.comms``, whether the flow ends here); numbered in order of appearance."""


class _Track(msgspec.Struct, kw_only=True):
    name: str
    slices: list[_Slice]
    counter: bool = False
    points: list[tuple[int, float]] = []
    number: int = 0


def _block_tracks(program: Program, times: OpTimes) -> list[_Track]:
    spans = device_spans(program, times)
    tracks = [_Track(name="phases", slices=_phase_slices(program, spans))]
    blocks = _phase_of_comm(program)
    index = np.flatnonzero(spans.kind == SpanKind.COMMUNICATION)
    p2p, others = [], []
    for i in index.tolist():
        row = int(spans.row[i])
        comm = program.comms[int(program.events["ref"][row])]
        if comm.kind in ("send", "recv"):
            p2p.append(i)
        elif not blocks[row]:
            others.append(i)
    tracks += _comm_tracks("sends and receives", program, spans, np.array(p2p, dtype=np.int64), flows=True)
    tracks += _comm_tracks("collectives", program, spans, np.array(others, dtype=np.int64), flows=False)
    return tracks


def _detailed_tracks(view: JobView, program: Program, times: OpTimes) -> list[_Track]:
    spans = device_spans(program, times)
    tracks = [_Track(name="phases", slices=_phase_slices(program, spans))]
    costs = view.costs.in_state_of(program.signatures)
    ops = [
        (kernel_name(s), (("prism_source", _SOURCE), ("prism_cost", _cost(costs.price_op(s)))))
        for s in program.signatures
    ]
    for lane in np.unique(spans.lane).tolist():
        index = np.flatnonzero(spans.lane == lane)
        communicator = communicator_of_lane(program, lane)
        if communicator is not None:
            name = f"nccl {communicator.group.desc or communicator.group.name}"
            tracks += _comm_tracks(name, program, spans, index, flows=True)
            continue
        for k, part in enumerate(disjoint(spans.start_ns[index], spans.end_ns[index])):
            mine = index[part]
            refs = program.events["ref"][spans.row[mine]].tolist()
            starts, ends = _whole(spans.start_ns[mine]), _whole(spans.end_ns[mine])
            slices = [_Slice(a, b, *ops[ref]) for a, b, ref in zip(starts, ends, refs, strict=True)]
            tracks.append(_Track(name=f"stream {lane}" + (f" #{k + 1}" if k else ""), slices=slices))
    at = np.maximum.accumulate(times.host_ns).astype(np.int64)
    memory = [(t, float(n)) for t, n in allocated_curve(program, at)]
    tracks.append(_Track(name="allocated memory (bytes)", slices=[], counter=True, points=memory))
    nic = _nic_use(view, program, spans)
    if nic:
        tracks.append(_Track(name="NIC use (GB/s)", slices=[], counter=True, points=nic))
    return tracks


def _phase_slices(program: Program, spans: DeviceSpans) -> list[_Slice]:
    """Phases from their first kernel to their last, without overlap."""
    compute = np.flatnonzero(spans.kind != SpanKind.COMMUNICATION)
    rows, starts, ends = spans.row[compute], spans.start_ns[compute], spans.end_ns[compute]
    slices, free = [], 0
    for phase, begin, end in program.iter_phases():
        low, high = np.searchsorted(rows, (begin, end))
        if low == high or phase.kind.startswith(("send", "recv")):
            continue
        args: list[tuple[str, str | int]] = [("prism_source", _SOURCE)]
        args += [("micro-batch", phase.microbatch)] if phase.microbatch >= 0 else []
        args += [("chunk", phase.chunk)] if phase.chunk >= 0 else []
        start = max(int(starts[low:high].min()), free)
        free = max(int(ends[low:high].max()), start + 1)
        slices.append(_Slice(start, free, phase.kind, tuple(args)))
    return slices


def _phase_of_comm(program: Program) -> np.ndarray:
    """bool over the events: inside a forward or backward phase."""
    inside = np.zeros(len(program.events), dtype=bool)
    for phase, begin, end in program.iter_phases():
        if phase.kind in ("forward", "backward"):
            inside[begin : end + 1] = True
    return inside


def _comm_tracks(
    name: str, program: Program, spans: DeviceSpans, index: np.ndarray, *, flows: bool
) -> list[_Track]:
    tracks = []
    for k, part in enumerate(disjoint(spans.start_ns[index], spans.end_ns[index]) if len(index) else []):
        slices = []
        mine = index[part]
        mine = mine[np.argsort(spans.row[mine], kind="stable")]
        for i in mine.tolist():
            refs = program.events["ref"][spans.members.get(i, spans.row[i : i + 1])].tolist()
            comms = [program.comms[ref] for ref in refs]
            group = program.groups[comms[0].group]
            wait = int(spans.transfer_start_ns[i] - spans.start_ns[i])
            args: list[tuple[str, str | int]] = [
                ("prism_source", _SOURCE),
                ("bytes", sum(c.nbytes for c in comms)),
                ("wait_ns", wait),
            ]
            kernel = nccl_kernel_name({c.kind for c in comms}, comms[0].dtype, comms[0].reduce_op)
            if comms[0].kind in ("send", "recv"):
                kernel = "+".join(sorted({c.kind for c in comms}))
            else:
                args.append(("group", group.desc or group.name))
            start = int(spans.start_ns[i])
            ends = tuple((ref, c.kind == "recv") for ref, c in zip(refs, comms, strict=True)) if flows else ()
            slices.append(_Slice(start, max(int(spans.end_ns[i]), start + 1), kernel, tuple(args), ends))
        tracks.append(_Track(name=name + (f" #{k + 1}" if k else ""), slices=slices))
    return tracks


def _nic_use(view: JobView, program: Program, spans: DeviceSpans) -> list[tuple[int, float]]:
    """Rate at which this rank's transfers use the network, GB/s, where it changes."""
    steps: dict[int, float] = {}
    prices = {}
    for i in np.flatnonzero(spans.kind == SpanKind.COMMUNICATION).tolist():
        moving, end = int(spans.transfer_start_ns[i]), int(spans.end_ns[i])
        for ref in program.events["ref"][spans.members.get(i, spans.row[i : i + 1])].tolist():
            if ref not in prices:
                comm = program.comms[ref]
                ranks = comm_ranks(program.rank, program.groups[comm.group], comm)
                prices[ref] = view.costs.price_comm(comm, ranks, program.rank)
            if prices[ref].link == "nic" and end > moving:
                rate = prices[ref].bytes / (end - moving)
                steps[moving] = steps.get(moving, 0.0) + rate
                steps[end] = steps.get(end, 0.0) - rate
    points, level = [], 0.0
    for at in sorted(steps):
        level += steps[at]
        points.append((at, max(level, 0.0)))
    return points


def _cost(price) -> str:
    return f"{price.rule} ({price.provenance})"


def _whole(times: np.ndarray) -> list[int]:
    return np.rint(times).astype(np.int64).tolist()


# ── how it is encoded ────────────────────────────────────────────────────────────────────────────────────────────


class _Template:
    """The packets of one rank with places for what differs between ranks."""

    def __init__(self, tracks: list[_Track], program: Program) -> None:
        self._names: dict[str, int] = {}
        self._arg_names: dict[str, int] = {}
        self._arg_values: dict[str, int] = {}
        self._sequence_at: list[int] = []
        self._track_at: list[int] = []
        self._track_of: list[int] = []
        self._flow_at: list[int] = []
        self._flow_comm: list[int] = []
        self._chunks: list[bytes] = []
        self._size = 0
        counters = {"allocated memory (bytes)": _MEMORY_TRACK, "NIC use (GB/s)": _NIC_TRACK}
        for k, track in enumerate(tracks[: _TRACKS - _FIRST_TRACK]):
            track.number = counters.get(track.name, _FIRST_TRACK + k)
        self._tracks = tracks[: _TRACKS - _FIRST_TRACK]
        for track in self._tracks:
            for each in track.slices:
                self._slice(track.number, each)
            for at, value in track.points:
                event = number(_TYPE, _COUNT)
                event += varint(_DOUBLE << 3 | 1) + np.float64(value).tobytes()
                self._event(at, track.number, event, ())
        self._bytes = np.frombuffer(b"".join(self._chunks), dtype=np.uint8)
        self._places = [
            np.array(x, dtype=np.int64) for x in (self._sequence_at, self._track_at, self._flow_at)
        ]
        self._track_index = np.array(self._track_of, dtype=np.int64)
        self._flow_ref = np.array(self._flow_comm, dtype=np.int64)
        self._flow_ordinals: np.ndarray | None = None
        del self._chunks, self._sequence_at, self._track_at, self._flow_at, self._track_of, self._flow_comm

    def of(self, view: JobView, program: Program) -> bytes:
        """The packets of one rank."""
        sequence_at, track_at, flow_at = self._places
        data = self._bytes.copy()
        sequence = varint(program.rank + 1, _WIDTH)
        base = (program.rank + 1) * _TRACKS
        span = np.arange(_WIDTH)
        data[sequence_at[:, None] + span] = np.frombuffer(sequence, dtype=np.uint8)
        table = np.array([list(varint(base + k, _WIDTH)) for k in range(_TRACKS)], dtype=np.uint8)
        data[track_at[:, None] + span] = table[self._track_index]
        if len(flow_at):
            ids = self._flow_ids(program)
            data[flow_at[:, None] + np.arange(8)] = ids.astype("<u8").view(np.uint8).reshape(-1, 8)
        return b"".join((*self._head(view, program, base, sequence), data.tobytes()))

    def _flow_ids(self, program: Program) -> np.ndarray:
        """A number for every meeting, the same on all its members: the channel's, then how many came before."""
        channel = np.array([_channel(program, ref) for ref in range(len(program.comms))], dtype=np.uint64)
        key = channel[self._flow_ref]
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        begins = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
        ordinal = np.empty(len(key), dtype=np.uint64)
        ordinal[order] = (np.arange(len(key)) - begins).astype(np.uint64)
        return key * np.uint64(1 << 18) + ordinal + np.uint64(1)

    def _head(self, view: JobView, program: Program, base: int, sequence: bytes) -> Iterator[bytes]:
        rank = program.rank
        coords = view.job.layout.coords(rank)
        name = f"rank {rank} · " + " ".join(
            f"{dim} {coords[dim]}"
            for dim in ("pp", "tp", "cp", "dp")
            if coords.get(dim, 0) or view.job.layout.sizes()[dim] > 1
        )
        process = number(1, _PID_BASE + rank) + block(6, name)
        yield _packet(_sequence(sequence) + block(_DESCRIPTOR, number(1, base) + block(3, process)))
        for track in self._tracks:
            described = number(1, base + track.number) + number(5, base) + block(2, track.name)
            if track.counter:
                described += block(8, b"")
            yield _packet(_sequence(sequence) + block(_DESCRIPTOR, described))
        interned = b"".join(
            (
                *(block(2, number(1, iid) + block(2, name)) for name, iid in self._names.items()),
                *(block(3, number(1, iid) + block(2, name)) for name, iid in self._arg_names.items()),
                *(
                    block(29, number(1, iid) + block(2, program.source if text == _SOURCE else text))
                    for text, iid in self._arg_values.items()
                ),
            )
        )
        flags = number(_FLAGS, _STATE_CLEARED)
        yield _packet(_sequence(sequence) + flags + block(_INTERNED, interned))

    def _slice(self, track: int, each: _Slice) -> None:
        event = number(_TYPE, _BEGIN) + number(_NAME_IID, _intern(self._names, each.name))
        for name, value in each.args:
            annotation = number(1, _intern(self._arg_names, name))
            if isinstance(value, int):
                annotation += number(4, max(value, 0))
            else:
                annotation += number(17, _intern(self._arg_values, value))
            event += block(_DEBUG, annotation)
        self._event(each.start_ns, track, event, each.flows)
        self._event(max(each.end_ns, each.start_ns + 1), track, number(_TYPE, _END), ())

    def _event(self, at_ns: int, track: int, event: bytes, flows: tuple[tuple[int, bool], ...]) -> None:
        """Append a packet and note where its sequence, track and flows are."""
        tail = b"".join(fixed64(_FLOW_END if ends else _FLOW, 0) for _, ends in flows)
        body = event + number(_TRACK, 0, _WIDTH) + tail
        head = number(_TIMESTAMP, max(at_ns, 0)) + varint(_SEQUENCE << 3)
        flags = number(_FLAGS, _NEEDS_STATE)
        wrapped = block(_TRACK_EVENT, body)
        packet = head + b"\0" * _WIDTH + flags + wrapped
        framed = varint(_PACKET << 3 | 2) + varint(len(packet)) + packet
        start = self._size + len(framed) - len(packet)
        self._sequence_at.append(start + len(head))
        body_at = self._size + len(framed) - len(body)
        self._track_at.append(body_at + len(event) + len(varint(_TRACK << 3)))
        self._track_of.append(track)
        flow_at = body_at + len(body) - len(tail)
        for ref, _ in flows:
            self._flow_at.append(flow_at + 2)  # behind the field's tag, two bytes for 47 and 48
            self._flow_comm.append(ref)
            flow_at += 10
        self._chunks.append(framed)
        self._size += len(framed)


def _channel(program: Program, ref: int) -> int:
    """A number of up to 46 bits for what meets on one channel, equal on all its members."""
    comm = program.comms[ref]
    group = program.groups[comm.group]
    if comm.kind in ("send", "recv") and 0 <= comm.peer < len(group.ranks):
        pair = (program.rank, group.ranks[comm.peer])
        sender, receiver = pair if comm.kind == "send" else pair[::-1]
        return (sender << 23 | receiver) & (1 << 46) - 1
    identity = repr((group.ranks[0], group.ranks[-1], len(group.ranks), group.desc)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 18


def _intern(table: dict[str, int], text: str) -> int:
    return table.setdefault(text, len(table) + 1)


def _packet(data: bytes) -> bytes:
    return block(_PACKET, data)


def _sequence(sequence: bytes) -> bytes:
    return varint(_SEQUENCE << 3) + sequence
