"""What an op costs on the virtual device, and what recording adds to it.

    python scripts/bench_device.py

Prints medians of CPU time per op, us: the whole call from Python with recording off and on. ``no-op`` is the cost of
a call that torch refuses to do anything for (``Tensor.requires_grad_``): the floor that Python sets.
"""

from __future__ import annotations

import os
import statistics
import time
from types import SimpleNamespace

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.device.load import install_torch_cuda, load_device
from prism_plugins.program.slices import SliceSpec

REPEATS, CALLS = 15, 1000


def main() -> None:
    spec = SliceSpec(
        rank=0,
        world_size=8,
        gpus_per_node=8,
        argv=(),
        gpu=load_cluster("dgx-h100").gpu_facts(),
        slice_dir=".",
    )
    load_device(spec)
    import torch
    import torch.nn.functional as F

    install_torch_cuda(SimpleNamespace(spec=spec, on_import=lambda *a: None, assume=print))
    from prism_plugins.capture.recorder import get_recorder

    recorder = get_recorder()
    x = torch.empty(1024, 1024, device="cuda")
    small = torch.ones(8, device="cuda")
    weight = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    many = [torch.empty(1024, 1024, device="cuda") for _ in range(100)]
    cases = {
        "no-op": lambda: x.requires_grad_(False),
        "empty": lambda: torch.empty(1024, 1024, device="cuda"),
        "view": lambda: x.view(-1),
        "mm": lambda: x @ x,
        "mm with grad": lambda: x @ weight,
        "add": lambda: x + x,
        "add_": lambda: x.add_(x),
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(x, (1024,)),
        "copy_": lambda: x.copy_(many[0]),
        "add of 8 numbers (computed)": lambda: small + small,
        "foreach_mul_ of 100 tensors": lambda: torch._foreach_mul_(many, 0.9),
    }

    def cost_us(function) -> float:
        samples = []
        for _ in range(REPEATS):
            start = time.process_time_ns()
            for _ in range(CALLS):
                function()
            samples.append((time.process_time_ns() - start) / CALLS / 1e3)
        return statistics.median(samples)

    print(f"{'op':<30}{'off us':>10}{'on us':>10}{'recording us':>15}")
    for name, function in cases.items():
        function()
        off = cost_us(function)
        recorder.start()
        on = cost_us(function)
        recorder.stop()
        print(f"{name:<30}{off:>10.2f}{on:>10.2f}{on - off:>15.2f}", flush=True)
    print(f"recording, as the recorder samples it: {recorder.stats().record_ns_per_op / 1e3:.2f} us per op")
    os._exit(0)


if __name__ == "__main__":
    main()
