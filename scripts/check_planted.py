#!/usr/bin/env python3
"""Emulate every training script of scripts/planted twice, with its bug and with --clean: the bug has to be found, and
found where it is; the clean script has to have no finding. Then a sound script (train_gpt_megatron.py) in layouts that waste the
cluster or do not fit, and in ones that do not.

    python scripts/check_planted.py [--only branch,send_send,tp_across_nodes] [--table]

``--table`` prints the rows of docs/checks.md. Exits 1 if a bug was missed, or something was found in a clean script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PLANTED = Path(__file__).parent / "planted"
WORLD = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What has to be found."""

    kind: str
    """Of the finding."""
    ranks: tuple[int, ...]
    """Ranks that the message has to name, in lists of its own."""
    site: str = ""
    """A source line that it has to name: a text of that line."""
    world: int = WORLD
    args: tuple[str, ...] = ()


CASES = {
    "branch": Case(kind="missing_call|mismatch", ranks=(2,), site="all_reduce"),
    "missing_barrier": Case(kind="missing_call|mismatch", ranks=(0,), site="barrier"),
    "startup_barrier": Case(kind="startup", ranks=(0,), site="barrier"),
    "group_order": Case(kind="groups", ranks=(), site="new_group"),
    "group_of_some": Case(kind="groups", ranks=(), site="new_group"),
    "uneven_batches": Case(kind="uneven_batches", ranks=(3,), site="DataLoader"),
    "early_exit": Case(kind="early_exit", ranks=(1,)),
    "message_size": Case(kind="message_size", ranks=(0,), site="dist.recv"),
    "unmatched_send": Case(kind="unmatched_message", ranks=(3,), site="isend"),
    "send_send": Case(kind="deadlock", ranks=(0, 1), site="dist.send"),
    "ring_of_groups": Case(kind="deadlock", ranks=(0, 1, 2, 3), site="all_reduce"),
    "communicator_order": Case(kind="order", ranks=(), site="all_reduce"),
    "wrong_root": Case(kind="mismatch", ranks=(), site="broadcast"),
    "other_dtype": Case(kind="mismatch", ranks=(3,), site="all_reduce"),
    "other_kind": Case(kind="mismatch", ranks=(1,), site="all_gather"),
    "split_sizes": Case(kind="message_size", ranks=(0, 1), site="all_to_all"),
    "megatron_branch": Case(
        kind="missing_call|mismatch",
        ranks=(2, 6),
        site="all_reduce",
        world=16,
        args=("--prism-audit=4",),
    ),
    "ds_unequal_experts": Case(kind="hang", ranks=()),
    "ds_rank_branch": Case(kind="missing_call|mismatch", ranks=(2,), args=("--prism-audit=3",)),
    "ds_skipped_backward": Case(kind="missing_call|mismatch", ranks=(1,), args=("--prism-audit=3",)),
    "ds_uneven_batches": Case(kind="uneven_batches", ranks=(0,), site="DataLoader"),
    "ds_pipeline_groups": Case(kind="refused", ranks=(2,)),
    "ds_pipeline_skip": Case(kind="message_size", ranks=(0,), site="dist.recv"),
}


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """A launch of train_gpt_megatron.py that has to be criticised, and how it is launched without reason to."""

    text: str
    """Of the finding, or of the error that refuses the launch."""
    args: str
    world: int
    better: str
    """Instead of ``args``."""
    better_world: int = 0
    """Where it is not ``world``."""
    connections: str = "1"
    """CUDA_DEVICE_MAX_CONNECTIONS of the launch that is criticised."""


SIZES = (
    "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 16 --seq-length 128 --vocab-size {vocab} --num-layers {layers}"
    " --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --global-batch-size {batch}"
)
SIZES_7B = "--tensor-model-parallel-size {tp} --pipeline-model-parallel-size 1 --global-batch-size {batch}"
LAYOUTS = {
    "tp_across_nodes": LayoutCase(
        text="tensor parallelism of 16 crosses nodes of 8 GPUs",
        args=SIZES.format(vocab=1024, layers=2, tp=16, pp=1, batch=1),
        better=SIZES.format(vocab=1024, layers=2, tp=8, pp=1, batch=2),
        world=16,
    ),
    "lost_layers": LayoutCase(
        text="6 layers do not divide over 4 pipeline stages",
        args=SIZES.format(vocab=1024, layers=6, tp=1, pp=4, batch=8),
        better=SIZES.format(vocab=1024, layers=8, tp=1, pp=4, batch=8),
        world=4,
    ),
    "few_microbatches": LayoutCase(
        text="2 micro-batches for 4 pipeline stages",
        args=SIZES.format(vocab=1024, layers=4, tp=1, pp=4, batch=2),
        better=SIZES.format(vocab=1024, layers=4, tp=1, pp=4, batch=8),
        world=4,
    ),
    "unbalanced_stages": LayoutCase(
        text="layers would bring the busiest stage to about",
        args=SIZES.format(vocab=131072, layers=8, tp=1, pp=2, batch=8),
        better=SIZES.format(vocab=256, layers=8, tp=1, pp=2, batch=8),
        world=2,
    ),
    "connections": LayoutCase(
        text="CUDA_DEVICE_MAX_CONNECTIONS is not set",
        args=SIZES.format(vocab=1024, layers=2, tp=2, pp=1, batch=1),
        better=SIZES.format(vocab=1024, layers=2, tp=2, pp=1, batch=1),
        world=2,
        connections="",
    ),
    "out_of_memory": LayoutCase(
        text="recompute activations",
        args=SIZES_7B.format(tp=1, batch=2),
        better=SIZES_7B.format(tp=8, batch=1),
        world=2,
        better_world=8,
    ),
}


