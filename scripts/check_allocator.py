#!/usr/bin/env python3
"""Play traces of allocations through torch's caching allocator and through the ledger's, under several settings.

    python scripts/check_allocator.py --record FILE [--trace NAME=RUN/slices/0/program.npz …]   # on a GPU: truth
    python scripts/check_allocator.py --record FILE --without-gpu …    # in a CUDA build of torch: its allocator, no GPU
    python scripts/check_allocator.py [FILE]                           # in a CPU build: compare

Truth is allocated and reserved bytes after every step, read from ``torch.cuda.memory_stats``. Each setting of
``PYTORCH_ALLOC_CONF`` runs in a process of its own, on random traces (made here from a seed) and on those of emulated
programs. With a limit (``set_per_process_memory_fraction``) a trace ends where torch says out of memory. The comparison
plays them on the virtual device and, where there is no limit, through the later stages' allocator
(``program/memory_allocator.py``); it exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MIB = 2**20
DATA = Path(__file__).parent.parent / "tests" / "data" / "allocator_torch211.json"
TOTAL_BYTES = 150109945856
"""Of an H200, as CUDA reports it."""
SETTINGS: tuple[tuple[str, int], ...] = (
    ("", 0),
    ("", 3072),
    ("expandable_segments:True", 0),
    ("expandable_segments:True", 3072),
    ("max_split_size_mb:64", 0),
    ("max_split_size_mb:64", 3072),
    ("max_split_size_mb:32,max_non_split_rounding_mb:64", 3072),
    ("roundup_power2_divisions:4", 0),
    ("roundup_power2_divisions:[64:8,128:4,256:2,>:1]", 0),
    ("garbage_collection_threshold:0.6", 3072),
    ("garbage_collection_threshold:0.6,max_split_size_mb:128", 3072),
    ("expandable_segments:True,roundup_power2_divisions:8", 0),
)
"""``PYTORCH_ALLOC_CONF`` and the limit in MiB, 0 for none."""
RANDOM_STEPS = 3000
RANDOM_LIVE = 2048 * MIB
STREAMS = 3


def random_trace(seed: int) -> list[tuple[int, int]]:
    """Steps: ``(bytes, stream)`` for an allocation, ``(-1, ordinal)`` for the release of an earlier one."""
    draw = random.Random(seed)
    steps: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    count = 0
    while len(steps) < RANDOM_STEPS:
        grow = sum(live.values()) < RANDOM_LIVE * draw.random()
        if grow or not live:
            low, high = draw.choice(
                ((1, MIB), (1, MIB), (MIB, 10 * MIB), (MIB, 10 * MIB), (10 * MIB, 300 * MIB))
            )
            size = int(low * (high / low) ** draw.random())
            if draw.random() < 0.5:  # sizes come back, as in a training loop
                size = 1 << size.bit_length()
            steps.append((size, draw.choice((0, 0, 0, *range(1, STREAMS)))))
            live[count] = size
            count += 1
        else:
            chosen = draw.choice(list(live)[-8:] if draw.random() < 0.6 else list(live))
            del live[chosen]
            steps.append((-1, chosen))
    return steps


def program_trace(path: str) -> list[tuple[int, int]]:
    """Steps of an emulated program: what is live at its start, then its iteration twice."""
    from prism_plugins.program.model import EventKind
    from prism_plugins.program.store import load_program

    program = load_program(Path(path))
    steps = [(a.nbytes, 0) for a in program.initial]
    ordinal = {a.id: i for i, a in enumerate(program.initial)}
    count = len(steps)
    for _ in range(2):
        for kind, _, stream, ref, value in program.events.tolist():
            if kind == EventKind.ALLOC:
                ordinal[ref] = count
                count += 1
                steps.append((value, stream))
            elif kind == EventKind.FREE and ref in ordinal:
                steps.append((-1, ordinal.pop(ref)))
    return steps


def record(path: Path, traces: dict[str, list[tuple[int, int]]], *, virtual: bool) -> None:
    """Play every trace under every setting; write what torch counted."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "traces.json"
        given.write_text(json.dumps(traces))
        results = []
        for conf, limit in SETTINGS:
            for name in traces:
                if limit and not name.startswith("random"):
                    continue
                found = play_elsewhere(given, name, conf, limit, virtual=virtual)
                results.append({"conf": conf, "limit_mib": limit, "trace": name, **found})
                print(conf or "default", limit, name, found["steps"], "steps", flush=True)
    total = TOTAL_BYTES if virtual else torch.cuda.get_device_properties(0).total_memory
    path.write_text(
        json.dumps(
            {
                "gpu": "none: torch's allocator on the virtual CUDA runtime"
                if virtual
                else torch.cuda.get_device_name(0),
                "total_bytes": total,
                "torch": torch.__version__,
                "source": "scripts/check_allocator.py --record" + (" --without-gpu" if virtual else ""),
                "programs": {name: steps for name, steps in traces.items() if not name.startswith("random")},
                "results": results,
            }
        )
    )


