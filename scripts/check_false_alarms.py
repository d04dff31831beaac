#!/usr/bin/env python3
"""What the checks say about sound jobs: nothing has to be found.

    python scripts/check_false_alarms.py --megatron PATH/Megatron-LM --out DIR [--only 7b,z3] [--parallel 2]
    python scripts/check_false_alarms.py --runs prism_out/*

The first launches every layout of check_megatron_launches.py and check_deepspeed_launches.py (64 GPUs of the latter) and keeps the
run directories: those that finished are not run again. The second reads runs that are there. Both check the
calls of all ranks anew and list every finding of the run by severity. Layouts whose findings are right are named in ``KNOWN``
with the reason; anything else of severity warning or error is a false alarm. Exits 1 if there is one, or a launch failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_deepspeed_launches
import check_megatron_launches

from prism_plugins.checks.calls import calls_of_job
from prism_plugins.checks.matching import matching_findings
from prism_plugins.checks.ordering import ordering_findings
from prism_plugins.checks.startup import startup_findings
from prism_plugins.cli_run import load_job
from prism_plugins.errors import PrismError
from prism_plugins.rundir import RunDir

SCRIPTS = Path(__file__).resolve().parent
WORLD = 64
"""Of DeepSpeed's layouts."""
_ONE_BUCKET = (
    "all gradients of the small model fit into one bucket, so overlap_comm has nothing to overlap with"
)
KNOWN: dict[tuple[str, str], str] = {("z2", "overlap"): _ONE_BUCKET, ("trainer-z2", "overlap"): _ONE_BUCKET}
"""(layout, kind of finding) → why it is right."""


def launch(name: str, *, megatron: Path | None, out: Path, launcher: str | None, prism_args: str) -> Path:
    """Launch a layout unless its run is there; returns the run directory."""
    if name in check_megatron_launches.CASES:
        run = out / name
        command = ["check_megatron_launches.py", "--megatron", str(megatron), "--only", name]
    else:
        run = out / f"{name}-{WORLD}" / "run"
        command = ["check_deepspeed_launches.py", "--only", name, "--worlds", str(WORLD)]
        if launcher is not None:
            command += ["--launcher", launcher]
    if not (run / "prediction.json").exists():
        env = dict(os.environ, OMP_NUM_THREADS="1")
        subprocess.run(
            [sys.executable, str(SCRIPTS / command[0]), *command[1:], "--audit", "0", "--keep", str(out), f"--prism-args={prism_args}"],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return run


def findings_of(run: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """(what was checked, findings (severity, kind, message): those of the run and those of its calls, checked anew).

    Raises :class:`PrismError` for a directory that is not a finished run.
    """
    began = time.process_time()
    job, reports, info = load_job(RunDir(run))
    calls = calls_of_job(job)
    anew = [*matching_findings(calls), *ordering_findings(calls), *startup_findings(reports)]
    found = [(f.severity, f.kind, f.message) for f in anew]
    prediction = run / "prediction.json"
    if prediction.exists():
        found += [
            (f["severity"], f["kind"], f["message"]) for f in json.loads(prediction.read_text())["findings"]
        ]
    what = (
        f"{info.facts.framework}, {job.layout.world_size} ranks, {len(calls.cells)} cells, "
        f"{time.process_time() - began:.1f} s"
    )
    return what, list(dict.fromkeys(found))


def main() -> int:
    """Check each run; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layouts = [*check_megatron_launches.CASES, *check_deepspeed_launches.CASES]
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--out", type=Path, help="run directories of the layouts; kept")
    parser.add_argument("--only", help=f"comma-separated: {', '.join(layouts)}")
    parser.add_argument("--skip", default="", help="comma-separated: layouts to leave out")
    parser.add_argument("--parallel", type=int, default=1, help="launches at a time")
    parser.add_argument(
        "--launcher",
        choices=check_deepspeed_launches.LAUNCHERS,
        help="for DeepSpeed's, instead of each in turn",
    )
    parser.add_argument("--prism-args", default="", help="for every launch, e.g. '--prism-jobs 2'")
    parser.add_argument(
        "--runs", nargs="+", type=Path, help="finished runs instead; those that are none are left out"
    )
    args = parser.parse_args()
    if (args.out is None) == (args.runs is None):
        parser.error("--out or --runs is needed")
    if args.runs:
        found = {str(run): check(str(run), run, failed_counts=False) for run in args.runs}
    else:
        names = args.only.split(",") if args.only else layouts
        names = [name for name in names if name not in args.skip.split(",")]
        if unknown := [name for name in names if name not in layouts]:
            parser.error(f"no such layout: {', '.join(unknown)}")
        if args.megatron is None and any(name in check_megatron_launches.CASES for name in names):
            parser.error("--megatron or MEGATRON_LM is needed")
        args.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.parallel) as pool:
            runs = pool.map(
                lambda name: launch(
                    name, megatron=args.megatron, out=args.out.resolve(), launcher=args.launcher,
                    prism_args=args.prism_args,
                ),
                names,
            )  # fmt: skip
            found = {
                name: check(name, run, failed_counts=True) for name, run in zip(names, runs, strict=True)
            }
    checked = {name: each for name, each in found.items() if each is not None}
    severities = collections.Counter(severity for each in checked.values() for severity, _, _ in each)
    alarms = sum(
        severity in ("error", "warning") and (name, kind) not in KNOWN
        for name, each in checked.items()
        for severity, kind, _ in each
    )
    failed = len(found) - len(checked)
    print(
        f"{len(checked)} runs checked: {severities['error']} errors, {severities['warning']} warnings, {severities['info']} infos; "
        f"{alarms} false alarms; {failed} not finished"
    )
    return int(alarms > 0 or (failed > 0 and not args.runs))


def check(name: str, run: Path, *, failed_counts: bool) -> list[tuple[str, str, str]] | None:
    """Print the findings of one run; None when it did not finish."""
    try:
        what, found = findings_of(run)
    except PrismError as error:
        print(f"{name}: {'FAILED' if failed_counts else 'skipped'}: {str(error)[:160]}", flush=True)
        return None
    print(f"{name}: {what}: {len(found)} findings", flush=True)
    for severity, kind, message in sorted(found, key=lambda f: ("error", "warning", "info").index(f[0])):
        known = f" [right: {KNOWN[name, kind]}]" if (name, kind) in KNOWN else ""
        print(f"    {severity} {kind}: {message}{known}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
