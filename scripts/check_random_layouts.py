#!/usr/bin/env python3
"""Random small jobs, every rank of them really sliced, beside the programs that a few slices stand for.

    python scripts/check_random_layouts.py --megatron PATH/Megatron-LM --out results.jsonl [--count 60] [--parallel 2]
    python scripts/check_random_layouts.py --out results.jsonl --summary

Half of the jobs are Megatron-LM's pretrain_gpt.py or the plain megatron-core script (tp, sp, pp, vpp, dp, ep, etp, cp with
``--te``, rank order, uneven stages, distributed optimizer, overlap, recomputation, experts), half are DeepSpeed scripts (ZeRO 0 to
3 and offload, pipelines, experts, Ulysses, AutoTP). A job is emulated with ``--prism-audit`` of its whole world: the program of
every rank that was inferred is compared with the slice of that very rank, op by op with sizes, allocations and peak memory.

What is drawn depends on ``--seed`` and the number of the job alone. A job that the framework refuses counts as refused, not as
run. Finished jobs are kept in ``--out`` (JSON lines) and not run again; delete a line to repeat its job. Exits 1 if a rank
differs, a job fails, or the checks find an error in a job that the framework runs.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
FRAMEWORKS = ("megatron", "deepspeed")
TIME_LIMIT_S = 1500

MEGATRON_LM = (
    "--use-mcore-models --mock-data --tokenizer-type NullTokenizer --vocab-size 1003 --bf16 --train-iters 20 --log-interval 1"
    " --eval-iters 1 --eval-interval 1000 --lr 1e-4 --lr-decay-style constant --position-embedding-type rope --hidden-size 64"
    " --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --split 99,1,0 --num-workers 0"
)
LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
    " --no-rope-fusion --attention-backend unfused --disable-bias-linear"
)
CORE = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --micro-batch-size 1"
REFUSED = re.compile(r'File "[^"]*/(?:megatron|deepspeed|Megatron-LM)/[^"]*", line \d+, in ')


@dataclass
class Job:
    """One drawn job."""

    script: str
    world: int
    args: list[str] = field(default_factory=list)
    config: dict | None = None
    """DeepSpeed's configuration."""

    def add(self, *flags: object) -> None:
        self.args += [str(flag) for flag in flags]

    @property
    def text(self) -> str:
        """What identifies it."""
        config = f" {json.dumps(self.config, sort_keys=True)}" if self.config is not None else ""
        return f"{self.script} W={self.world} {' '.join(self.args)}{config}"


# --- drawing ---


def draw(framework: str, seed: int, number: int, *, te: bool = False) -> Job:
    """The job of this number. Some are illegal on purpose: the framework has to say so."""
    rng = random.Random(f"{seed}/{framework}/{number}")
    if framework == "deepspeed":
        return [_zero, _zero, _pipeline, _pipeline, _moe, _sequence_or_tensor][number % 6](rng)
    if te and number % 4 == 3:
        return _megatron_lm(rng, te=True)
    return _core(rng) if number % 3 == 0 else _megatron_lm(rng, te=False)


