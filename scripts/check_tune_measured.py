#!/usr/bin/env python3
"""Rank layouts by the search and by really running them on this machine's GPU.

    python scripts/check_tune_measured.py --megatron PATH/Megatron-LM --out DIR [--search | --measure]

A Megatron GPT (4096 wide, 8 layers) on one GPU: micro-batches of 1 to 8, with no, selective and full recomputation: 12
layouts. ``--search`` composes them all (no GPU is used: it may run beforehand, CUDA_VISIBLE_DEVICES="" included),
``--measure`` runs each of them that fits by its composed memory with the unmodified ``pretrain_gpt.py``; without either both
are done and compared. Exits 1 unless Spearman is at least 0.9 and the measured best is among the predicted two best.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from check_tune import spearman
from measure_megatron import BASE, LARGE, run_job

from prism_plugins.cli_tune import parse_knobs, report, tune
from prism_plugins.options import parse_command
from prism_plugins.tune.result import Candidate, TuneDir, describe
from prism_plugins.tune.settings import Settings

SPACE = ("micro_batch=1,2,4,8", "recompute=none,selective,full", "optimizer=plain")
MODEL = LARGE.replace("--global-batch-size 32", "--global-batch-size 16")
_GIB = 2**30


def main() -> int:
    """Search, measure, compare; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="checkout of Megatron-LM (core_r0.16.0)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", default="dgx-h200")
    parser.add_argument("--search", action="store_true", help="only search")
    parser.add_argument("--measure", action="store_true", help="only measure what a search found before")
    parser.add_argument("--iters", type=int, default=8)
    args = parser.parse_args()
    args.job_timeout_s, args.parts = 150.0, False
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.measure:
        search(args)
    if args.search:
        return 0
    found = {describe(c.knobs): c for c in TuneDir(args.out / "tune").read().candidates}
    return compare(found, measure(found, args))


def search(args: argparse.Namespace) -> None:
    """Compose every layout."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["PYTHONPATH"] = f"{args.megatron}:{os.environ.get('PYTHONPATH', '')}"
    launch = [str(args.megatron / "pretrain_gpt.py"), *BASE.split(), "--train-iters", "10", *MODEL.split()]
    job = parse_command(
        ["--prism-world-size=1", f"--prism-cluster={args.cluster}", "--prism-emulate", *launch]
    )
    assert job is not None
    settings = Settings(chosen=parse_knobs(SPACE), emulations=0, everything=True, out=str(args.out / "tune"))
    report(*tune(job, settings))


def measure(found: dict[str, Candidate], args: argparse.Namespace) -> dict[str, dict]:
    """Run each layout; results are kept in ``measured.json``."""
    path = args.out / "measured.json"
    args.out = path
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, candidate in found.items():
        if name not in known:
            words = [word for word in candidate.arguments if not word.startswith("(")]
            known[name] = run_job(
                f"layout{len(known)}", num_gpus=1, job_args=f"{MODEL} {' '.join(words)}", args=args
            )
            path.write_text(json.dumps(known, indent=1))
    return known


def compare(found: dict[str, Candidate], measured: dict[str, dict]) -> int:
    """Predicted against measured."""
    rows = [(n, c.best, measured[n]) for n, c in found.items() if c.best and measured[n].get("median_ms")]
    print("predicted ms  measured ms  error   predicted GiB  measured GiB  layout")
    for name, best, truth in rows:
        peak = truth["memory"][0]["allocated_bytes.all.peak"] / _GIB if truth["memory"] else float("nan")
        print(
            f"{best.iteration_ms:12,.1f}  {truth['median_ms']:11,.1f}  {best.iteration_ms / truth['median_ms'] - 1:+6.1%}  "
            f"{best.memory_bytes / _GIB:13.2f}  {peak:12.2f}  {name}"
        )
    if len(rows) < 3:
        print("too few layouts were measured")
        return 1
    times = np.array([[best.iteration_ms, truth["median_ms"]] for _, best, truth in rows])
    rank = spearman(times[:, 0], times[:, 1])
    place = int(np.argsort(np.argsort(times[:, 0]))[times[:, 1].argmin()]) + 1
    print(f"{len(rows)} layouts: Spearman {rank:.3f}, the measured best is predicted as number {place}")
    return int(rank < 0.9 or place > 2)


if __name__ == "__main__":
    sys.exit(main())
