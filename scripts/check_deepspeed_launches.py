#!/usr/bin/env python3
"""Launch scripts as DeepSpeed's users write them under emulation, in every configuration and by every launcher.

    python scripts/check_deepspeed_launches.py [--only z1,z3] [--worlds 64,1024] [--audit 4] [--size tiny|7b]

Prints one line a launch: exit status, wall seconds, slices, memory of the largest slice, verdict, audit, predicted
iteration time. Exits 1 if a launch failed or an audited rank differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent / "deepspeed"
CONFIGS = HERE / "configs"
WORLDS = (64, 1024, 8192)

LLAMA = {
    "tiny": "--layers 4 --hidden 256 --heads 8 --seq 128 --vocab 1024",
    "7b": "--layers 32 --hidden 4096 --ffn 11008 --heads 32 --seq 2048 --vocab 32000",
}
GPT = {
    "tiny": "--layers 16 --hidden 128 --heads 8 --seq 128 --vocab 1024",
    "7b": "--layers 32 --hidden 4096 --heads 32 --seq 2048 --vocab 50304",
}
TRAINER = (
    "--bf16 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --gradient_checkpointing true"
    " --max_steps 100 --logging_steps 1 --eval_strategy steps --eval_steps 4 --save_steps 4 --report_to none"
)
TRAINER_SIZE = {
    "tiny": "--num_layers 4 --hidden_size 256 --intermediate_size 688 --num_heads 4 --vocab_size 1024"
    " --seq_length 128",
    "7b": "--num_layers 32 --hidden_size 4096 --intermediate_size 11008 --num_heads 32 --seq_length 2048",
}
LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "1"),
    "deepspeed": ("deepspeed", "--num_gpus", "1"),
    "python": ("python",),
    "accelerate": ("accelerate", "launch", "--num_processes", "1", "--use_deepspeed"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script and configuration."""

    script: str
    config: str
    args: str = ""
    size: dict[str, str] | None = None
    """Arguments for the model's dimensions, by ``--size``."""
    launchers: tuple[str, ...] = ("torchrun", "deepspeed")
    """Taken in turn over the world sizes."""
    config_flag: str = "--deepspeed_config"


CASES = {
    "z1": Case(script="train_llama.py", config="zero1.json", size=LLAMA),
    "z2": Case(script="train_llama.py", config="zero2.json", size=LLAMA, launchers=("deepspeed", "torchrun")),
    "z3": Case(script="train_llama.py", config="zero3.json", size=LLAMA),
    "z3-offload": Case(
        script="train_llama.py",
        config="zero3_offload.json",
        size=LLAMA,
        launchers=("deepspeed", "torchrun"),
    ),
    "z3-init": Case(
        script="train_llama.py", config="zero3.json", args="--zero-init --checkpointing", size=LLAMA
    ),
    "pp4": Case(
        script="train_gpt_pipeline.py", config="../pipeline_z1.json", args="--stages 4", size=GPT,
        launchers=("deepspeed", "torchrun"),
    ),
    "pp8-tied": Case(
        script="train_gpt_pipeline.py", config="../pipeline_z1.json", args="--stages 8 --tied", size=GPT
    ),
    "moe-ep8": Case(script="train_moe.py", config="moe_z1.json", launchers=("deepspeed", "torchrun")),
    "ulysses-sp8": Case(script="train_ulysses.py", config="ulysses_z3.json"),
    "autotp4": Case(
        script="train_llama.py", config="autotp_z1.json", size=LLAMA, launchers=("deepspeed", "torchrun")
    ),
    "trainer-z2": Case(
        script="train_trainer.py", config="zero2_auto.json", args=TRAINER, size=TRAINER_SIZE,
        launchers=("torchrun", "deepspeed", "accelerate"), config_flag="--deepspeed",
    ),
    "trainer-z3": Case(
        script="train_trainer.py", config="zero3_auto.json", args=TRAINER, size=TRAINER_SIZE,
        launchers=("python", "torchrun", "deepspeed"), config_flag="--deepspeed",
    ),
}  # fmt: skip


def main() -> int:
    """Run the launches; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--launcher", choices=LAUNCHERS, help="for all launches, instead of each in turn")
    parser.add_argument("--size", choices=("tiny", "7b"), default="tiny")
    parser.add_argument("--audit", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="keep run directories under this directory")
    parser.add_argument("--prism-args", default="", help="for every launch, e.g. '--prism-no-cache'")
    args = parser.parse_args()
    worlds = [int(world) for world in args.worlds.split(",")]
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only.split(",") if args.only else CASES:
            for i, world in enumerate(worlds):
                launchers = CASES[name].launchers
                launcher = args.launcher or launchers[i % len(launchers)]
                out = (args.keep or Path(scratch)) / f"{name}-{world}"
                failures += not run_case(name, world, launcher, args=args, out_dir=out)
    return 1 if failures else 0


def run_case(name: str, world: int, launcher: str, *, args: argparse.Namespace, out_dir: Path) -> bool:
    """Launch once and print a line; True when it finished and every audited rank matched."""
    case = CASES[name]
    first, *rest = LAUNCHERS[launcher]
    out_dir.mkdir(parents=True, exist_ok=True)
    script_args = [*(case.size or {}).get(args.size, "").split(), *case.args.split()]
    if case.config_flag == "--deepspeed":
        script_args += ["--output_dir", str(out_dir / "model")]
    command = [
        str(Path(sys.executable).parent / first), *rest, str(HERE / case.script), *script_args,
        case.config_flag, str(CONFIGS / case.config), "--prism-emulate", f"--prism-world-size={world}",
        f"--prism-audit={args.audit}", f"--prism-out={out_dir / 'run'}", *args.prism_args.split(),
    ]  # fmt: skip
    log = out_dir / "launch.log"
    began = time.time()
    with log.open("w") as output:
        status = subprocess.run(
            command, cwd=out_dir, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    seconds = time.time() - began
    title = f"{name} W={world} {launcher}"
    result = out_dir / "run/prediction.json"
    if not result.exists():
        told = [line for line in log.read_text().splitlines() if line.startswith("prism: error")]
        print(f"{title}: FAILED, status {status} after {seconds:.0f} s: {'; '.join(told[:2])}", flush=True)
        return False
    prediction = json.loads(result.read_text())
    reports = [json.loads(p.read_text()) for p in (out_dir / "run/slices").glob("*/report.json")]
    audit = prediction["audit"]
    matched = audit.get("matched", 0)
    audited = len(audit.get("ranks", ()))
    ok = status == 0 and matched == audited == args.audit
    print(
        f"{title}: {'ok' if ok else 'FAILED'}, status {status} in {seconds:.0f} s, {len(reports)} slices, "
        f"{max(r['max_rss_bytes'] for r in reports) / 2**20:.0f} MiB, {verdict(prediction)}, "
        f"audit {matched} of {audited}, {prediction['iteration_time_ms']:.1f} ms an iteration",
        flush=True,
    )
    return ok


def verdict(prediction: dict) -> str:
    """The worst findings by kind, or that it fits."""
    kinds = {}
    for finding in prediction["findings"]:
        kinds.setdefault(finding["severity"], set()).add(finding["kind"])
    return "; ".join(
        f"{severity}: {', '.join(sorted(kinds[severity]))}" for severity in ("error", "warning") if severity in kinds
    ) or "fits"  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
