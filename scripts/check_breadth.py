#!/usr/bin/env python3
"""Launch small emulations of many versions, scripts and features of Megatron; a table of what works and why the rest does not.

    prism setup-te
    python scripts/check_breadth.py --versions 0.12.3,0.16.1 --branches PATHS --megatron PATH/Megatron-LM [--only WORD,…]
        [--out DIR] [--markdown]

Three groups of rows, each an emulation of 8 ranks without a GPU:

* megatron-core as pip installs it (``--versions``), each in a throw-away environment on top of this one, with
  scripts/train_gpt_megatron.py; needs pip and a package index;
* checkouts of Megatron-LM (``--branches``, comma-separated; a row bears its folder's name), each with its own pretrain_gpt.py, on
  local layers and on Transformer Engine;
* scripts and features of one checkout (``--megatron``).

A launch works when it ends with status 0 and writes a prediction; else the row has the line that the user sees. What ran is kept
in ``--out`` and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

from bench_memory import make_data, python_path

REPOSITORY = Path(__file__).resolve().parent.parent
WORLD_SIZE = 8
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
SIZES = (
    "--hidden-size 256 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 16 --bf16 --lr 1e-4 --train-iters 20"
    " --eval-iters 1 --eval-interval 1000 --split 99,1,0 --tensor-model-parallel-size 2"
)
GPT = "--num-layers 4 --seq-length 256 --max-position-embeddings 256"
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023"
LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
    " --no-rope-fusion --attention-backend unfused"
)
TE = "--transformer-impl transformer_engine"
PP2 = "--pipeline-model-parallel-size 2"
MLA = "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    " --sequence-parallel --disable-bias-linear"
)
FEATURES = {
    "experts": ("pretrain_gpt.py", f"{GPT} {MOCK} {TE} {PP2} {EXPERTS}", ""),
    "context parallelism": ("pretrain_gpt.py", f"{GPT} {MOCK} {TE} --context-parallel-size 2", ""),
    "multi-latent attention": (
        "pretrain_gpt.py",
        f"{GPT} {MOCK} {TE} {PP2} {MLA} --position-embedding-type rope",
        "",
    ),
    "multi-token prediction": (
        "pretrain_gpt.py",
        f"{GPT} {MOCK} {TE} {PP2} --mtp-num-layers 1 --position-embedding-type rope",
        "",
    ),
    "torch FSDP2": (
        "pretrain_gpt.py",
        f"{GPT} {MOCK} {TE} --use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
        " --ckpt-format torch_dist",
        "",
    ),
    "Megatron-FSDP": (
        "pretrain_gpt.py",
        f"{GPT} {MOCK} {TE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
        " --no-gradient-accumulation-fusion --use-distributed-optimizer --ckpt-format fsdp_dtensor",
        "",
    ),
    "Muon": ("pretrain_gpt.py", f"{GPT} {MOCK} {TE} {PP2} --optimizer muon", ""),
    "CUDA graphs": ("pretrain_gpt.py", f"{GPT} {MOCK} {TE} {PP2} --cuda-graph-impl local", ""),
    "CUDA graphs of TE": (
        "pretrain_gpt.py",
        f"{GPT} {MOCK} {TE} {PP2} --cuda-graph-impl transformer_engine --te-rng-tracker",
        "",
    ),
    "Mamba": (
        "pretrain_mamba.py",
        f"{GPT} {MOCK} {TE} --is-hybrid-model --hybrid-override-pattern M*-M --spec megatron.core.models.mamba.mamba_layer_specs"
        " mamba_stack_spec",
        "",
    ),
    "BERT": (
        "pretrain_bert.py",
        f"{GPT} {PP2} --legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --attention-backend unfused",
        "bert",
    ),
    "T5": (
        "pretrain_t5.py",
        "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 256 --decoder-seq-length 64 --kv-channels 32"
        " --ffn-hidden-size 1024 --max-position-embeddings 256 --vocab-extra-ids 100 --legacy-tokenizer"
        f" --tokenizer-type BertWordPieceCase {TE} --attention-backend unfused",
        "t5",
    ),
}
"""Script, arguments beside SIZES, and whose data set it needs where it has no mock one."""
VERSION_JOB = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 1024"
    " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 16 --use-distributed-optimizer"
)


class Row(NamedTuple):
    """One launch."""

    name: str
    command: str
    """As a user would type it, paths left out."""
    works: bool
    what: str
    """Number of slices, or the line that says why not."""


class Job(NamedTuple):
    """What to launch for a row."""

    name: str
    script: Path
    args: str
    version: str = ""
    """megatron-core to install; empty: what is there."""
    checkout: Path | None = None
    data: str = ""


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The jobs that the command line asks for."""
    jobs = [
        Job(
            f"megatron-core {version}", REPOSITORY / "scripts" / "train_gpt_megatron.py", VERSION_JOB, version
        )
        for version in filter(None, args.versions.split(","))
    ]
    for path in map(Path, filter(None, args.branches.split(","))):
        for name, implementation in (("local", LOCAL), ("Transformer Engine", TE)):
            arguments = f"{SIZES} {GPT} {MOCK} {PP2} {implementation} --use-distributed-optimizer"
            jobs.append(
                Job(f"{path.name}, {name}", path / "pretrain_gpt.py", arguments, checkout=path.resolve())
            )
    if args.megatron is not None:
        for name, (script, arguments, data) in FEATURES.items():
            checkout = args.megatron.resolve()
            jobs.append(Job(name, checkout / script, f"{SIZES} {arguments}", checkout=checkout, data=data))
    words = [word for word in args.only.split(",") if word]
    return [job for job in jobs if not words or any(word in job.name for word in words)]


