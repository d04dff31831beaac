"""Critical path, groups, gains: checked against the spans they are made of."""

import itertools

import msgspec
import numpy as np
import pytest

from prism_plugins.costs.altered import Altered
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.emit.spans import SpanKind
from prism_plugins.program.model import EventKind, GroupInfo
from prism_plugins.program.prediction import Breakdown
from prism_plugins.report import gains
from prism_plugins.report.critical_path import kind_of_op
from prism_plugins.report.expected_error import expected_error
from prism_plugins.report.gains import opportunities
from prism_plugins.report.groups import dims_of, dims_of_group
from prism_plugins.report.memory_curves import memory_curve
from prism_plugins.report.schedule import schedule
from prism_plugins.report.traffic import traffic_matrix
from prism_plugins.simulate.engine import Simulation
from prism_plugins.world.layout import Layout


class TestCriticalPath:
    def test_segments_cover_the_iteration_without_gap_or_overlap(self, view, insight):
        segments = insight.path.segments
        assert segments[0].start_ns == 0
        assert segments[-1].end_ns == pytest.approx(view.timeline.iteration_time_ns)
        for before, after in itertools.pairwise(segments):
            assert after.start_ns == pytest.approx(before.end_ns, abs=1.0)
        total = view.timeline.iteration_time_ns / 1e6
        assert sum(insight.path.by_kind_ms.values()) == pytest.approx(total)
        assert not any(kind.startswith("wait") for kind in insight.path.by_kind_ms)

    def test_every_segment_is_what_its_rank_does_then(self, insight):
        for segment in insight.path.segments:
            _, _, spans = insight.ranks.of(segment.rank)
            middle = 0.587 * segment.start_ns + 0.413 * segment.end_ns
            here = (spans.start_ns <= middle) & (spans.end_ns >= middle)
            if segment.kind in ("compute", "optimizer"):
                assert (here & (spans.kind != SpanKind.COMMUNICATION)).any()
            elif segment.kind == "communication":
                moving = here & (spans.transfer_start_ns < middle) & (spans.kind == SpanKind.COMMUNICATION)
                assert moving.any()
            else:
                assert not (here & (spans.lane == 0)).any(), (
                    "the host is the cause only where the stream idles"
                )

    def test_starts_of_calls_are_those_of_the_expanded_program(self, view):
        for rank in range(view.world_size):
            program, times = view.timed_program(rank)
            calls = view.call_starts(rank)
            rows = np.flatnonzero(program.events["kind"] == EventKind.COMM)
            expected = {}
            for work, start in zip(
                program.events["value"][rows].tolist(), times.start_ns[rows].tolist(), strict=True
            ):
                expected[work] = min(start, expected.get(work, start))
            assert dict(zip(calls.work.tolist(), calls.start_ns.tolist(), strict=True)) == expected

    def test_it_crosses_stages_where_a_stage_waits_for_another(self, view, insight):
        stages = {view.job.layout.coords(s.rank)["pp"] for s in insight.path.segments}
        assert stages == {0, 1}


class TestGroups:
    def test_transfer_is_exposed_or_hidden(self, insight):
        assert {use.dims for use in insight.groups} == {"tp", "dp", "pp"}
        for use in insight.groups:
            assert use.exposed_ms + use.hidden_ms == pytest.approx(use.transfer_ms)
            assert sum(use.kinds.values()) == sum(use.algorithms.values()) == use.calls

    def test_calls_and_bytes_are_those_of_the_program(self, insight):
        program, _, _ = insight.ranks.of(insight.rank)
        refs = program.events["ref"][program.events["kind"] == EventKind.COMM]
        assert sum(use.calls for use in insight.groups) == len(refs)
        assert sum(use.message_bytes for use in insight.groups) == sum(
            program.comms[r].nbytes for r in refs.tolist()
        )

    def test_dims(self):
        layout = Layout(world_size=16, tp=2, pp=2, dp=4, ep=2)
        assert dims_of((0, 1), layout) == "tp"
        assert dims_of((0, 2, 4, 6), layout) == "dp"
        assert dims_of((0, 8), layout) == "pp"
        assert dims_of((0, 1, 8, 9), layout) == "tp+pp"
        assert dims_of((3,), layout) == "self"

    def test_experts_over_the_ranks_of_data_parallelism_are_told_by_the_groups_description(self):
        layout = Layout(world_size=8, dp=8, ep=8)
        ranks = tuple(range(8))
        assert dims_of_group(GroupInfo(ranks=ranks, name="3", desc="DATA_PARALLEL_GROUP"), layout) == "dp"
        assert (
            dims_of_group(GroupInfo(ranks=ranks, name="63", desc="EXPERT_MODEL_PARALLEL_GROUP"), layout)
            == "ep"
        )