def _megatron_lm(rng: random.Random, *, te: bool) -> Job:
    tp, pp = rng.choice((1, 1, 2, 2, 4)), rng.choice((1, 1, 2, 2, 3, 4))
    cp = rng.choice((1, 2)) if te else 1
    while tp * pp * cp > 12:
        tp, pp = max(tp // 2, 1), max(pp - 1, 1)
    dp = rng.choice([d for d in (1, 2, 3, 4, 6) if 4 <= tp * pp * cp * d <= 16])
    job = Job("pretrain_gpt.py", tp * pp * cp * dp)
    job.add(*MEGATRON_LM.split(), *("" if te else LOCAL).split())
    job.add("--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp)
    if cp > 1:
        job.add("--context-parallel-size", cp)
        job.add("--cp-comm-type", rng.choice(("p2p", "a2a", "all_gather")))
    experts = rng.random() < 0.3
    if tp > 1 and (experts or rng.random() < 0.5):
        job.add("--sequence-parallel")
    layers = pp * rng.choice((1, 2))
    if pp > 1 and rng.random() < 0.35:
        layers = pp * 2
        job.add("--num-layers-per-virtual-pipeline-stage", 1)
        if rng.random() < 0.3:
            job.add("--no-overlap-p2p-communication")
    elif pp > 2 and rng.random() < 0.4:
        layers = (pp - 1) * 2 + 1
        job.add(rng.choice(("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")), 1)
    job.add("--num-layers", layers)
    micro = rng.choice((1, 1, 2))
    microbatches = pp * rng.choice((1, 2)) if rng.random() < 0.6 else rng.choice((1, 2, 3, 5))
    job.add("--micro-batch-size", micro, "--global-batch-size", dp * micro * microbatches)
    if rng.random() < 0.55:
        job.add("--use-distributed-optimizer")
        if rng.random() < 0.5:
            job.add("--overlap-grad-reduce", "--overlap-param-gather")
            if rng.random() < 0.4:
                job.add("--ddp-bucket-size", 20_000)
    elif rng.random() < 0.4:
        job.add("--overlap-grad-reduce")
    match rng.choice(("none", "none", "full", "selective")):
        case "full":
            job.add("--recompute-granularity", "full")
            job.add("--recompute-method", rng.choice(("uniform", "block")), "--recompute-num-layers", 1)
        case "selective":
            job.add("--recompute-granularity", "selective")
    if experts:
        ep = rng.choice([e for e in (1, 2, 4) if (dp * cp * tp) % e == 0])
        job.add("--num-experts", 4, "--expert-model-parallel-size", ep)
        job.add("--moe-router-topk", topk := rng.choice((1, 2)))
        if topk == 1:
            job.add("--moe-router-pre-softmax")
        job.add("--moe-token-dispatcher-type", rng.choice(("alltoall", "alltoall", "allgather")))
        job.add("--moe-aux-loss-coeff", "1e-2")
        if tp > 1 and rng.random() < 0.3:
            job.add("--expert-tensor-parallel-size", 1)
        elif rng.random() < 0.5:
            job.add("--prism-moe-load", "zipf:1.2")
    if rng.random() < 0.25:
        job.add("--use-tp-pp-dp-mapping")
    if rng.random() < 0.6:
        job.add("--untie-embeddings-and-output-weights")
    if rng.random() < 0.3:
        job.add("--swiglu")
    if rng.random() < 0.3:
        job.add("--group-query-attention", "--num-query-groups", rng.choice((2, 4)))
    if rng.random() < 0.2:
        job.add("--clip-grad", 0)
    return job


def _core(rng: random.Random) -> Job:
    tp, pp = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4))
    while tp * pp > 12:
        tp //= 2
    dp = rng.choice([d for d in (1, 2, 3, 4, 5, 6) if 4 <= tp * pp * d <= 14])
    job = Job("train_gpt_megatron.py", tp * pp * dp)
    job.add(*CORE.split(), "--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp)
    chunks = rng.choice((1, 1, 2)) if pp > 1 else 1
    if chunks > 1:
        job.add("--virtual-pipeline-model-parallel-size", chunks)
    job.add("--num-layers", pp * chunks * rng.choice((1, 2)))
    job.add(
        "--global-batch-size",
        dp * (pp * rng.choice((1, 2, 3)) if chunks > 1 else rng.choice((1, 2, 3, 4, 6))),
    )
    if rng.random() < 0.5:
        job.add("--use-distributed-optimizer")
    if rng.random() < 0.3:
        job.add("--recompute")
    return job


def _config(rng: random.Random, *, stages: tuple[int, ...], accumulation: int) -> dict:
    stage = rng.choice(stages)
    zero: dict = {"stage": stage, "overlap_comm": rng.random() < 0.5}
    if stage in (1, 2) or rng.random() < 0.5:
        zero["reduce_bucket_size"] = rng.choice((50_000, 400_000, 50_000_000))
    if stage in (1, 2):
        zero["contiguous_gradients"] = rng.random() < 0.7
        zero["allgather_bucket_size"] = rng.choice((60_000, 50_000_000))
        zero["round_robin_gradients"] = rng.random() < 0.2
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = rng.choice((0, 1_000, 100_000))
        zero["stage3_prefetch_bucket_size"] = rng.choice((10_000, 50_000_000))
        zero["stage3_max_live_parameters"] = rng.choice((100_000, 1_000_000_000))
        if rng.random() < 0.2:
            zero["offload_param"] = {"device": "cpu"}
    if stage and rng.random() < 0.2:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": rng.choice((1, 1, 2)),
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 1,
        "gradient_clipping": rng.choice((0.0, 1.0)),
        "optimizer": {"type": rng.choice(("AdamW", "Adam")), "params": {"lr": 3e-4}},
        rng.choice(("bf16", "bf16", "fp16")): {"enabled": True},
        "zero_optimization": zero,
    }


def _zero(rng: random.Random) -> Job:
    job = Job("../tests/e2e/deepspeed_scripts/train.py", rng.choice((4, 5, 6, 8)))
    job.config = _config(rng, stages=(0, 1, 1, 2, 2, 3, 3, 3), accumulation=rng.choice((1, 1, 2, 3)))
    job.add("--layers", rng.choice((1, 2, 3)), "--hidden", rng.choice((32, 64)))
    if job.config["zero_optimization"]["stage"] == 3 and rng.random() < 0.5:
        job.add("--zero-init")
    return job


