#!/usr/bin/env python3
"""Predict published training jobs through the real Megatron-LM and compare with the times their authors measured.

    python scripts/bench_published.py --megatron PATH/Megatron-LM --out RUNS [--only korthikanti,gpt3-175b/bf16/128]
    python scripts/bench_published.py --list                     # every case: which list it is in, or why in none

``tests/data/published_h100_a100.json`` names the source of every case. Two lists, two means:

* *local*: jobs that used nothing of Transformer Engine, on Apex's fused kernels (``--prism-apex``), as they ran: softmax, layer
  norm, Adam, weight gradients. With ``--without-apex`` torch's kernels stand in.
* *te*: jobs that used Transformer Engine, bf16 and fp8 (`prism setup-te`).

The layout, sizes and flags of a launch are the case's own; no figure is fitted to a case. What the sources leave open is the same
for all: Megatron's default bucket sizes, dropout 0 for models without biases (Llama, Grok-1), an auxiliary loss of 0.01 for
experts. Slices come from the cache where a
case was run before, and a run that is finished in RUNS is not launched again
(``--reprice``: nothing is launched, and finished runs are priced again). One line per case:
measured and predicted seconds, signed error, parts; then mean and median of the magnitudes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DATA = Path(__file__).parent.parent / "tests" / "data" / "published_h100_a100.json"
COMMON = (
    "--use-mcore-models --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --train-iters 50"
    " --log-interval 1 --eval-iters 1 --eval-interval 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine"
    " --lr-warmup-iters 2 --distributed-backend nccl --num-workers 1 --split 99,1,0"
)
LOCAL = "--no-rope-fusion --attention-backend unfused"
WITHOUT_APEX = "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
FP8 = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-compute-algo max"
MOE = (
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
CLUSTERS = {"A100-SXM4-80GB": "dgx-a100", "H100-SXM5-80GB": "dgx-h100"}


def why_not(case: dict) -> str:
    """Why a case cannot be run as it was; empty where it can."""
    if "step_time_s" not in case["measured"]:
        return "no step time was published"
    micro, virtual = case["batch"].get("micro"), case["parallel"].get("vpp")
    if not isinstance(micro, int) or not isinstance(virtual, int | None):
        return "the micro-batch or the interleaving was not published"
    moe = case["flags"].get("moe") or {}
    if case["model"].get("num_experts") and moe.get("capacity_factor") and not moe.get("pad_to_capacity"):
        return "its capacity factor drops tokens by values"
    if list_of(case) == "local" and (case["parallel"]["cp"] > 1 or case["precision"].startswith("fp8")):
        return "context parallelism and fp8 need Transformer Engine"
    return ""


def list_of(case: dict) -> str:
    """``local`` or ``te``."""
    return "local" if case["framework"].startswith("Megatron-LM") or "A100" in case["gpu"] else "te"


def megatron_args(case: dict, implementation: str) -> list[str]:
    """The arguments of ``pretrain_gpt.py`` for a case."""
    model, parallel, flags = case["model"], case["parallel"], case["flags"]
    args = [
        *COMMON.split(), "--transformer-impl", implementation, *(LOCAL.split() if implementation == "local" else ()),
        f"--num-layers={model['layers']}", f"--hidden-size={model['hidden']}", f"--ffn-hidden-size={model['ffn']}",
        f"--num-attention-heads={model['heads']}", f"--seq-length={model['seq_len']}",
        f"--max-position-embeddings={model['seq_len']}", f"--vocab-size={model['vocab'] - 1}",
        f"--micro-batch-size={case['batch']['micro']}", f"--global-batch-size={case['batch']['global_']}",
        f"--tensor-model-parallel-size={parallel['tp']}", f"--pipeline-model-parallel-size={parallel['pp']}",
        f"--context-parallel-size={parallel['cp']}", "--fp16" if case["precision"] == "fp16" else "--bf16",
    ]  # fmt: skip
    if model["kv_heads"] != model["heads"]:
        args += ["--group-query-attention", f"--num-query-groups={model['kv_heads']}"]
    if model["swiglu"]:
        args += ["--swiglu"]
    if model["normalization"] != "LayerNorm":
        args += ["--normalization", model["normalization"]]
    if model["position_embedding"] == "rope":
        args += ["--position-embedding-type", "rope"]
    if not model["bias"]:
        args += ["--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"]
    if model["untie_embeddings"]:
        args += ["--untie-embeddings-and-output-weights"]
    if parallel["vpp"]:
        args += [
            f"--num-layers-per-virtual-pipeline-stage={model['layers'] // parallel['pp'] // parallel['vpp']}"
        ]
    if parallel["sp"]:
        args += ["--sequence-parallel"]
    recompute = flags.get("recompute")
    if recompute == "full":
        args += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ]
    elif recompute:
        args += ["--recompute-granularity", "selective"]
    for flag in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        if flags.get(flag):
            args += [f"--{flag.replace('_', '-')}"]
    if case["precision"].startswith("fp8"):
        args += FP8.split()
        settings = flags.get("yaml") or {}
        if history := settings.get("fp8_amax_history_len"):
            args += [f"--fp8-amax-history-len={history}"]
        if settings.get("fp8_params") == "true":
            args += ["--fp8-param-gather"]
    if flags.get("tp_comm_overlap"):
        args += ["--tp-comm-overlap"]
    if model.get("num_experts"):
        args += [f"--num-experts={model['num_experts']}", f"--moe-router-topk={model['topk']}", *MOE.split()]
        args += [
            f"--expert-model-parallel-size={parallel['ep']}",
            f"--moe-ffn-hidden-size={model['moe_ffn']}",
        ]
        args += [f"--expert-tensor-parallel-size={parallel['etp']}"] if parallel["etp"] else []
        args += ["--moe-grouped-gemm"] if flags["moe"]["grouped_gemm"] else []
        if capacity := flags["moe"]["capacity_factor"]:
            args += ["--moe-expert-capacity-factor", str(capacity), "--moe-pad-expert-input-to-capacity"]
    return args


def main() -> int:
    """Run the cases; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, default=os.environ.get("MEGATRON_LM"))
    parser.add_argument("--out", type=Path, help="keep run directories and logs here")
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--jobs", type=int, default=1, help="launches at a time")
    parser.add_argument("--prism-args", default="", help="further arguments of every launch")
    parser.add_argument("--without-apex", action="store_true", help="the list local on torch's kernels")
    parser.add_argument("--reprice", action="store_true", help="price finished runs again, launch nothing")
    parser.add_argument("--list", action="store_true", help="say what becomes of every case")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [""]
    cases = [c for c in json.loads(DATA.read_text()) if any(part in c["id"] for part in wanted)]
    if args.list:
        for case in cases:
            print(f"{case['id']:48} {why_not(case) or list_of(case)}")
        return 0
    if args.out is None or (args.megatron is None and not args.reprice):
        parser.error("--out and --megatron are needed")
    left_out: dict[str, int] = {}
    errors: dict[str, list[float]] = {}
    failures = 0
    print(
        f"{'case':44} {'list':6}{'measured s':>11}{'predicted s':>12}{'error':>9}  where the predicted time goes, s"
    )
    possible = []
    for case in cases:
        if reason := why_not(case):
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            possible.append(case)
    with ThreadPoolExecutor(args.jobs) as pool:
        for case, prediction in zip(possible, pool.map(lambda c: predict(c, args), possible), strict=True):
            if prediction is None:
                failures += not args.reprice
            else:
                errors.setdefault(list_of(case), []).append(show(case, prediction))
    for name, values in errors.items():
        sizes = sorted(abs(e) for e in values)
        print(
            f"{name}: {len(values)} cases, mean error {statistics.mean(values):+.1%}, mean |error| "
            f"{statistics.mean(sizes):.1%}, median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}"
        )
    for reason, count in left_out.items():
        print(f"left out: {count} cases, {reason}")
    return 1 if failures else 0