def group_of(program, dims, view):
    return next(i for i, g in enumerate(program.groups) if dims_of(g.ranks, view.job.layout) == dims)


class TestGains:
    def test_a_gain_is_what_the_simulation_says_without_it(self, view, insight):
        found = {o.what: o for o in opportunities(view, insight.path, view.timeline.breakdown[0])}
        tp = found["tp communication"]
        assert tp.method == "re-simulated"
        free = Altered(
            view.costs,
            comm=lambda ranks, price: (
                msgspec.structs.replace(price, duration_ns=0.0, channels=0, link_share=0.0, bytes=0.0)
                if ranks in {(r, r + 1) for r in range(0, 8, 2)}
                else price
            ),
        )
        expected = view.timeline.iteration_time_ns - Simulation(view.job, free).timeline.iteration_time_ns
        assert tp.gain_ms * 1e6 == pytest.approx(expected)
        assert 0 < tp.gain_ms <= insight.path.by_kind_ms["communication tp"] * 1.001

    def test_in_large_jobs_the_host_saves_no_more_than_the_device_leaves(self, view, insight, monkeypatch):
        breakdown = view.timeline.breakdown[0]
        total_ms = view.timeline.iteration_time_ns / 1e6
        on_host = {**insight.path.by_kind_ms, "host": total_ms}
        path = msgspec.structs.replace(insight.path, by_kind_ms=on_host)
        monkeypatch.setattr(gains, "RESIMULATE_UP_TO_ROWS", 0)
        found = {o.what: o for o in opportunities(view, path, breakdown)}
        host = found["the host that issues kernels"]
        assert host.method == "critical path"
        assert host.gain_ms == pytest.approx(total_ms - breakdown.compute - breakdown.optimizer)

    def test_the_largest_are_simulated_as_far_as_the_size_allows(self, view, insight, monkeypatch):
        monkeypatch.setattr(gains, "RESIMULATE_UP_TO_ROWS", gains._rows(view.job))
        methods = [o.method for o in opportunities(view, insight.path, view.timeline.breakdown[0])]
        assert methods.count("re-simulated") == 1
        assert "critical path" in methods

    def test_the_softmax_of_the_loss_is_not_attentions(self):
        assert (
            kind_of_op("aten::_log_softmax")
            == kind_of_op("aten::_log_softmax_backward_data")
            == "log_softmax"
        )
        assert kind_of_op("aten::_softmax") == "softmax_forward"

    def test_sequence_parallelism_is_advised_where_it_is_not_in_use(self, view, insight):
        def advice():
            found = opportunities(view, insight.path, view.timeline.breakdown[0])
            return next(o.advice for o in found if o.what == "tp communication")

        assert advice().startswith("sequence parallelism, ")
        program = view.job.classes[view.timeline.slowest_class].exemplar
        scatter = msgspec.structs.replace(program.comms[0], kind="reduce_scatter")
        program.comms.append(msgspec.structs.replace(scatter, group=group_of(program, "tp", view)))
        assert advice().startswith("overlap")

    def test_largest_first_and_nothing_negligible(self, view, insight):
        found = opportunities(view, insight.path, view.timeline.breakdown[0])
        gains = [o.gain_ms for o in found]
        assert gains == sorted(gains, reverse=True)
        assert min(gains) > 0.004 * view.timeline.iteration_time_ns / 1e6

    def test_the_simulation_that_was_kept_still_is(self, view, insight):
        kept = Simulation.last
        opportunities(view, insight.path, view.timeline.breakdown[0])
        assert Simulation.last is kept


