#!/usr/bin/env python3
"""Are layouts whose times somebody published ranked as they were measured?

    python scripts/check_tune_published.py --megatron PATH/Megatron-LM [--only 22b,175b-h100]

Pairs of layouts of one model on the same GPUs, measured more than 5 % apart. Both are composed as `prism tune` does. The
published jobs ran other software (Apex, Transformer Engine; here: the local spec), so the ratio of a pair is compared, not
its times. Exits 1 when a pair is ranked the other way round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from check_megatron_launches import COMMON, LOCAL

from prism_plugins.cli_tune import parse_knobs
from prism_plugins.integrations.megatron.tune import MegatronTuner
from prism_plugins.options import parse_command
from prism_plugins.tune.progress import TuneProgress
from prism_plugins.tune.search import Search
from prism_plugins.tune.settings import Settings

KORTHIKANTI = "Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, table 5"
DGXC = "NVIDIA/dgxc-benchmarking, GPT-3 175B, READMEs of v24.11.1 (vpp 12) and after (vpp 6)"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two layouts of a job and their measured seconds an iteration."""

    model: str
    world: int
    cluster: str
    precision: str
    own: str
    knobs: tuple[str, ...]
    """The space: both layouts are in it."""
    layouts: tuple[dict, dict]
    measured_s: tuple[float, float]
    source: str


def _gpt(layers: int, hidden: int, heads: int) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048"
        " --max-position-embeddings 2048"
    )


def _recomputation(
    model: str,
    *,
    pp: int,
    vpp: int,
    micro_batch: int,
    batch: int,
    world: int,
    measured_s: tuple[float, float],
) -> Pair:
    """Full recomputation without sequence parallelism against selective with it."""
    own = f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size {pp} --global-batch-size {batch}"
    knobs = ("tp=8", f"pp={pp}", f"vpp={vpp}", f"micro_batch={micro_batch}", "optimizer=plain", "stages=even")
    return Pair(
        model=model,
        world=world,
        cluster="dgx-a100",
        precision="--fp16",
        own=f"{own} --micro-batch-size {micro_batch}",
        knobs=(*knobs, "sp=true,false", "recompute=full,selective"),
        layouts=({"recompute": "full", "sp": False}, {"recompute": "selective", "sp": True}),
        measured_s=measured_s,
        source=KORTHIKANTI,
    )


def _chunks(world: int, batch: int, measured_s: tuple[float, float]) -> Pair:
    return Pair(
        model=_gpt(96, 12288, 96),
        world=world,
        cluster="dgx-h100",
        precision="--bf16",
        own="--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 --micro-batch-size 1"
        f" --global-batch-size {batch} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        knobs=(
            "tp=4", "pp=8", "vpp=6,12", "micro_batch=1", "sp=true", "recompute=none", "stages=even",
            "optimizer=distributed+overlap",
        ),
        layouts=({"vpp": 12}, {"vpp": 6}),
        measured_s=measured_s,
        source=DGXC,
    )  # fmt: skip


PAIRS = {
    "22b": _recomputation(
        _gpt(48, 6144, 64), pp=1, vpp=1, micro_batch=4, batch=4, world=8, measured_s=(1.42, 1.10)
    ),
    "175b": _recomputation(
        _gpt(96, 12288, 96), pp=8, vpp=3, micro_batch=1, batch=64, world=64, measured_s=(18.13, 13.75)
    ),
    "530b": _recomputation(
        _gpt(105, 20480, 128), pp=35, vpp=3, micro_batch=1, batch=280, world=280, measured_s=(49.05, 37.83)
    ),
    "1t": _recomputation(
        _gpt(128, 25600, 160), pp=64, vpp=1, micro_batch=1, batch=512, world=512, measured_s=(94.42, 71.49)
    ),
    "175b-h100": _chunks(1024, 2048, (9.01, 8.453)),
}


def main() -> int:
    """Compose the pairs; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, default=os.environ.get("MEGATRON_LM"), help="Megatron-LM checkout"
    )
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(PAIRS)}")
    args = parser.parse_args()
    if args.megatron is None:
        parser.error("--megatron or MEGATRON_LM is needed")
    os.environ["PYTHONPATH"] = str(args.megatron)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only.split(",") if args.only else PAIRS:
            wrong += not check(name, PAIRS[name], args.megatron, Path(scratch) / name)
    print(f"{wrong} ranked the other way round" if wrong else "all ranked as measured")
    return int(wrong > 0)


def check(name: str, pair: Pair, megatron: Path, out: Path) -> bool:
    """Compose one pair and print its line; True when it is ranked as measured."""
    common = f"{COMMON} {LOCAL}".replace("--bf16", pair.precision).replace("--micro-batch-size 1", "")
    words = [str(megatron / "pretrain_gpt.py"), *common.split(), *pair.model.split(), *pair.own.split()]
    job = parse_command(
        [f"--prism-world-size={pair.world}", f"--prism-cluster={pair.cluster}", "--prism-emulate", *words]
    )
    assert job is not None
    settings = Settings(chosen=parse_knobs(pair.knobs), emulations=0, everything=True, out=str(out))
    with TuneProgress(quiet=True) as progress:
        search = Search(job, MegatronTuner(), settings, progress=progress)
        search.run()
    times = []
    for layout in pair.layouts:
        [estimate] = [
            c.composed
            for c in search.composed
            if layout.items() <= c.knobs.items() and c.composed is not None
        ]
        times.append(estimate.iteration_ms / 1e3)
    told, measured = times[0] / times[1], pair.measured_s[0] / pair.measured_s[1]
    print(
        f"{name}: composed {times[0]:.2f} and {times[1]:.2f} s, ratio {told:.3f}; measured {pair.measured_s[0]:.2f} and "
        f"{pair.measured_s[1]:.2f} s, ratio {measured:.3f} ({pair.source})",
        flush=True,
    )
    return (told > 1) == (measured > 1)


if __name__ == "__main__":
    sys.exit(main())
