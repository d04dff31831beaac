"""Phases, iterations and their end, facts, patches: against a recorder that only counts."""

import json
import types

import msgspec
import numpy as np
import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integration import EndOfSlice
from prism_plugins.program.model import EVENT_DTYPE, EventKind, Phase
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import GpuFacts, JobFacts, SliceSpec
from prism_plugins.slice_context import Context
from prism_plugins.world.layout import Layout


class CountingRecorder:
    has_program = True

    def __init__(self):
        self.calls = []
        self.kernels = iter(range(1000))

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")
        events = np.zeros(1, EVENT_DTYPE)
        events["kind"] = EventKind.KERNEL
        events["ref"] = next(self.kernels)
        return types.SimpleNamespace(events=events)

    def begin_phase(self, phase):
        self.calls.append(("begin", phase.kind))

    def end_phase(self):
        self.calls.append("end")

    def stats(self):
        return types.SimpleNamespace()

    def reset_peaks(self):
        pass


@pytest.fixture
def context(tmp_path):
    spec = SliceSpec(
        rank=3,
        world_size=8,
        gpus_per_node=8,
        argv=("t.py",),
        iterations=4,
        gpu=GpuFacts(name="H100", memory_bytes=1, num_sms=1, capability=(9, 0)),
        slice_dir=str(tmp_path),
    )
    context = Context(spec, CountingRecorder())
    yield context
    context.undo_patches()


def iterate(context, n, kernels):
    context.recorder.kernels = iter(kernels)
    done = 0
    for _ in range(n):
        context.begin_iteration()
        context.end_iteration()
        done += 1
    return done


def test_ends_when_the_next_iteration_would_begin_after_two_equal_ones(context):
    with pytest.raises(EndOfSlice):
        iterate(context, 10, [1, 2, 2, 2, 2])
    assert context.steady
    assert len(context.hashes) == 3


@pytest.mark.parametrize(("kernels", "period"), [([9, 1, 2, 1, 2, 1], 2), ([1, 2, 3, 1, 2, 3], 3)])
def test_iterations_may_repeat_with_a_period(context, kernels, period):
    """A log line every other step reads the loss back."""
    context.spec = msgspec.structs.replace(context.spec, iterations=10)
    iterate(context, len(kernels) - (period == 2), kernels)
    with pytest.raises(EndOfSlice):
        context.begin_iteration()
    assert (context.steady, context.period) == (True, period)


def test_gradient_buckets_are_those_of_the_last_iteration(context):
    context.recorder.kernels = iter([1, 2])
    for buckets in ([(0,), (1,)], [(0, 1)]):
        context.begin_iteration()
        for bucket in buckets:
            context.gradient_bucket(bucket)
        context.end_iteration()
    assert context.iteration_buckets == [(0, 1)]


def test_iterations_are_compared_with_those_that_begin_alike(context):
    """One that follows an evaluation lacks what the script does between two steps."""
    context.recorder.kernels = iter([7, 0, 2, 3, 0, 2])

    def evaluation():
        context.drop_iteration()
        context.begin_iteration()

    context.begin_iteration()
    for after in (evaluation, context.stop_if_enough, evaluation):
        context.next_iteration()
        assert not context.steady
        after()
    context.end_iteration()
    assert context.steady
    assert context.hashes[1] == context.hashes[3] != context.hashes[2]


def test_ends_after_the_last_allowed_iteration_when_never_steady(context):
    with pytest.raises(EndOfSlice):
        iterate(context, 10, range(10))
    assert not context.steady
    assert len(context.hashes) == 4


def test_real_ranks_all_do_the_same_number_of_iterations(context):
    context.spec = msgspec.structs.replace(context.spec, real_ranks=(0, 1))
    with pytest.raises(EndOfSlice):
        iterate(context, 10, [1] * 10)
    assert context.steady
    assert len(context.hashes) == 4


def test_what_was_found_is_saved_before_the_stack_unwinds(tmp_path, context):
    saved = []
    context._on_end = lambda: saved.append(len(context.hashes))
    with pytest.raises(EndOfSlice):
        iterate(context, 10, [1, 1])
    assert saved == [2]


def test_end_of_slice_is_not_caught_by_except_exception(context):
    assert not issubclass(EndOfSlice, Exception)


def test_phases_do_not_nest_and_close_with_the_iteration(context):
    context.begin_iteration()
    context.begin_phase(Phase(kind="forward", microbatch=2, chunk=1))
    assert context.phase_text == "iteration 1, forward of micro-batch 2, chunk 1"
    context.begin_phase(Phase(kind="optimizer"))
    assert context.phase_text == "iteration 1, optimizer"
    context.end_iteration()
    assert context.recorder.calls == [
        "start",
        ("begin", "forward"),
        "end",
        ("begin", "optimizer"),
        "end",
        "stop",
    ]
    assert context.phase_text == "after iteration 1"


def test_an_iteration_may_begin_without_the_end_of_the_last(context):
    context.begin_iteration()
    context.begin_iteration()
    assert context.recorder.calls == ["start", "stop", "start"]


def test_facts_are_on_disk_at_once(tmp_path, context):
    context.set_facts(JobFacts(framework="x", layout=Layout(world_size=8, tp=2, dp=4)))
    assert json.loads((tmp_path / "facts.json").read_text())["layout"]["tp"] == 2


def test_an_impossible_layout_is_refused(context):
    with pytest.raises(PrismError, match="covers 4 ranks"):
        context.set_facts(JobFacts(framework="x", layout=Layout(world_size=8, tp=2, dp=2)))


def test_patches_are_remembered_and_undone(context):
    class Target:
        value = 1

        @staticmethod
        def f():
            return "original"

    assert context.patch(Target, "f", staticmethod(lambda: "patched"), why="test")() == "original"
    context.patch(Target, "value", 2, why="test")
    context.patch(Target, "value", 3, why="test")
    assert (Target.f(), Target().f(), Target.value) == ("patched", "patched", 3)
    assert [(p.name, p.why) for p in context.patches] == [("f", "test"), ("value", "test"), ("value", "test")]
    context.undo_patches()
    assert (Target.f(), Target().f(), Target.value) == ("original", "original", 1)


def test_patching_what_upstream_renamed_fails(context):
    with pytest.raises(AttributeError):
        context.patch(types.SimpleNamespace(), "gone", 1, why="test")


def test_assumptions_are_listed_once(context):
    context.assume("a")
    context.assume("b")
    context.assume("a")
    assert context.assumptions == ["a", "b"]


def test_findings_are_told_once(context):
    finding = Finding(kind="config", severity="warning", message="typo")
    context.finding(finding)
    context.finding(Finding(kind="config", severity="warning", message="typo"))
    assert context.findings == [finding]