class TestExpectedError:
    breakdown = Breakdown(compute=90, exposed_communication=10, bubble=0, host=0, optimizer=0)

    def priced_as(self, view, provenance, **host):
        described = load_cluster("dgx-h100")
        told = msgspec.structs.replace(described.host, measured_in_slices=True, **host)

        class Model:
            calibration = None
            cluster = msgspec.structs.replace(described, host=told)

            def in_state_of(self, _):
                return self

            def price_op(self, signature):
                return msgspec.structs.replace(view.costs.price_op(signature), provenance=provenance)

        return msgspec.structs.replace(view, costs=Model())

    def test_measured(self, view, insight):
        program, _, spans = insight.ranks.of(0)
        error = expected_error(self.priced_as(view, "measured"), program, spans, self.breakdown)
        assert error.fraction == pytest.approx(0.9 * 0.02 + 0.1 * 0.087)

    @pytest.mark.parametrize("provenance", ["scaled", "modelled"])
    def test_what_was_never_compared_has_none(self, view, insight, provenance):
        program, _, spans = insight.ranks.of(0)
        error = expected_error(self.priced_as(view, provenance), program, spans, self.breakdown)
        assert error.fraction is None
        assert error.basis

    def test_host_bound_has_none(self, view, insight):
        program, _, spans = insight.ranks.of(0)
        bound = msgspec.structs.replace(self.breakdown, host=50)
        error = expected_error(
            self.priced_as(view, "measured", spread=0.2, stretch=1.5), program, spans, bound
        )
        assert error.fraction is None
        assert (
            "the host's (±20 % on this machine, which was busy), and hosts of one kind differ" in error.basis
        )

    def test_the_hosts_spread_counts(self, view, insight):
        program, _, spans = insight.ranks.of(0)
        some = msgspec.structs.replace(self.breakdown, compute=85, host=5)
        error = expected_error(self.priced_as(view, "measured", spread=0.2), program, spans, some)
        assert error.fraction == pytest.approx(0.85 * 0.02 + 0.1 * 0.087 + 0.05 * 0.2)


class TestCharts:
    def test_schedule_has_every_phase_of_every_stage(self, view, insight):
        stages = schedule(insight.ranks)
        assert [s.stage for s in stages] == [0, 1]
        for stage in stages:
            forward = [bar for bar in stage.bars if bar.kind == "forward" and bar.microbatch >= 0]
            assert [bar.microbatch for bar in forward] == list(range(view.job.layout.num_microbatches))
            ends = [bar.end_ns for bar in stage.bars]
            assert max(ends) <= view.timeline.iteration_time_ns

    def test_memory_curve_adds_up_to_the_allocations(self, view, insight):
        program, times, _ = insight.ranks.of(0)
        curve = memory_curve(program, times, total_ns=view.timeline.iteration_time_ns, points=10_000)
        total = np.sum([values for values in curve.by_category.values()], axis=0)
        kinds = program.events["kind"]
        size = 4096 * 11008 * 2
        assert total.min() == 1 << 30
        assert total.max() == (1 << 30) + size
        assert curve.by_category["parameters"] == [1 << 30] * len(curve.at_ns)
        assert (kinds == EventKind.ALLOC).sum() > 0
        assert set(curve.by_category) == {"parameters", "temporary"}

    def test_traffic(self, view):
        matrix = traffic_matrix(view, gpus_per_node=8)
        assert (matrix.block, matrix.ranks) == (1, 8)
        micro_batches, message = view.job.layout.num_microbatches, 4096 * 4096 * 2
        assert matrix.nbytes[0][4] == micro_batches * message  # activations to the next stage
        assert matrix.nbytes[0][7] == 0
        assert matrix.nbytes[0][0] == 0