def main() -> int:
    """Run the cases; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join([*CASES, *LAYOUTS])}")
    parser.add_argument("--table", action="store_true", help="print rows of a Markdown table")
    args = parser.parse_args()
    failures = 0
    for name in args.only.split(",") if args.only else [*CASES, *LAYOUTS]:
        failures += not (check if name in CASES else check_layout)(name, table=args.table)
    return 1 if failures else 0


def check(name: str, *, table: bool) -> bool:
    """Emulate one script both ways and print what was found; True when all is as it should be."""
    case = CASES[name]
    found = missed(name, case, findings(name, case))
    clean = findings(name, case, "--clean")
    ok = not found.startswith("MISSED") and not clean
    if table:
        print(f"| `{name}` | {found} |", flush=True)
    else:
        false_alarms = f"; FALSE ALARM without the bug: {clean}" if clean else ""
        print(f"{name}: {found}{false_alarms}", flush=True)
    return ok


def check_layout(name: str, *, table: bool) -> bool:
    """Emulate one layout and the better one; True when the first is criticised as it should be and the other is not."""
    case = LAYOUTS[name]
    said = messages(case.args, world=case.world, connections=case.connections)
    better = messages(case.better, world=case.better_world or case.world, connections="1")
    found = next((text for text in said if case.text in text), f"MISSED ({case.text}); found {said}")
    false_alarms = [text for text in better if case.text in text]
    if table:
        print(f"| `{name}` | {found} |", flush=True)
    else:
        print(f"{name}: {found}" + (f"; FALSE ALARM: {false_alarms}" if false_alarms else ""), flush=True)
    return not found.startswith("MISSED") and not false_alarms


def messages(arguments: str, *, world: int, connections: str) -> list[str]:
    """What is found in one launch of train_gpt_megatron.py: messages of findings, or the error that refuses it."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if connections:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [
            sys.executable, "-m", "prism_plugins.run", str(PLANTED.parent / "train_gpt_megatron.py"), *arguments.split(),
            "--prism-emulate", f"--prism-world-size={world}", f"--prism-out={out}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if (out / "prediction.json").exists():
            return [f["message"] for f in json.loads((out / "prediction.json").read_text())["findings"]]
        errors = [line for line in done.stderr.splitlines() if line.startswith("prism: error")]
        if done.returncode != 2 or not errors:
            raise SystemExit(f"{arguments} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return errors


def findings(name: str, case: Case, *args: str) -> list[dict]:
    """Findings of one emulation, or the error that refuses it. Infos about a layout are none of a bug's business."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [
            sys.executable, "-m", "prism_plugins.run", str(PLANTED / f"{name}.py"), *args, *case.args,
            "--prism-emulate", f"--prism-world-size={case.world}", f"--prism-out={out}",
        ]  # fmt: skip
        # As Megatron asks for; without it the clean script would be criticised, rightly.
        env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if not (out / "prediction.json").exists():
            errors = [line for line in done.stderr.splitlines() if line.startswith("prism: error")]
            if done.returncode == 2 and errors:
                return [{"kind": "refused", "message": errors[-1]}]
            raise SystemExit(f"{name} {' '.join(args)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        prediction = json.loads((out / "prediction.json").read_text())
    return [f for f in prediction["findings"] if f["severity"] != "info"]


def missed(name: str, case: Case, found: list[dict]) -> str:
    """The message that names the bug, or MISSED and what was found instead."""
    source = (PLANTED / f"{name}.py").read_text().splitlines()
    sites = [f"{name}.py:{i}" for i, line in enumerate(source, start=1) if case.site in line]
    for finding in found:
        message = finding["message"]
        if (
            finding["kind"] in case.kind.split("|")
            and all(
                f"ranks {rank}" in message or f"rank {rank}" in message or named(message, rank)
                for rank in case.ranks
            )
            and (not case.site or any(site in message for site in sites))
        ):
            return f"{finding['kind']}: {message}"
    return f"MISSED ({case.kind}); found {[(f['kind'], f['message']) for f in found]}"


def named(message: str, rank: int) -> bool:
    """Whether a list of ranks in the message has the rank."""
    words = message.replace(",", " ").replace(":", " ").split()
    for word in words:
        first, _, last = word.partition("-")
        if first.isdigit() and (last or first).isdigit() and int(first) <= rank <= int(last or first):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