def predict(case: dict, args: argparse.Namespace) -> dict | None:
    """prediction.json of a case; None where it failed, or was not run and nothing is to be launched."""
    out = args.out.resolve() / case["id"].replace("/", "_")
    cluster = CLUSTERS[case["gpu"]]
    if args.reprice:
        if not (out / "prediction.json").exists():
            return None
        again = [
            sys.executable,
            "-m",
            "prism_plugins.cli",
            "what-if",
            str(out),
            "--cluster",
            cluster,
            "--json",
        ]
        done = subprocess.run(again, capture_output=True, text=True)
        if done.returncode:
            print(f"{case['id']}: {done.stderr.strip()[-300:]}", flush=True)
            return None
        return json.loads(done.stdout)
    implementation = "local" if list_of(case) == "local" else "transformer_engine"
    apex = ()
    if implementation == "local":
        apex = WITHOUT_APEX.split() if args.without_apex else ("--prism-apex",)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(args.megatron / "pretrain_gpt.py"),
        *megatron_args(case, implementation), *apex, "--prism-emulate", f"--prism-world-size={case['num_gpus']}",
        f"--prism-cluster={cluster}", f"--prism-out={out}", *args.prism_args.split(),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(args.megatron), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if implementation == "local":
        env["PRISM_TE"] = "none"  # Megatron would take TE's optimizer kernels wherever they can be imported.
    if (out / "prediction.json").exists():
        return json.loads((out / "prediction.json").read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    log_path = out.with_name(f"{out.name}.log")
    began = time.time()
    with log_path.open("w") as log:
        status = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    if status or not (out / "prediction.json").exists():
        print(
            f"{case['id']}: status {status} after {time.time() - began:.0f} s, see {log_path}",
            flush=True,
        )
        return None
    return json.loads((out / "prediction.json").read_text())


def show(case: dict, prediction: dict) -> float:
    """Print the line of a case; the signed error."""
    measured, predicted = case["measured"]["step_time_s"], prediction["iteration_time_ms"] / 1e3
    parts = ", ".join(f"{name} {ms / 1e3:.2f}" for name, ms in prediction["breakdown_ms"].items())
    error = predicted / measured - 1
    print(
        f"{case['id']:44} {list_of(case):6}{measured:>11.2f}{predicted:>12.2f}{error:>+9.1%}  {parts}",
        flush=True,
    )
    return error


if __name__ == "__main__":
    sys.exit(main())
