"""Runs as a slice: DeepSpeed's loops over ranks and their equivalents, each recorded. Usage: loops_script.py RESULT.

Writes a JSON object: case → [events of the loop, events of the equivalent].
"""

import json
import sys

import deepspeed
import torch
from deepspeed.runtime.comm import coalesced_collectives

from prism_plugins.capture.recorder import get_recorder
from prism_plugins.program.model import DTYPE_BYTES, EventKind

deepspeed.init_distributed()
recorder = get_recorder()
GROUPS = {"small": torch.distributed.new_group(list(range(100, 104))), "world": torch.distributed.group.WORLD}


def recorded(body):
    """What ``body`` does: kernels with the bytes they read and write, calls, allocated bytes after each alloc."""
    recorder.start()
    result = body()
    iteration = recorder.stop()
    rows, live, sizes, host_ns = [], 0, {}, 0
    for kind, _, stream, ref, value in iteration.events.tolist():
        if kind == EventKind.KERNEL:
            signature = iteration.signatures[ref]
            moved = [
                sum(spec.numel * DTYPE_BYTES[spec.dtype] for spec in specs)
                for specs in (signature.inputs, signature.outputs)
            ]
            rows.append([signature.op, stream, *moved, live])
        elif kind == EventKind.COMM:
            comm = iteration.comms[ref]
            rows.append([comm.kind, stream, comm.in_numel, comm.out_numel, live])
        elif kind == EventKind.ALLOC:
            sizes[ref] = -(-value // 512) * 512
            live += sizes[ref]
        elif kind == EventKind.FREE:
            live -= sizes.pop(ref, 0)
        elif kind == EventKind.HOST:
            host_ns += value
    return result, {"rows": rows, "live": live, "host_ns": host_ns}


def both(loop, equivalent):
    pairs = [recorded(loop), recorded(equivalent)]
    shapes = [[list(tensor.shape) for tensor in result or []] for result, _ in pairs]
    return [{**events, "shapes": shape} for (_, events), shape in zip(pairs, shapes, strict=True)]


results = {}
equivalent = coalesced_collectives.reduce_scatter_coalesced
loop = equivalent.__wrapped__.__wrapped__
for name, group in GROUPS.items():
    for sizes in ([4096 * 96], [100_000, 3, 70, 20_000_000], [10]):
        tensors = [torch.ones(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        results[f"reduce_scatter {name} {sizes}"] = both(
            lambda tensors=tensors, group=group: loop(tensors, group),
            lambda tensors=tensors, group=group: equivalent(tensors, group),
        )

config = {"train_batch_size": 192, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
for name, group in GROUPS.items():
    with deepspeed.zero.Init(config_dict_or_path=config, data_parallel_group=group):
        module = torch.nn.Sequential(
            torch.nn.Linear(300, 50), torch.nn.Linear(10, 7000), torch.nn.LayerNorm(5)
        )
    params = list(module.parameters())
    gather = params[0].all_gather_coalesced

    def gathered(function, params=params):
        function(params).wait()
        shapes = [param.data for param in params]
        params[0].partition(params)
        return shapes

    results[f"all_gather {name}"] = both(
        lambda gather=gather: gathered(gather.args[-1]), lambda gather=gather: gathered(gather)
    )

with open(sys.argv[1], "w") as file:
    json.dump(results, file)
