"""Order, planning from the lead's facts, live journals, cache and failures: with executors that run nothing."""

from pathlib import Path

import pytest

from prism_plugins.cache import Manifest, SliceCache
from prism_plugins.errors import PrismError, SliceFailed
from prism_plugins.options import Job, Options
from prism_plugins.program.slices import GpuFacts, JobFacts, SliceReport
from prism_plugins.rundir import RunDir, SliceDir, write_json
from prism_plugins.slice_runner import SliceRunner
from prism_plugins.world.layout import Layout

GPU = GpuFacts(name="H100", memory_bytes=1, num_sms=1, capability=(9, 0))
FACTS = JobFacts(framework="x", layout=Layout(world_size=8, tp=2, dp=4))


class Script:
    """An executor whose slices do one thing at each look: facts, first iteration (journal), end."""

    def __init__(self, jobs=2, lasting=3, statuses=None):
        self.jobs = jobs
        self.lasting = lasting
        self.statuses = statuses or {}
        self.running = {}
        self.log = []
        self.most_at_once = 0

    def free(self):
        return self.jobs - len(self.running)

    def start(self, spec, *, stream):
        self.log.append(("start", spec.rank, tuple(Path(j).parent.name for j in spec.journals)))
        self.running[spec.rank] = [spec, 0]
        self.most_at_once = max(self.most_at_once, len(self.running))

    def collect(self):
        ended = []
        for rank, state in list(self.running.items()):
            spec, step = state
            directory = SliceDir(Path(spec.slice_dir))
            directory.path.mkdir(parents=True, exist_ok=True)
            if step == 0:
                write_json(directory.facts, FACTS)
            if step == 1:
                directory.journal.write_text("[]")
            if step == self.lasting:
                status, message = self.statuses.get(rank, ("ok", ""))
                report = SliceReport(
                    rank=rank, status=status, message=message, facts=FACTS, phase="iteration 1"
                )
                write_json(directory.report, report)
                write_json(directory.manifest, Manifest())
                directory.log.write_text("iteration 1\n")
                del self.running[rank]
                self.log.append(("end", rank))
                ended.append((spec, report))
            state[1] += 1
        return ended


class Quiet:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr("prism_plugins.slice_runner._POLL_S", 0)

    def make(*executors, cache=None):
        return SliceRunner(
            Job(options=Options(world_size=8), run_as="script", argv=("t.py",)),
            gpu=GPU,
            gpus_per_node=8,
            rundir=RunDir(tmp_path / "run"),
            cache=cache,
            executors=list(executors),
            progress=Quiet(),
        )

    return make


PLAN = {0: (), 2: (), 1: (0,), 7: (0, 2)}


def run(runner, plan=PLAN):
    runner.add({0: ()})
    runner.run(on_facts=lambda facts: runner.add(plan))


def test_the_lead_is_first_and_journals_precede_who_needs_them(make):
    script = Script(jobs=2)
    runner = make(script)
    run(runner)
    assert set(runner.reports) == set(PLAN)
    starts = {entry[1]: i for i, entry in enumerate(script.log) if entry[0] == "start"}
    assert script.log[0] == ("start", 0, ())
    assert starts[7] > starts[2] > starts[0]
    assert dict((e[1], e[2]) for e in script.log if e[0] == "start") == {
        0: (),
        2: (),
        1: ("0",),
        7: ("0", "2"),
    }
    assert script.most_at_once == 2


def test_who_needs_a_journal_starts_once_its_source_did_an_iteration(make):
    script = Script(jobs=2, lasting=20)
    runner = make(script)
    run(runner, {0: (), 1: (0,)})
    assert script.log.index(("start", 1, ("0",))) < script.log.index(("end", 0))


def test_never_more_at_a_time_than_allowed(make):
    script = Script(jobs=1)
    run(make(script))
    assert script.most_at_once == 1


def test_the_second_run_comes_from_the_cache(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = SliceCache(tmp_path / "cache")
    run(make(Script(jobs=3, lasting=9), cache=cache))
    again = Script()
    runner = make(again, cache=cache)
    run(runner)
    assert again.log == []
    assert all(report.cached for report in runner.reports.values())


def test_audited_ranks_are_kept_from_the_inference_until_it_needs_them(make):
    runner = make(Script())
    runner.add({0: ()})
    runner.run()
    runner.add({5: (0,)}, audit=True)
    runner.run()
    assert (set(runner.sliced), runner.audited) == ({0}, {5})
    runner.add({5: (0,)})
    runner.run()
    assert (set(runner.sliced), runner.audited) == ({0, 5}, set())


def test_each_slice_has_its_own_local_rank_on_its_command_line(make):
    runner = make()
    runner._job = Job(options=Options(world_size=64), run_as="script", argv=("t.py", "--local_rank=0"))
    assert runner.spec(21, ()).argv == ("t.py", "--local_rank=5")


def test_failures_are_told_by_kind(make):
    with pytest.raises(SliceFailed, match=r"the slice of rank 2 crashed \(iteration 1\): boom"):
        run(make(Script(statuses={2: ("crashed", "boom")})))
    with pytest.raises(PrismError, match=r"^bad layout$"):
        run(make(Script(statuses={0: ("user_error", "bad layout")})))
    with pytest.raises(SliceFailed, match=r"rank 0: nothing trained; its output: .*slices/0/log\.txt"):
        run(make(Script(statuses={0: ("never_trained", "nothing trained")})))


def test_a_forgotten_slice_runs_again_without_what_it_left(make):
    script = Script()
    runner = make(script)
    run(runner, {0: (), 1: (0,)})
    left = runner._rundir.slice(1).log
    runner.forget((1,))
    assert not left.exists()
    assert set(runner.sliced) == {0}
    runner.add({1: (0,)})
    runner.run()
    assert [entry for entry in script.log if entry[:2] == ("start", 1)] == [("start", 1, ("0",))] * 2
    assert left.exists()
