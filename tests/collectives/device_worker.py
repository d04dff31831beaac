"""Collectives of virtual CUDA tensors; prints a JSON object. Usage: device_worker.py DEVICE"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from typing import Any

from prism_plugins.device.load import install_torch_cuda, load_device
from prism_plugins.program.slices import GpuFacts, SliceSpec

warnings.filterwarnings("ignore")
SPEC = SliceSpec(
    rank=1,
    world_size=4,
    gpus_per_node=8,
    argv=(),
    device=sys.argv[1],
    gpu=GpuFacts(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, num_sms=132, capability=(9, 0)),
    slice_dir="/run/slices/1",
)
load_device(SPEC)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from prism_plugins.capture.recorder import get_recorder  # noqa: E402
from prism_plugins.collectives.install import install_collectives  # noqa: E402
from prism_plugins.device.tensors import is_synthesized  # noqa: E402
from prism_plugins.program.model import EventKind  # noqa: E402


class Context:
    spec = SPEC

    def __init__(self) -> None:
        self.assumptions: list[str] = []

    def patch(self, target: Any, name: str, replacement: Any, *, why: str) -> Any:
        original = getattr(target, name, None)
        setattr(target, name, replacement)
        return original

    def assume(self, text: str) -> None:
        self.assumptions.append(text)

    def on_import(self, module: str, hook: Any) -> None:
        pass


context = Context()
install_torch_cuda(context)
collectives = install_collectives(SPEC, context)
recorder = get_recorder()
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
group = dist.group.WORLD
results: dict[str, Any] = {}


def events(function: Any) -> list[list[Any]]:
    """Kind, stream and what it refers to, of every event but allocations."""
    recorder.start()
    function()
    iteration = recorder.stop()
    rows = []
    for event in iteration.events:
        kind = EventKind(event["kind"])
        if kind in (EventKind.ALLOC, EventKind.FREE):
            continue
        what: Any = int(event["ref"])
        if kind == EventKind.COMM:
            what = iteration.comms[event["ref"]].kind
        elif kind == EventKind.KERNEL:
            what = iteration.signatures[event["ref"]].op
        rows.append([kind.name, int(event["stream"]), what])
    return rows


def values_of_small_tensors() -> list[Any]:
    x = torch.full((4,), 2.0, device="cuda")
    dist.all_reduce(x)
    gathered = torch.empty(16, device="cuda")
    dist.all_gather_into_tensor(gathered, x)
    own = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(own, gathered)
    exchanged = torch.empty(4, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(exchanged, torch.arange(4, device="cuda"))
    tensors = (x, gathered, own, exchanged)
    return [[t.tolist() for t in tensors], [is_synthesized(t) for t in tensors]]


def provenance() -> list[Any]:
    big = torch.ones(1 << 20, device="cuda")
    own = torch.full((1 << 10,), float("nan"), device="cuda")
    full = torch.empty(1 << 12, device="cuda")
    from_synthesized = big[: 1 << 12]
    dist.reduce_scatter_tensor(own, from_synthesized)
    received = torch.full((4,), float("nan"), device="cuda")
    dist.recv(received, 0)
    kept = torch.full((4,), 3.0, device="cuda")
    dist.broadcast(kept, 0)
    dist.all_gather_into_tensor(full, own)
    return [
        [bool(torch.isfinite(t).all()) for t in (own, received, kept, full)],
        [is_synthesized(t) for t in (own, received, kept, full)],
    ]


big = torch.ones(1 << 20, device="cuda")
small = torch.ones(4, device="cuda")
results["values"] = values_of_small_tensors()
results["provenance"] = provenance()
dist.all_reduce(big)
results["no kernels"] = events(lambda: [dist.all_reduce(small), dist.all_reduce(big), dist.recv(small, 0)])


def two_streams() -> None:
    work = dist.all_reduce(big, async_op=True)
    work.wait()
    work.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()


results["waits"] = events(two_streams)
results["future"] = events(lambda: dist.all_reduce(big, async_op=True).get_future().wait())
results["then"] = (
    dist.all_reduce(small * 0 + 1, async_op=True)
    .get_future()
    .then(lambda f: (f.value()[0] / 4).tolist())
    .wait()
)
results["barrier"] = events(dist.barrier)


def memory_of_a_work() -> list[int]:
    """Bytes above the start: while an all_gather runs, after its wait, after its end."""
    gc.collect()
    start = torch.cuda.memory_allocated()
    output = torch.empty(4 << 20, device="cuda")
    work = dist.all_gather_into_tensor(output, torch.empty(1 << 20, device="cuda"), async_op=True)
    running = torch.cuda.memory_allocated() - start
    work.wait()
    waited = torch.cuda.memory_allocated() - start
    del output
    held = torch.cuda.memory_allocated() - start
    del work
    return [running, waited, held, torch.cuda.memory_allocated() - start]


results["memory"] = memory_of_a_work()


def ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
    results["ddp"] = events(lambda: model(torch.ones(2, 4, device="cuda")).sum().backward())


ddp()


def microseconds(function: Any, count: int = 3000) -> float:
    """CPU time of a call (the machine may be busy), best of three."""
    best = float("inf")
    recorder.start()
    for _ in range(3):
        begin = time.process_time()
        for _ in range(count):
            function()
        best = min(best, (time.process_time() - begin) / count * 1e6)
    recorder.stop()
    return best


def cost_of_calls() -> dict[str, float]:
    maximum = dist.ReduceOp.MAX
    gathered = torch.empty(4 << 20, device="cuda")
    batch = [dist.P2POp(dist.isend, big, 2, group), dist.P2POp(dist.irecv, big, 0, group)]
    return {
        "all_reduce": microseconds(lambda: dist.all_reduce(big)),
        "all_reduce, small": microseconds(lambda: dist.all_reduce(small, maximum)),
        "all_reduce, async and wait": microseconds(lambda: dist.all_reduce(big, async_op=True).wait()),
        "all_gather_into_tensor": microseconds(lambda: dist.all_gather_into_tensor(gathered, big)),
        "batch of two": microseconds(lambda: dist.batch_isend_irecv(batch)[0].wait()),
    }


if SPEC.device == "virtual":
    results["us"] = cost_of_calls()
print("\n" + json.dumps(results), flush=True)
os._exit(0)
