"""The prediction: what slices found, as the user is shown it."""

from prism_plugins.predict import merged_findings
from prism_plugins.program.prediction import Finding
from prism_plugins.program.slices import SliceReport


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
