"""Runs as a slice: DeepSpeed's loops over ranks and their equivalents, each recorded. Usage: loops_script.py result.json.

Writes a JSON object: case → [events of the loop, events of the equivalent]; and tables.json beside it, pairs of what
DeepSpeed's tables of partitions hold.
"""

import json
import sys

import deepspeed
import torch
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

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
    rows, live, sizes, host_views = [], 0, {}, 0
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
            host_views += dict(iteration.signatures[ref - 1].scalars)["count"] if ref else 0
    return result, {"rows": rows, "live": live, "host_views": host_views}


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

TABLES = (
    "param_to_partition_ids",
    "is_partition_reduced",
    "total_grads_in_partition",
    "remaining_grads_in_partition",
    "is_grad_computed",
    "grad_partition_insertion_offset",
    "grad_start_offset",
    "first_param_index_in_partition",
)


class Tables:
    """What DeepSpeed's method reads and fills."""

    initialize_gradient_partition = DeepSpeedZeroOptimizer.initialize_gradient_partition
    get_first_param_index = DeepSpeedZeroOptimizer.get_first_param_index

    def __init__(self, sizes, padding, partition_size):
        self.params = [torch.empty(size) for size in sizes]
        self.round_robin_bit16_groups = [self.params]
        self.round_robin_bit16_padding = [padding]
        self.real_dp_process_group = [torch.distributed.group.WORLD]
        self.partition_size = [partition_size]
        for table in TABLES:
            setattr(self, table, {})

    def get_param_id(self, param):
        return next(i for i, one in enumerate(self.params) if one is param)

    def filled(self, method):
        method(self)
        return [repr(getattr(self, table)) for table in TABLES]


make = DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures
cases = (
    ([5, 1, 700, 3, 40], [0] * 5, 4),
    ([1900], [0], 10),
    ([3] * 50 + [90], [1] * 51, 2),
    ([4, 4], [0, 0], 4),
)
tables = [[Tables(*case).filled(make.__wrapped__), Tables(*case).filled(make)] for case in cases]

with open(sys.argv[1].replace("result", "tables"), "w") as file:
    json.dump(tables, file)
with open(sys.argv[1], "w") as file:
    json.dump(results, file)
