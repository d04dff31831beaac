"""Measures collectives on the GPUs at hand: torchrun, NCCL, groups of two up to all of them.

``measure_collectives`` starts torchrun on this module, which then is the worker: warm-up, then blocks of calls back to back
between two CUDA events, the slowest rank's median block. Random data, sizes from 1 KiB to 1 GiB.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prism_plugins.costs.nccl.measured import CollectivePoint
from prism_plugins.errors import PrismError

MEASURED_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
_BLOCKS = 7
_BLOCK_US = 20_000.0
_MOST_CALLS = 200
_TIMEOUT_S = 1200


def measure_collectives(
    *, device: str = "cuda", gpus: int = 0, most_bytes: int = 1 << 30, budget_s: float = 600.0
) -> tuple[str, list[CollectivePoint]]:
    """Name of the GPU and the measured points.

    Args:
        device: ``cuda`` (NCCL), or ``cpu`` (gloo) to try the procedure.
        gpus: Processes to start; 0: one for every GPU.
        most_bytes: Largest message.
        budget_s: Larger messages are left out once this is spent.

    Raises:
        PrismError: fewer than two GPUs, or torchrun failed. Carries the last line it printed.
    """
    if device == "cuda" and not gpus:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        raise PrismError(f"collectives need two GPUs or more; this machine has {gpus}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "points.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}",
            "-m", "prism_plugins.calibration.collectives", str(out), device, str(most_bytes), str(budget_s),
        ]  # fmt: skip
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PRISM_")} | {
            "OMP_NUM_THREADS": "1"
        }
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise PrismError(f"measuring collectives took more than {_TIMEOUT_S} s") from None
        if done.returncode or not out.exists():
            errors = [
                line for line in done.stderr.splitlines() if "Error" in line
            ] or done.stderr.splitlines()
            raise PrismError(
                f"torchrun failed with status {done.returncode}: {(errors or ['no output'])[-1][:300]}"
            )
        found = json.loads(out.read_text())
    return found["gpu"], [CollectivePoint(**point) for point in found["points"]]


def _work(out: Path, device: str, most_bytes: int, budget_s: float) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    sizes = sorted({n for n in (2, 4, 8, 16) if n < world} | {world})
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    deadline = time.monotonic() + budget_s
    points = []
    nbytes = 1 << 10
    while nbytes <= most_bytes:
        for n in sizes:
            for kind in MEASURED_KINDS if n == sizes[0] else MEASURED_KINDS[:-1]:
                # Everybody has to agree on whether there is time left, and on the time it took.
                verdict = torch.tensor([float(time.monotonic() > deadline)], device=device)
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
                if verdict.item():
                    continue
                us = _time(kind, nbytes, n, groups[n], device, torch, dist) if rank < n else 0.0
                slowest = torch.tensor([us], device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if slowest.item() > 0:
                    points.append({"kind": kind, "gpus": n, "nbytes": nbytes, "us": slowest.item()})
        nbytes *= 4
    if rank == 0:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        out.write_text(json.dumps({"gpu": name, "points": points}))
    dist.barrier()
    dist.destroy_process_group()


def _time(kind: str, nbytes: int, n: int, group, device: str, torch, dist) -> float:
    """Median time of one call in a block of calls back to back, us; 0 where the backend lacks the collective."""
    rank = dist.get_rank()
    numel = max(n, nbytes // 4 // n * n)
    full = torch.randn(numel, device=device)
    shard = torch.randn(numel // n, device=device)
    other = torch.empty_like(full)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group=group),
        "p2p": lambda: dist.send(full, 1, group=group) if rank == 0 else dist.recv(full, 0, group=group),
    }
    call = calls[kind]

    def block(count: int) -> float:
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) * 1e3 / count
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) * 1e6 / count

    try:
        block(3)
    except RuntimeError as error:
        if device == "cpu" and "support" in str(error):
            return 0.0
        raise
    once = torch.tensor([block(3)], device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group)
    count = max(1, min(_MOST_CALLS, int(_BLOCK_US / max(once.item(), 1.0))))
    return statistics.median(block(count) for _ in range(_BLOCKS))


if __name__ == "__main__":
    _work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