def _pipeline(rng: random.Random) -> Job:
    stages, tp = rng.choice((2, 2, 3, 4)), rng.choice((1, 1, 2))
    dp = rng.choice([d for d in (1, 2, 3, 4) if 4 <= stages * tp * d <= 16])
    job = Job("deepspeed/train_gpt_pipeline.py", stages * tp * dp)
    job.config = _config(rng, stages=(0, 1, 1), accumulation=rng.choice((1, 2, 3, 4, 6, 8)))
    job.add(
        "--stages", stages, "--tensor-parallel", tp, "--hidden", 64, "--heads", 4, "--seq", 32, "--vocab", 256
    )
    job.add("--layers", stages * rng.choice((1, 2)) + rng.choice((0, 0, 1)))
    job.add("--partition", rng.choice(("type:block", "uniform", "parameters")))
    if rng.random() < 0.35:
        job.add("--tied")
    if rng.random() < 0.35:
        job.add("--with-mask")
    if rng.random() < 0.3:
        job.add("--checkpoint-interval", 1)
    return job


def _moe(rng: random.Random) -> Job:
    world = rng.choice((4, 8))
    job = Job("deepspeed/train_moe.py", world)
    job.config = _config(rng, stages=(0, 1, 2), accumulation=rng.choice((1, 2)))
    job.add("--layers", 2, "--hidden", 64, "--heads", 4, "--seq", 32, "--vocab", 256)
    job.add("--ep", ep := rng.choice((1, 2, 4)), "--experts", ep * rng.choice((1, 2)))
    job.add("--topk", rng.choice((1, 2)))
    for flag in ("--no-drop", "--residual"):
        if rng.random() < 0.25:
            job.add(flag)
    return job


def _sequence_or_tensor(rng: random.Random) -> Job:
    world, ways = rng.choice((4, 6, 8)), 2
    if rng.random() < 0.5:
        job = Job("deepspeed/train_ulysses.py", world)
        job.config = _config(rng, stages=(1, 2, 3), accumulation=1)
        job.config["sequence_parallel_size"] = ways
        job.add("--sp", ways, "--layers", 2, "--hidden", 64, "--heads", 4, "--seq", 64, "--vocab", 256)
    else:
        job = Job("deepspeed/train_llama.py", world)
        job.config = _config(rng, stages=(0, 1), accumulation=rng.choice((1, 2)))
        job.config["tensor_parallel"] = {"autotp_size": ways}
        job.add("--layers", 2, "--hidden", 64, "--heads", 4, "--seq", 32, "--vocab", 256)
    return job


# --- running ---


def run(job: Job, *, megatron: Path | None, folder: Path, prism_args: list[str]) -> dict:
    """Emulate one job with all ranks audited; what came of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = megatron / job.script if job.script == "pretrain_gpt.py" and megatron else SCRIPTS / job.script
    args = list(job.args)
    if job.config is not None:
        (folder / "ds.json").write_text(json.dumps(job.config, indent=1))
        args += ["--deepspeed_config", str(folder / "ds.json")]
    out = folder / "run"
    command = [
        sys.executable, "-m", "prism_plugins.run", str(script), *args, "--prism-emulate", f"--prism-world-size={job.world}",
        f"--prism-audit={job.world - 1}", f"--prism-out={out}", "--prism-no-cache", *prism_args,
    ]  # fmt: skip
    env = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1")
    if megatron is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(megatron), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    result = {"status": "", "seconds": round(time.monotonic() - began, 1), "code": code}
    if not (out / "prediction.json").exists():
        return result | _refusal((folder / "log.txt").read_text(errors="replace"), code)
    prediction = json.loads((out / "prediction.json").read_text())
    audit = prediction["audit"]
    wrong = [f for f in prediction["findings"] if f["severity"] == "error" and f["kind"] != "audit"]
    same = audit["matched"] == len(audit["ranks"])
    return result | {
        "status": "differs" if not same else "alarm" if wrong else "same",
        "sliced": len(list((out / "slices").glob("*/report.json"))) - len(audit["ranks"]),
        "audited": len(audit["ranks"]),
        "matched": audit["matched"],
        "approximated": len(audit.get("approximated", ())),
        "differing_ops": audit.get("differing_ops", 0),
        "peak_error": audit.get("peak_error", 0.0),
        "findings": [
            [f["severity"], f["kind"], f["message"]]
            for f in prediction["findings"]
            if f["severity"] != "info"
        ],
    }


def _refusal(log: str, code: int) -> dict:
    """Why a job did not run: the framework's own error, a limit of prism (exit status 2), or a failure."""
    error = next((line for line in log.splitlines() if line.startswith("prism: error")), log[-300:])
    frames = [line for line in log.splitlines() if re.match(r'\s+File "', line)]
    by_framework = re.search("(DeepSpeed|Megatron) refuses", error) is not None or (
        bool(frames) and bool(REFUSED.search(frames[-1])) and "prism_plugins" not in frames[-1]
    )
    status = "refused" if by_framework else "declined" if code == 2 else "failed"
    return {"status": status, "message": error[:400]}


