"""One of several processes that run the same calls over plain gloo, over our real peers, and mirrored.

Usage: real_worker.py RANK SIZE STORE_PORT OUTPUT_DIR
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from prism_plugins.collectives.install import install_collectives
from prism_plugins.errors import PrismError
from prism_plugins.program.slices import GpuFacts, SliceSpec

sys.path.insert(0, str(Path(__file__).parent))
from fake_recorder import FakeRecorder

warnings.filterwarnings("ignore")

SCENARIOS: dict[str, Callable[[int, int, int], Any]] = {}
"""Name → function of (rank, size, what distinguishes this rank's data)."""


def scenario(function: Callable[[int, int, int], Any]) -> Callable[[int, int, int], Any]:
    SCENARIOS[function.__name__] = function
    return function


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 7 + 1 + seed) % 11).to(dtype).view(shape)


def all_reduce(op: Any, dtype: torch.dtype) -> Callable[[int, int, int], Any]:
    def run(rank: int, size: int, seed: int) -> Any:
        x = data(seed, 5, dtype=dtype)
        dist.all_reduce(x, op)
        return x.float().tolist()

    return run


for _op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
    for _dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        if _op == "AVG" and not _dtype.is_floating_point:
            continue
        SCENARIOS[f"all_reduce {_op} {_dtype}"] = all_reduce(getattr(dist.ReduceOp, _op), _dtype)
for _op in ("BAND", "BOR", "BXOR"):
    SCENARIOS[f"all_reduce {_op} int64"] = all_reduce(getattr(dist.ReduceOp, _op), torch.int64)


@scenario
def all_reduce_premul_sum(rank: int, size: int, seed: int) -> Any:
    x = data(seed, 4)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    return x.tolist()


@scenario
def all_reduce_bool(rank: int, size: int, seed: int) -> Any:
    x = data(seed, 6) > 5
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


@scenario
def all_reduce_strided(rank: int, size: int, seed: int) -> Any:
    x = data(seed, 4, 4)
    dist.all_reduce(x[1])
    return x.tolist()


@scenario
def all_reduce_async(rank: int, size: int, seed: int) -> Any:
    x, y = data(seed, 4), data(seed + 1, 3)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    for work in reversed(works):
        work.wait()
    return [x.tolist(), y.tolist()]


@scenario
def reduce(rank: int, size: int, seed: int) -> Any:
    x = data(seed, 4)
    dist.reduce(x, 1)
    return x.tolist() if rank == 1 else None


@scenario
def broadcast(rank: int, size: int, seed: int) -> Any:
    x, y = data(seed, 4, dtype=torch.bfloat16), data(seed, 3) > 4
    dist.broadcast(x, 1)
    dist.broadcast(y, 0)
    return [x.float().tolist(), y.tolist()]


@scenario
def all_gather(rank: int, size: int, seed: int) -> Any:
    outputs = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(outputs, data(seed, 2, 3))
    return [o.tolist() for o in outputs]


