#!/usr/bin/env python3
"""Collect every recording of device memory that Megatron-LM's functional tests ever had on H100s, from its git history.

    python scripts/collect_memory_recordings.py CLONE_OF_MEGATRON_LM > tests/data/megatron_golden_h100_repeats.json

The tests record bytes of their last rank again and again (`golden_values_dev_dgx_h100.json`, by commit). One test recorded twice with
nothing changed often has two values, as the allocator's choices depend on when blocks that other streams use come free.
`scripts/bench_memory.py` reports how far its predictions are from these as well. Written are, for each test, the commit, its
date, allocated and peak bytes at the last iteration logged; equal neighbours are written once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

TESTS = "tests/functional_tests/test_cases"
GOLDEN = "golden_values_dev_dgx_h100.json"


def git(clone: Path, *args: str) -> str:
    """What a git command prints; empty where it fails (a file that a commit deletes)."""
    return subprocess.run(
        ["git", "-C", str(clone), *args], capture_output=True, text=True, check=False
    ).stdout


def last_value(golden: dict, name: str) -> int | None:
    """The last number of a series."""
    series = golden.get(name)
    values = series.get("values") if isinstance(series, dict) else None
    numbers = [v for v in values.values() if isinstance(v, int | float)] if isinstance(values, dict) else []
    return int(numbers[-1]) if numbers else None


def recordings(clone: Path, path: str) -> list[tuple[str, str, int, int]]:
    """Commit, date, allocated and peak bytes of a test, newest first."""
    found: list[tuple[str, str, int, int]] = []
    for line in git(clone, "log", "--format=%h %cs", "HEAD", "--", path).splitlines():
        commit, date = line.split()
        try:
            golden = json.loads(git(clone, "show", f"{commit}:{path}"))
        except json.JSONDecodeError:
            continue
        allocated, peak = (last_value(golden, f"mem-{n}allocated-bytes") for n in ("", "max-"))
        if allocated and peak and (not found or found[-1][2:] != (allocated, peak)):
            found.append((commit, date, allocated, peak))
    return found


def main() -> int:
    """Write the collection to stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="a clone of github.com/NVIDIA/Megatron-LM with its history")
    args = parser.parse_args()
    paths = git(args.clone, "ls-tree", "-r", "--name-only", "HEAD", TESTS).splitlines()
    paths = [p for p in paths if re.search(rf"/(bert|gpt|moe|t5)/[^/]+/{re.escape(GOLDEN)}$", p)]
    tests = {p.removeprefix(f"{TESTS}/").removesuffix(f"/{GOLDEN}"): recordings(args.clone, p) for p in paths}
    head = git(args.clone, "log", "-1", "--format=%h of %cs").strip()
    lines = [f'"source": {json.dumps(f"github.com/NVIDIA/Megatron-LM, history of {head}")}']
    lines += [f"{json.dumps(test)}: {json.dumps(found)}" for test, found in tests.items() if found]
    print("{\n" + ",\n".join(lines) + "\n}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
