#!/usr/bin/env python3
"""Measure on a real GPU what compiled regions allocate and which kernels they run: the truth for region planning.

python scripts/measure_regions.py --out tests/data/regions_h200.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch


def load_cases():
    path = Path(__file__).parent.parent / "tests" / "device" / "region_cases.py"
    spec = importlib.util.spec_from_file_location("region_cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["region_cases"] = module
    spec.loader.exec_module(module)
    return module


def kernels_of(cases, case, compiled):
    """[name, microseconds] of every kernel of one forward (and backward), in order."""
    from torch.profiler import ProfilerActivity, profile

    inputs = cases.make_inputs(case)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        outputs = compiled(*inputs)
        if case.grad:
            wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.grad(outputs, wanted, torch.ones_like(outputs))
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [[e.name[:80], round(e.device_time, 2)] for e in events if "Memset" not in e.name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cases = load_cases()
    results = {}
    for name, case in cases.CASES.items():
        torch._dynamo.reset()
        compiled = torch.compile(case.function)
        results[name] = cases.measure(case, compiled)
        results[name]["kernels"] = kernels_of(cases, case, compiled)
        print(name, results[name], flush=True)
    out = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "regions": results}
    args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
