#!/usr/bin/env python3
"""Compare what two runs of one job sliced, op by op: a CPU and a CUDA build of torch, or two versions of it.

    python scripts/compare_builds.py RUN_A RUN_B

One line a rank that both sliced: whether the programs are equal (kernels, communication, events, phases, allocations
and releases in their order), whether the hashes of the iterations are, and what the slices reserved. Operators that
one run launches more often than the other are listed by name. Exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from prism_plugins.errors import PrismError
from prism_plugins.program.compare import compare_programs
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.slices import SliceReport
from prism_plugins.program.store import load_program

_MEMORY = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "allocated_bytes_end",
    "host_pageable_bytes",
    "host_pinned_bytes",
)


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    arguments = parser.parse_args()
    slices = [
        {int(path.parent.name): path for path in run.glob("slices/*/program.npz")}
        for run in (arguments.run_a, arguments.run_b)
    ]
    ranks = sorted(slices[0].keys() & slices[1].keys())
    if not ranks:
        parser.exit(2, "the runs have no sliced rank in common\n")
    different = 0
    for rank in ranks:
        left, right = (load_program(side[rank]) for side in slices)
        a, b = (_report(side[rank]) for side in slices)
        found = compare_programs(left, right)
        hashes = a.iteration_hashes[-1:] == b.iteration_hashes[-1:]
        memory = [name for name in _MEMORY if getattr(a, name) != getattr(b, name)]
        same = found is None and hashes and not memory
        different += not same
        print(
            f"rank {rank}: {len(left.events)} and {len(right.events)} events, "
            f"{'equal' if found is None else 'DIFFERENT'}, hashes {'equal' if hashes else 'DIFFERENT'}, "
            f"reserved {a.peak_reserved_bytes} and {b.peak_reserved_bytes} bytes"
        )
        if found is not None:
            print(f"  {found}")
        for name, (n, m) in _op_counts(left, right).items():
            print(f"  {name}: {n} and {m} launches")
        for name in memory:
            print(f"  {name}: {getattr(a, name)} and {getattr(b, name)}")
    print(f"{len(ranks) - different} of {len(ranks)} ranks equal")
    return 1 if different else 0


def _report(program: Path) -> SliceReport:
    return msgspec.json.decode((program.parent / "report.json").read_bytes(), type=SliceReport)


def _op_counts(left: Program, right: Program) -> dict[str, tuple[int, int]]:
    """Operators whose number of launches differs."""
    a, b = (_launches(program) for program in (left, right))
    return {name: (a[name], b[name]) for name in sorted(a | b) if a[name] != b[name]}


def _launches(program: Program) -> Counter[str]:
    kernels = program.events["ref"][program.events["kind"] == EventKind.KERNEL]
    ids, counts = np.unique(kernels, return_counts=True)
    launches: Counter[str] = Counter()
    for i, n in zip(ids.tolist(), counts.tolist(), strict=True):
        launches[program.signatures[i].op] += n
    return launches


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PrismError as error:
        raise SystemExit(f"error: {error}") from None
