"""The trace, read as its readers read it."""

import collections
import gzip
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_plugins.emit.kineto import TraceContext, write_kineto
from prism_plugins.emit.spans import DeviceSpans, SpanKind, device_spans, temporal_breakdown
from prism_plugins.emit.trace_layout import whole_microseconds
from prism_plugins.emit.trace_names import ranks_text
from prism_plugins.world.layout import Layout


@pytest.fixture
def trace(build, tmp_path):
    """Write the trace of a synthetic rank; gives (parsed JSON, raw text, program, times, path)."""
    make_program, make_times = build

    def make(rank=0, *, program=None, times=None, directory=tmp_path, **fields):
        program = program or make_program(rank)
        times = times or make_times(program)
        context = TraceContext(world_size=8, iteration_time_ns=float(times.end_ns.max()), **fields)
        path = directory / f"rank{rank}.json.gz"
        write_kineto(path, program, times, context)
        text = gzip.decompress(path.read_bytes()).decode()
        return json.loads(text), text, program, times, path

    return make


def events_of(data, *categories):
    return [e for e in data["traceEvents"] if e.get("cat") in categories]


def kernels_of(data):
    return events_of(data, "kernel", "gpu_memcpy", "gpu_memset")


def test_rank_is_found_the_way_hta_finds_it(trace):
    data, text, *_ = trace(5)
    first = next(line for line in text.splitlines() if re.search(r'"rank":\s+(\d+)', line))
    assert re.search(r'"rank":\s+(\d+)', first).group(1) == "5"
    assert data["distributedInfo"]["world_size"] == 8
    assert data["distributedInfo"]["backend"] == "nccl"


def test_every_kernel_has_one_launch_before_it(trace):
    data, *_ = trace(0)
    launches = {
        e["args"]["correlation"]: e for e in events_of(data, "cuda_runtime") if "correlation" in e["args"]
    }
    kernels = kernels_of(data)
    assert len(launches) == len(kernels) > 50
    for kernel in kernels:
        assert launches[kernel["args"]["correlation"]]["ts"] <= kernel["ts"]


def test_flows_join_launch_and_kernel(trace):
    data, *_ = trace(0)
    starts = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "f"}
    kernels = {e["args"]["correlation"]: e for e in kernels_of(data)}
    assert starts.keys() == ends.keys() == kernels.keys()
    for i, end in ends.items():
        assert (end["pid"], end["tid"], end["ts"]) == tuple(kernels[i][k] for k in ("pid", "tid", "ts"))
        assert end["bp"] == "e"


@pytest.mark.parametrize("rank", range(8))
def test_tracks_nest_or_are_disjoint(trace, rank):
    data, *_ = trace(rank)
    tracks = collections.defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for spans in tracks.values():
        stack = []
        for ts, negative, name in sorted(spans):
            end = ts - negative
            while stack and stack[-1] <= ts:
                stack.pop()
            assert not stack or end <= stack[-1], f"{name} at {ts} reaches out of what encloses it"
            stack.append(end)


def test_times_are_whole_microseconds_and_positive(trace):
    data, _, program, times, _ = trace(0)
    for event in data["traceEvents"]:
        assert isinstance(event["ts"], int)
    kernels = kernels_of(data)
    assert min(e["dur"] for e in kernels) >= 1
    spans = device_spans(program, times)
    shortest = np.min(spans.end_ns - spans.start_ns)
    assert shortest < 1000, "the fixture should hold a kernel of less than a microsecond"
    for event, start, end in zip(kernels, spans.start_ns, spans.end_ns, strict=True):
        assert abs(event["ts"] * 1e3 - start) <= 2010
        assert abs((event["ts"] + event["dur"]) * 1e3 - end) <= 2010


def lone_track(start, end):
    """Spans of one track, µs, as whole microseconds."""
    start, end = np.array(start) * 1e3, np.array(end) * 1e3
    none = np.zeros(len(start), dtype=np.int64)
    spans = DeviceSpans(
        row=none, start_ns=start, end_ns=end, transfer_start_ns=start, lane=none, kind=none, members={}
    )
    return whole_microseconds(spans, none)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.02, 40)), min_size=1, max_size=60), st.booleans())
def test_rounding_keeps_order_and_touch(gaps_and_lengths, touching):
    start, end, now = [], [], 0.0
    for gap, length in gaps_and_lengths:
        start.append(now + (0.0 if touching else gap))
        now = start[-1] + length
        end.append(now)
    low, high = lone_track(start, end)
    assert (high - low >= 1).all()
    assert (low[1:] >= high[:-1]).all()
    if touching:
        assert (low[1:] == high[:-1]).all()
    if min(length for _, length in gaps_and_lengths) >= 2:
        assert np.abs(low - start).max() <= 1.01
        assert np.abs(high - end).max() <= 1.01