@scenario
def all_gather_into_tensor(rank: int, size: int, seed: int) -> Any:
    output = torch.zeros(2 * size, 3, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(output, data(seed, 2, 3, dtype=torch.bfloat16))
    return output.float().tolist()


@scenario
def gather(rank: int, size: int, seed: int) -> Any:
    outputs = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    dist.gather(data(seed, 3), outputs, dst=1)
    return [o.tolist() for o in outputs] if outputs else None


@scenario
def scatter(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(2)
    dist.scatter(x, [data(i, 2) for i in range(size)] if rank == 0 else None, src=0)
    return x.tolist()


@scenario
def reduce_scatter(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(3)
    dist.reduce_scatter(x, [data(seed + i, 3) for i in range(size)])
    return x.tolist()


@scenario
def reduce_scatter_tensor(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(3)
    dist.reduce_scatter_tensor(x, data(seed, 3 * size))
    return x.tolist()


@scenario
def reduce_scatter_tensor_avg_bf16(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(3, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(x, data(seed, 3 * size, dtype=torch.bfloat16), dist.ReduceOp.AVG)
    return x.float().tolist()


@scenario
def all_to_all_single(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(2 * size, 2)
    dist.all_to_all_single(x, data(seed, 2 * size, 2))
    return x.tolist()


@scenario
def all_to_all_single_uneven(rank: int, size: int, seed: int) -> Any:
    """Rank i sends i + 1 rows to everyone."""
    x = torch.zeros(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(x, data(seed, (rank + 1) * size, 2), list(range(1, size + 1)), [rank + 1] * size)
    return x.tolist()


@scenario
def all_to_all_list(rank: int, size: int, seed: int) -> Any:
    outputs = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(outputs, [data(seed + i, 2) for i in range(size)])
    return [o.tolist() for o in outputs]


@scenario
def ring(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(3)
    ops = [
        dist.P2POp(dist.isend, data(seed, 3), (rank + 1) % size),
        dist.P2POp(dist.irecv, x, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return x.tolist()


@scenario
def tagged(rank: int, size: int, seed: int) -> Any:
    x, y = torch.zeros(1), torch.zeros(1)
    peer = rank ^ 1
    sends = [dist.isend(torch.tensor([t + 10.0 * rank]), peer, tag=t) for t in (1, 2)]
    dist.recv(y, peer, tag=2)
    dist.recv(x, peer, tag=1)
    for send in sends:
        send.wait()
    return [x.tolist(), y.tolist()]


@scenario
def anyone(rank: int, size: int, seed: int) -> Any:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return None
    received = []
    for _ in range(size - 1):
        x = torch.zeros(1)
        source = dist.recv(x)
        received.append([source, x.item()])
    return sorted(received)


@scenario
def objects(rank: int, size: int, seed: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"seed": seed, "pad": "x" * seed})
    listed: list[Any] = ["a", {"b": 1}] if rank == 1 else [None, None]
    dist.broadcast_object_list(listed, src=1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"part {i}" * (i + 1) for i in range(size)] if rank == 0 else None, src=0)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(f"from {seed}", at_root, dst=0)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list(["hello"], dst=1)
    elif rank == 1:
        dist.recv_object_list(received, src=0)
    return [gathered, listed, part, at_root, received]


@scenario
def subgroups(rank: int, size: int, seed: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, size)))]
    group = groups[rank >= 2]
    x = data(seed, 2)
    dist.all_reduce(x, group=group)
    dist.barrier(group)
    return x.tolist()


@scenario
def empty(rank: int, size: int, seed: int) -> Any:
    x = torch.zeros(0)
    dist.all_reduce(x)
    sizes = [1 if i == 0 else 0 for i in range(size)]
    y = torch.zeros(size if rank == 0 else 0)
    dist.all_to_all_single(y, torch.ones(1) * (seed + 1), [1] * size if rank == 0 else [0] * size, sizes)
    return y.tolist()


def run_all(rank: int, size: int, seed: int) -> dict[str, Any]:
    results = {}
    for name, function in SCENARIOS.items():
        try:
            results[name] = function(rank, size, seed)
        except (RuntimeError, ValueError, TypeError) as error:
            results[name] = f"error: {error}"
            if os.environ.get("VERBOSE"):
                raise
    return results


def spec(rank: int, size: int, **fields: Any) -> SliceSpec:
    gpu = GpuFacts(name="GPU", memory_bytes=1 << 30, num_sms=1, capability=(9, 0))
    return SliceSpec(
        rank=rank,
        world_size=size,
        gpus_per_node=8,
        argv=(),
        gpu=gpu,
        device="cpu",
        slice_dir=f"/run/slices/{rank}",
        **fields,
    )


def main() -> None:
    rank, size, port, output = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    results: dict[str, Any] = {}

    store = c10d.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=c10d.PrefixStore("plain", store), rank=rank, world_size=size)
    results["plain equal"] = run_all(rank, size, 0)
    results["plain distinct"] = run_all(rank, size, rank)
    dist.destroy_process_group()

    recorder = FakeRecorder()
    real = spec(rank, size, real_ranks=tuple(range(size)), store=f"127.0.0.1:{port}")
    collectives = install_collectives(real, recorder=recorder)
    dist.init_process_group("gloo")
    results["real equal"] = run_all(rank, size, 0)
    results["real record"] = [[c.kind, c.dtype, c.in_numel, c.out_numel] for c in recorder.take()]
    results["real distinct"] = run_all(rank, size, rank)
    dist.barrier()
    store_made = dist.TCPStore("anywhere", 1, size, rank == 0)
    results["script store"] = [store_made.add("n", 1) <= size, len(store_made.get("n")) > 0]
    dist.barrier()
    dist.destroy_process_group()
    collectives.undo()

    recorder = FakeRecorder()
    collectives = install_collectives(spec(rank, size), recorder=recorder)
    dist.init_process_group("gloo")
    results["mirror equal"] = run_all(rank, size, 0)
    results["mirror record"] = [[c.kind, c.dtype, c.in_numel, c.out_numel] for c in recorder.take()]
    dist.destroy_process_group()
    collectives.undo()

    real = msgspec.structs.replace(real, slice_dir=f"/second run/slices/{rank}")
    collectives = install_collectives(real, recorder=recorder)
    dist.init_process_group("gloo")
    met, unmet = dist.new_group([0, 1]), dist.new_group([0, 2])
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=met)
    collectives._real.timeout = timedelta(seconds=2)
    if rank == 0:
        for group in (met, unmet):
            met._peers._gloo.set_timeout(timedelta(seconds=2))
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except PrismError as error:
                results.setdefault("timeout", []).append([type(error).__name__, str(error)])
    dist.distributed_c10d._get_default_store().add("done", 1)
    while dist.distributed_c10d._get_default_store().add("done", 0) < size:
        time.sleep(0.05)
    output.joinpath(f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)


if __name__ == "__main__":
    main()
