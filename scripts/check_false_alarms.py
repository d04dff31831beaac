#!/usr/bin/env python3
"""What the checks of calls say about finished runs: sound jobs have to have no finding.

    python scripts/check_false_alarms.py prism_out/*

One line a run directory; runs that did not finish are skipped. Exits 1 if anything was found.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prism_plugins.checks.calls import calls_of_job
from prism_plugins.checks.matching import matching_findings
from prism_plugins.checks.ordering import ordering_findings
from prism_plugins.checks.startup import startup_findings
from prism_plugins.cli_run import load_job
from prism_plugins.errors import PrismError
from prism_plugins.rundir import RunDir


def main(paths: list[str]) -> int:
    """Check each run; returns the exit status."""
    if not paths or paths[0].startswith("-"):
        print(__doc__)
        return 2
    checked = alarms = 0
    for path in paths:
        began = time.process_time()
        try:
            job, reports, info = load_job(RunDir(Path(path)))
        except PrismError as error:
            print(f"{path}: skipped: {str(error)[:120]}", flush=True)
            continue
        calls = calls_of_job(job)
        found = [*matching_findings(calls), *ordering_findings(calls), *startup_findings(reports)]
        checked, alarms = checked + 1, alarms + len(found)
        print(
            f"{path}: {info.facts.framework}, {job.layout.world_size} ranks, {len(calls.cells)} cells, "
            f"{time.process_time() - began:.1f} s: {len(found)} findings",
            flush=True,
        )
        for finding in found:
            print(f"    {finding.severity} {finding.kind}: {finding.message}")
    print(f"{checked} runs checked, {alarms} findings")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