@pytest.mark.parametrize("length", [1.1, 1.5, 1.9, 2.5, 3.25])
def test_kernels_on_the_hosts_grid_do_not_bias_the_sum(length):
    start = np.arange(1000) * 8.0
    low, high = lone_track(start, start + length)
    assert (high - low).sum() == pytest.approx(1000 * length, abs=1.5)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_keeps_compute_other_and_idle_time(seed):
    """Two streams of 1000 kernels, compute on one, collectives on the other, whatever the host's period is."""
    random = np.random.default_rng(seed)
    period, steps = random.uniform(6, 12), np.arange(1000)
    length = np.where(random.random(1000) < 0.1, 0.4, random.uniform(1, 6, 1000))
    start = np.concatenate((steps * period, steps * period * 1.01 + length)) * 1e3
    end = start + np.concatenate((length, random.uniform(2, 5, 1000))) * 1e3
    kind = np.repeat((int(SpanKind.COMPUTE), int(SpanKind.COMMUNICATION)), 1000)
    lane = np.repeat((0, 1), 1000)
    row = np.arange(2000)

    def spans(start, end):
        return DeviceSpans(
            row=row, start_ns=start, end_ns=end, transfer_start_ns=start, lane=lane, kind=kind, members={}
        )

    real = spans(start, end)
    low, high = whole_microseconds(real, lane)
    assert all((high[lane == k] - low[lane == k] >= 1).all() for k in (0, 1))
    whole, exact = temporal_breakdown(spans(low * 1e3, high * 1e3)), temporal_breakdown(real)
    for name in ("idle_ns", "compute_ns", "non_compute_ns", "kernel_ns"):
        assert getattr(whole, name) == pytest.approx(getattr(exact, name), abs=10_000), name


def test_one_empty_step_follows_the_real_one(trace):
    data, _, _, times, _ = trace(0)
    steps = [e for e in events_of(data, "user_annotation") if e["name"].startswith("ProfilerStep#")]
    assert [s["name"] for s in steps] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert steps[0]["ts"] == 0
    assert steps[0]["dur"] >= times.end_ns.max() / 1e3
    assert steps[1]["ts"] == steps[0]["ts"] + steps[0]["dur"]
    assert all(e["ts"] < steps[1]["ts"] for e in events_of(data, "cuda_runtime"))


def test_collectives_carry_kinetos_arguments(trace):
    data, _, program, _, _ = trace(2)
    comms = [e for e in kernels_of(data) if e["name"].startswith("ncclDevKernel_")]
    reduces = [e["args"] for e in comms if e["args"]["Process Group Description"].startswith("TENSOR")]
    assert reduces[0] | {"Collective name": "allreduce", "In msg nelems": 4096 * 4096, "Out msg nelems": 4096 * 4096,
                         "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0",
                         "Process Group Ranks": "[2, 3]"} == reduces[0]  # fmt: skip
    assert next(e["name"] for e in comms) == "ncclDevKernel_AllReduce_Sum_bf16"
    batches = [e for e in comms if e["args"]["Collective name"] == "coalesced"]
    assert len(batches) == 4, "a send and a receive of one work id are one kernel"
    assert batches[0]["name"] == "ncclDevKernel_SendRecv"
    assert batches[0]["args"]["Coalesced"] == [
        "send to 6, 16777216 bfloat16",
        "recv from 6, 16777216 bfloat16",
    ]
    assert batches[0]["args"]["prism_wait_us"] == 1
    num_works = len(np.unique(program.events["value"][program.events["kind"] == 1]))
    assert len(comms) == num_works


def test_long_groups_are_cut_as_torch_cuts_them():
    assert ranks_text(tuple(range(3))) == "[0, 1, 2]"
    assert ranks_text(tuple(range(64))).endswith("28, ..., 63]")


def test_copies_are_copies_and_free_ops_are_no_kernels(trace):
    data, *_ = trace(0)
    copies = events_of(data, "gpu_memcpy")
    assert {e["name"] for e in copies} == {"Memcpy DtoD (Device -> Device)"}
    assert copies[0]["args"]["bytes"] == 4096 * 4096 * 2
    names = {e["name"] for e in kernels_of(data)}
    assert "aten::view" not in names
    assert "fused 100% swiglu" in names


def test_phases_enclose_their_kernels(trace):
    data, *_ = trace(0)
    phases = events_of(data, "gpu_user_annotation")
    names = [e["name"] for e in phases]
    assert names[:2] == ["forward mb 0", "forward mb 1"]
    assert "stream" not in phases[0]["args"], "HTA would count it as a kernel"
    kernels = [e for e in kernels_of(data) if not e["name"].startswith("nccl")]
    for kernel in kernels:
        assert any(p["tid"] == kernel["tid"] and p["ts"] <= kernel["ts"] < p["ts"] + p["dur"] for p in phases)