def play_elsewhere(given: Path, name: str, conf: str, limit_mib: int, *, virtual: bool) -> dict:
    """Play a trace of a file in a process of its own, on the virtual device or on this machine's GPU."""
    env = os.environ | {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(given),
        name,
        str(limit_mib),
        "virtual" if virtual else "gpu",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{conf} {name}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker(given: str, name: str, limit: str, device: str) -> None:
    """Play one trace; print what torch counted."""
    if device == "virtual":
        load_virtual_device()
    print(json.dumps(play(json.loads(Path(given).read_text())[name], int(limit))), flush=True)
    os._exit(0)  # autograd's threads must not be unwound by the interpreter's exit


def ledger_worker() -> None:
    """Play the traces of standard input on the virtual device of a CPU build of torch; print what each gives."""
    load_virtual_device()
    import torch

    from prism_plugins.device.memory import configure_allocator
    from prism_plugins.program.allocator_settings import parse_settings

    for job in map(json.loads, sys.stdin):
        configure_allocator(parse_settings(job["conf"]))
        print(json.dumps(play(job["steps"], job["limit_mib"])), flush=True)
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()
        if torch.cuda.memory_reserved():
            raise RuntimeError("blocks are left of the last trace")
    os._exit(0)


def play_on_ledger(jobs: list[dict]) -> list[dict]:
    """What the slices' ledger counts for each ``{"conf", "limit_mib", "steps"}``, in one process."""
    done = subprocess.run(
        [sys.executable, __file__, "--ledger"],
        input="\n".join(map(json.dumps, jobs)), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def load_virtual_device() -> None:
    """Give this process the virtual device of a slice, with the memory of an H200."""
    from types import SimpleNamespace

    import msgspec

    from prism_plugins.costs.cluster import load_cluster
    from prism_plugins.device.load import install_torch_cuda, load_device
    from prism_plugins.program.slices import SliceSpec

    gpu = msgspec.structs.replace(load_cluster("dgx-h200").gpu_facts(), memory_bytes=TOTAL_BYTES)
    spec = SliceSpec(rank=0, world_size=8, gpus_per_node=8, argv=(), gpu=gpu, slice_dir=".")
    load_device(spec)
    import torch  # noqa: F401

    install_torch_cuda(SimpleNamespace(spec=spec, on_import=lambda *a: None, assume=print))


def play(steps: list[tuple[int, int]], limit_mib: int) -> dict:
    """Play a trace on this process's GPU or virtual device; what torch counts."""
    import torch

    torch.cuda.init()
    if limit_mib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((limit_mib * MIB + 0.5) / total)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    live: dict[int, torch.Tensor] = {}
    count, seen = 0, Changes()
    for size, which in steps:
        if size >= 0:
            try:
                with torch.cuda.stream(streams[which]):
                    live[count] = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                seen.oom = True
                break
            count += 1
        else:
            del live[which]
        stats = torch._C._cuda_memoryStats(0)
        if stats["num_ooms"]:  # the virtual device goes on
            seen.oom = True
            break
        seen.add(stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"])
    stats = torch.cuda.memory_stats()
    keys = ("num_alloc_retries", "num_device_alloc", "num_device_free", "inactive_split_bytes.all.current")
    return seen.result() | {key: stats[key] for key in keys}


def trace_named(data: dict, name: str) -> list[tuple[int, int]]:
    """A trace of a file of results."""
    return (
        data["programs"][name] if name in data["programs"] else random_trace(int(name.removeprefix("random")))
    )


def ledger(steps: list[tuple[int, int]], conf: str) -> dict:
    """A trace through the later stages' allocator."""
    import numpy as np

    from prism_plugins.program.allocator_settings import parse_settings
    from prism_plugins.program.memory_allocator import CachingAllocator, block_bytes

    settings = parse_settings(conf)
    allocator, seen = CachingAllocator(settings), Changes()
    for size, which in steps:
        if size >= 0:
            allocator.run(block_bytes(np.array([size]), settings), np.array([-1]), np.array([which]))
        else:
            allocator.run(np.array([-1]), np.array([which]), np.array([0]))
        seen.add(allocator.allocated, allocator.reserved)
    return seen.result()


def compare(path: Path, *, wanted: Callable[[dict], bool] = lambda _: True) -> list[str]:
    """Compare the wanted results of a file with both ledgers; a line for each, and whether it is equal at its end."""
    data = json.loads(path.read_text())
    results = [truth for truth in data["results"] if wanted(truth)]
    jobs = [
        {key: truth[key] for key in ("conf", "limit_mib")} | {"steps": trace_named(data, truth["trace"])}
        for truth in results
    ]
    lines = []
    for truth, job, slices in zip(results, jobs, play_on_ledger(jobs), strict=True):
        found = {"slices": slices}
        if not truth["limit_mib"]:
            found["later stages"] = ledger(job["steps"], truth["conf"])
        for where, mine in found.items():
            told = ", ".join(
                f"{key} {_first_difference(mine[key], truth[key])}" for key in differing(mine, truth)
            )
            limit = f", {truth['limit_mib']} MiB" if truth["limit_mib"] else ""
            lines.append(
                f"{truth['conf'] or 'defaults'}{limit}, {truth['trace']}, {where}: {told or 'equal'}"
            )
    return lines


def differing(mine: dict, truth: dict) -> list[str]:
    """Keys of ``mine`` in which both differ."""
    return [key for key, value in mine.items() if json.loads(json.dumps(value)) != truth[key]]


def _first_difference(mine: object, truth: object) -> str:
    if isinstance(mine, list) and isinstance(truth, list):
        for a, b in zip(mine, truth, strict=False):
            if list(a) != list(b):
                return f"{tuple(a)} instead of {tuple(b)}"
        return f"{len(mine)} entries instead of {len(truth)}"
    return f"{mine} instead of {truth}"


class Changes:
    """Reserved bytes where they changed, and a sum over all steps of what was allocated."""

    def __init__(self) -> None:
        self.steps = 0
        self.oom = False
        self._reserved: list[tuple[int, int]] = []
        self._sum = self._peak = 0

    def add(self, allocated: int, reserved: int) -> None:
        """After a step."""
        self._sum += allocated
        self._peak = max(self._peak, allocated)
        if not self._reserved or self._reserved[-1][1] != reserved:
            self._reserved.append((self.steps, reserved))
        self.steps += 1

    def result(self) -> dict:
        """As it is written."""
        return {
            "steps": self.steps,
            "oom": self.oom,
            "peak_allocated": self._peak,
            "sum_allocated": self._sum,
            "reserved": self._reserved,
        }


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--ledger"]:
        ledger_worker()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=DATA)
    parser.add_argument("--record", action="store_true", help="play on this machine's GPU and write the file")
    parser.add_argument(
        "--without-gpu",
        action="store_true",
        help="with --record: in a CUDA build of torch, on the virtual runtime",
    )
    parser.add_argument(
        "--trace", action="append", default=[], metavar="NAME=PROGRAM", help="program of a slice"
    )
    args = parser.parse_args()
    if args.record:
        traces = {f"random{seed}": random_trace(seed) for seed in range(3)}
        traces |= {name: program_trace(path) for name, _, path in (t.partition("=") for t in args.trace)}
        record(args.file, traces, virtual=args.without_gpu)
        return 0
    lines = compare(args.file)
    different = [line for line in lines if not line.endswith(": equal")]
    print("\n".join(lines), f"{len(different)} of {len(lines)} differ", sep="\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