def main() -> int:
    """Run what is not in the results yet; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--out", type=Path, required=True, help="results, JSON lines")
    parser.add_argument("--count", type=int, default=60, help="jobs, half of each framework")
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--numbers", help="these jobs of each framework instead of --count, e.g. 3,17")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--te", action="store_true", help="a quarter of Megatron's with Transformer Engine (prism setup-te)"
    )
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--keep", type=Path, help="keep run directories under this directory")
    parser.add_argument("--minutes", type=float, help="start no further job after so long")
    parser.add_argument("--prism-args", default="", help="for every job, e.g. '--prism-jobs 2'")
    parser.add_argument("--summary", action="store_true", help="run nothing; tell what the results say")
    args = parser.parse_args()
    rows = read(args.out)
    if not args.summary:
        frameworks = (args.only,) if args.only else FRAMEWORKS
        numbers = (
            [int(n) for n in args.numbers.split(",")]
            if args.numbers
            else range(args.count // len(frameworks))
        )
        wanted = [(f, n, draw(f, args.seed, n, te=args.te)) for n in numbers for f in frameworks]
        if args.megatron is None and any(job.script == "pretrain_gpt.py" for _, _, job in wanted):
            parser.error("--megatron or MEGATRON_LM is needed for pretrain_gpt.py")
        run_all([w for w in wanted if w[2].text not in rows], args, rows)
    return summarize(rows.values())


def run_all(wanted: list[tuple[str, int, Job]], args: argparse.Namespace, rows: dict[str, dict]) -> None:
    """Run jobs, several at a time, and append each result as it comes."""
    lock = threading.Lock()
    began = time.monotonic()

    def one(item: tuple[str, int, Job]) -> None:
        framework, number, job = item
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            return
        name = f"{framework}-{args.seed}-{number}"
        with tempfile.TemporaryDirectory() as scratch:
            folder = (args.keep or Path(scratch)).resolve() / name
            row = {"name": name, "job": job.text} | run(
                job, megatron=args.megatron, folder=folder, prism_args=args.prism_args.split()
            )
        with lock:
            rows[job.text] = row
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)

    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(one, wanted))


def line(row: dict) -> str:
    """A result for people."""
    if "audited" in row:
        what = f"{row['matched']} of {row['audited']} inferred ranks as sliced, {row['sliced']} slices"
        if row["approximated"]:
            what += f", {row['approximated']} in communication only"
    else:
        what = row["message"]
    return f"{row['name']}: {row['status']} in {row['seconds']:.0f} s: {what}\n    {row['job']}"


def read(path: Path) -> dict[str, dict]:
    """Results of earlier runs by job, the last of each; lines that are not whole are left out."""
    rows = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(text)
            rows[row["job"]] = row
        except (ValueError, KeyError, TypeError):
            continue
    return rows


def summarize(rows) -> int:
    """Print what came of all jobs; 1 if a rank differs, a job failed, or an error was found in one."""
    rows = list(rows)
    for framework in FRAMEWORKS:
        mine = [row for row in rows if row["name"].startswith(framework)]
        counts = collections.Counter(row["status"] for row in mine)
        ran = [row for row in mine if "audited" in row]
        print(
            f"{framework}: {len(ran)} ran ({counts['same']} same, {counts['differs']} with a rank that differs, "
            f"{counts['alarm']} with an error found in a sound job; "
            f"{sum(not r['audited'] for r in ran)} had no rank left to infer), "
            f"{counts['refused']} refused by the framework, {counts['declined']} by prism, {counts['failed']} failed; "
            f"{sum(r['matched'] for r in ran)} of {sum(r['audited'] for r in ran)} inferred ranks as sliced, "
            f"{sum(r['approximated'] for r in ran)} of them in communication only (peak memory off by up to "
            f"{max((r['peak_error'] for r in ran), default=0):.2%}), {sum(r['sliced'] for r in ran)} slices"
        )
    bad = [row for row in rows if row["status"] in ("differs", "alarm", "failed")]
    for row in bad:
        print(line(row))
        for _, kind, message in row.get("findings", ()):
            print(f"    {kind}: {message}")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
