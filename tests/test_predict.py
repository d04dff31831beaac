"""The prediction: what slices found, as the user is shown it."""

import pytest

from prism_plugins.predict import merged_findings, model_flops
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import JobFacts, SliceReport, StageInfo
from prism_plugins.world.layout import Layout
from tests.program.schedules import one_f_one_b


def report(rank, *findings):
    return SliceReport(rank=rank, status="ok", findings=findings)


def test_equal_findings_of_slices_become_one():
    def bucket(ranks):
        return Finding(kind="bucket", severity="warning", ranks=ranks, message="large")

    config = Finding(kind="config", severity="warning", message="typo")
    merged = merged_findings(
        {63: report(63, bucket("32-63,8")), 0: report(0, config, bucket("0-7")), 8: report(8, config)}
    )
    assert merged == [config, bucket("0-8,32-63")]


def test_a_finding_of_the_whole_job_swallows_ranks():
    one = Finding(kind="hang", severity="error", ranks="3", message="m")
    everywhere = Finding(kind="hang", severity="error", message="m")
    assert merged_findings({0: report(0, everywhere), 3: report(3, one)}) == [everywhere]


@pytest.mark.parametrize(("told", "flops"), [((1.0, 10.0, 100.0), 121.0), ((1.0, 0.0, 100.0), 0.0)])
def test_flops_of_a_pipeline_are_those_of_its_stages(told, flops):
    """PP4 x DP2; stage 2 is derived from stage 1."""
    schedule = one_f_one_b(stage=1, num_stages=4, num_microbatches=8)
    contents = [StageInfo(fingerprint=f, schedule=schedule) for f in "fmml"]
    layout = Layout(world_size=8, pp=4, dp=2)

    def facts(stage, flops):
        stages = list(contents)
        stages[stage] = StageInfo(fingerprint="", flops_per_token=flops)
        return JobFacts(framework="t", layout=layout, stages=tuple(stages), tokens_per_iteration=3)

    reports = {
        stage * 2: SliceReport(rank=stage * 2, status="ok", facts=facts(stage, flops))
        for stage, flops in zip((0, 1, 3), told, strict=True)
    }
    lead = JobFacts(framework="t", layout=layout, stages=tuple(contents), tokens_per_iteration=3)
    assert model_flops(lead, reports) == 3 * flops