def test_host_synchronisation_lasts_as_long_as_the_host_is_blocked(trace):
    data, *_ = trace(0)
    (sync,) = [e for e in events_of(data, "cuda_runtime") if e["name"] == "cudaStreamSynchronize"]
    assert sync["args"]["prism_synthesized"] is True
    assert sync["dur"] > 1000


def test_memory_counter_follows_the_allocations(trace):
    data, *_ = trace(0)
    values = [e["args"]["GiB"] for e in data["traceEvents"] if e["ph"] == "C"]
    buffer_gib = 4096 * 11008 * 2 / 2**30
    assert max(values) == pytest.approx(1 + buffer_gib, abs=1e-3), "1 GiB of parameters and one live buffer"
    assert min(values) >= 1.0


def test_overlapping_work_of_one_communicator_gets_a_second_track(trace, build):
    make_program, make_times = build
    program = make_program(0)
    times = make_times(program)
    rows = np.flatnonzero(program.events["kind"] == 1)
    times.end_ns[rows[0]] = times.start_ns[rows[1]] + 50_000
    data, *_ = trace(0, program=program, times=times)
    labels = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert labels[10_001].endswith("#2")


def test_a_program_of_the_size_of_gpt3_175b_takes_seconds(trace, build, tmp_path):
    make_program, make_times = build
    layout = Layout(world_size=8, tp=2, pp=2, dp=2, num_microbatches=192)
    program = make_program(0, layout=layout, layers=75)
    assert len(program.events) > 280_000
    times = make_times(program)
    began = time.process_time()
    trace_path = tmp_path / "big.json.gz"
    write_kineto(
        trace_path, program, times, TraceContext(world_size=8, iteration_time_ns=float(times.end_ns.max()))
    )
    assert time.process_time() - began < 10


@pytest.mark.filterwarnings("ignore::Warning:hta")
class TestHolisticTraceAnalysis:
    """The real tool on the traces of two ranks."""

    @pytest.fixture
    def analysis(self, trace, build, tmp_path):
        hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
        make_program, make_times = build
        made = {}
        for rank, host_op_ns in (
            (0, 6_000),
            (6, 160_000),
        ):  # the device is nearly always busy; the host is the limit
            program = make_program(rank)
            made[rank] = trace(rank, program=program, times=make_times(program, host_op_ns=host_op_ns))[2:4]
        return hta.TraceAnalysis(trace_dir=str(tmp_path)), made

    def test_temporal_breakdown_is_ours(self, analysis):
        tool, made = analysis
        table = tool.get_temporal_breakdown(visualize=False).set_index("rank")
        assert sorted(table.index) == [0, 6]
        for rank, (program, times) in made.items():
            spans = device_spans(program, times)
            ours = temporal_breakdown(spans)
            for column, value in (
                ("idle_time(us)", ours.idle_ns), ("compute_time(us)", ours.compute_ns),
                ("non_compute_time(us)", ours.non_compute_ns), ("kernel_time(us)", ours.kernel_ns),
            ):  # fmt: skip
                # Times are whole microseconds, which matters only to sums of a few.
                assert table.loc[rank, column] * 1e3 == pytest.approx(value, rel=0.01, abs=2_000), column
            assert ours.idle_ns + ours.compute_ns + ours.non_compute_ns == pytest.approx(ours.kernel_ns)
            assert ours.idle_ns > 0
            assert np.count_nonzero(spans.kind == SpanKind.MEMORY) > 0

    def test_other_analyses_run(self, analysis):
        tool, _ = analysis
        overlap = tool.get_comm_comp_overlap(visualize=False)
        assert overlap.set_index("rank").loc[0, "comp_comm_overlap_pctg"] > 0
        types, kernels = tool.get_gpu_kernel_breakdown(visualize=False, include_memory_kernels=True)
        assert {"COMPUTATION", "COMMUNICATION", "MEMORY"} <= set(types["kernel_type"])
        assert "aten::mm" in set(kernels["name"])
        idle, _ = tool.get_idle_time_breakdown(ranks=[0], visualize=False)
        assert len(idle)


def test_perfetto_loads_it(trace):
    module = pytest.importorskip("perfetto.trace_processor", reason="the perfetto package is not installed")
    data, _, _, _, path = trace(0)
    try:
        processor = module.TraceProcessor(trace=str(path))
    except Exception as error:  # the package downloads its binary
        pytest.skip(f"the trace processor binary cannot be had here: {error}")
    with processor:
        rows = list(processor.query("select count(*) as n from slice"))
        assert rows[0].n == sum(e["ph"] == "X" for e in data["traceEvents"])
        errors = processor.query(
            "select name, value from stats where severity = 'error' and value > 0 and name like '%json%'"
        )
        assert not list(errors)