def run(job: Job, out: Path) -> Row:
    """Launch a job."""
    shown = f"{job.script.name} {job.args} --prism-emulate --prism-world-size {WORLD_SIZE}"
    if not job.script.exists():
        return Row(job.name, shown, False, f"this checkout has no {job.script.name}")
    with tempfile.TemporaryDirectory() as scratch:
        python = sys.executable
        first = job.checkout
        if job.version:
            python, first, problem = environment_with(f"megatron-core=={job.version}", Path(scratch) / "env")
            if problem:
                return Row(job.name, shown, False, problem)
        data = make_data(job.data, Path(scratch) / "data") if job.data else []
        shutil.rmtree(out, ignore_errors=True)
        command = [
            *(python, *LAUNCH, str(job.script), *shlex.split(job.args), *data),
            *(
                "--prism-emulate",
                f"--prism-world-size={WORLD_SIZE}",
                f"--prism-out={out}",
                "--prism-no-cache",
            ),
        ]
        # Megatron wants one connection for overlapped tensor parallelism, more for FSDP.
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if "fsdp" in job.args else "1"}
        if first is not None:
            environment |= python_path(first)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0 and (out / "prediction.json").exists():
        slices = json.loads((out / "prediction.json").read_text())["slices"]
        return Row(job.name, shown, True, f"{len(slices)} slices")
    return Row(job.name, shown, False, f"status {done.returncode}: {last_words(done.stderr)}")


def last_words(stderr: str) -> str:
    """The line that says what is wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("prism: error: ")]
    unknown = [line for line in lines if "error: unrecognized arguments" in line]
    chosen = (unknown or ours or lines[-1:] or ["no output"])[0]
    return re.sub(r"^prism: error: ", "", chosen)[:300]


def environment_with(requirement: str, folder: Path) -> tuple[str, Path, str]:
    """A throw-away environment on top of this one with another package: its Python, where its packages are, and what went wrong."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    version = sysconfig.get_python_version()
    own = folder / "lib" / f"python{version}" / "site-packages"
    # Read by the new interpreter when it starts: its own packages come first, then ours, and the .pth files of ours.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (own / "base.pth").write_text("\n".join(lines) + "\n")
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        found = shutil.which("pip")
        if found is None:
            return python, own, "there is no pip to install it with"
        pip = [found]
    done = subprocess.run(
        [*pip, "--python", python, "install", "--quiet", "--no-deps", "--only-binary=:all:", requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return python, own, f"pip: {(errors or ['failed'])[-1][:200]}" if done.returncode else ""


def main() -> int:
    """Run the launches; 0 when all work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", default="", help="comma-separated versions of megatron-core")
    parser.add_argument("--branches", default="", help="comma-separated checkouts of Megatron-LM")
    parser.add_argument("--megatron", type=Path, help="the checkout whose scripts and features are tried")
    parser.add_argument("--only", default="", help="comma-separated words; rows whose name contains one")
    parser.add_argument("--out", type=Path, help="keep results here, and go on from there")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        for job in jobs_of(args):
            slug = re.sub(r"\W+", "_", job.name)
            kept = out / f"{slug}.json"
            if kept.exists():
                row = Row(**json.loads(kept.read_text()))
            else:
                row = run(job, out / slug)
                kept.write_text(json.dumps(row._asdict()))
            rows.append(row)
            if not args.markdown:
                print(f"{row.name:40} {'works' if row.works else 'FAILS'}: {row.what}", flush=True)
    if args.markdown:
        print("| what | | |\n| --- | --- | --- |")
        for row in rows:
            print(f"| {row.name} | {'✔' if row.works else '✘'} | {row.what.replace('|', '/')} |")
        print("\nCommands, each after `torchrun --nproc-per-node 1`:\n")
        for row in rows:
            print(f"* {row.name}: `{row.command}`")
    return 0 if all(row.works for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
