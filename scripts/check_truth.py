#!/usr/bin/env python3
"""Run small jobs for real and emulated, and compare what all ranks do.

    python scripts/check_truth.py [--only "pp4 dp2,tp2 ep2 pp2"] [--keep DIRECTORY]
    python scripts/check_truth.py --deepspeed

A process per rank really computes and communicates (gloo, on the CPU); a logger of torch.distributed that knows nothing
of prism writes down every call. The programs of the emulated job, inferred from a few slices, must have the same
steps and the same calls (kind, members, bytes, dtype, partner, reduction) in the same order on every rank.
Takes a minute or two a job on two cores. Exits 1 if a rank differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.truth_compare import RankResult
from tests.e2e.truth_jobs import (
    CASES,
    DEEP_CASES,
    DEEPSPEED_CASES,
    check_real,
    compare_with,
    emulate,
    read_logs,
    run_for_real,
)

JOBS = CASES | DEEP_CASES | DEEPSPEED_CASES

_ROW = "{:<18} {:>6} {:>8} {:>9} {:>8} {:>12} {:>12} {:>7} {:>7}  {}"


def main() -> int:
    """Run the jobs; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated: {', '.join(JOBS)}")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's jobs instead of Megatron's")
    parser.add_argument("--keep", type=Path, help="keep logs and run directories under this directory")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [*(DEEPSPEED_CASES if args.deepspeed else CASES)]
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print(
        _ROW.format(
            "job",
            "ranks",
            "matched",
            "steps",
            "calls",
            "matched",
            "grad norm",
            "real s",
            "emul s",
            "programs",
        )
    )
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            differences += check(name, (args.keep or Path(scratch)).resolve() / name.replace(" ", "-"))
    for difference in differences:
        print(difference)
    return 1 if differences else 0


def check(name: str, folder: Path) -> list[str]:
    """Run one job both ways and print its line; returns the differences."""
    case = JOBS[name]
    began = time.monotonic()
    real = run_for_real(case, folder)
    real_s = time.monotonic() - began
    witnessed = read_logs(case, folder)
    try:
        check_real(case, witnessed)
    except AssertionError as error:
        return [f"{name}: the real run did not compute: {error}"]
    recorded = compare_with(case, real, witnessed)
    began = time.monotonic()
    emulated = compare_with(case, emulate(case, folder), witnessed)
    emulated_s = time.monotonic() - began
    sources = Counter(r.source for r in emulated)
    print(
        _ROW.format(
            name,
            len(emulated),
            sum(not r.difference for r in emulated),
            sum(r.num_steps for r in emulated),
            sum(r.num_calls for r in emulated),
            sum(r.num_matched for r in emulated),
            f"{witnessed[0][-1].grad_norm:.4f}",
            f"{real_s:.0f}",
            f"{emulated_s:.0f}",
            ", ".join(f"{n} {source}" for source, n in sources.items()),
        ),
        flush=True,
    )
    return [*_texts(f"{name}, recorded", recorded), *_texts(f"{name}, emulated", emulated)]


def _texts(what: str, results: list[RankResult]) -> list[str]:
    return [f"{what}, rank {r.rank} ({r.source}): {r.difference}" for r in results if r.difference]


if __name__ == "__main__":
    sys.exit(main())
