"""GPUs that a cluster description can name.

``memory_bytes`` is ``total_memory`` as CUDA reports it on these boards; SM counts, capability and L2 size are from
NVIDIA's data sheets and ``cudaDeviceProp``.
"""

from __future__ import annotations

from prism_plugins.errors import PrismError
from prism_plugins.program.slices import GpuFacts

GPUS = {
    "h100-sxm-80gb": GpuFacts(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=84_942_979_072,
        num_sms=132,
        capability=(9, 0),
        l2_bytes=50 * 2**20,
    ),
    "h200": GpuFacts(
        name="NVIDIA H200", memory_bytes=150_109_880_320, num_sms=132, capability=(9, 0), l2_bytes=60 * 2**20
    ),
    "a100-sxm-80gb": GpuFacts(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=84_987_740_160,
        num_sms=108,
        capability=(8, 0),
        l2_bytes=40 * 2**20,
    ),
}


def gpu_facts(name: str) -> GpuFacts:
    """Facts of a GPU by its short name. Raises PrismError for an unknown one."""
    try:
        return GPUS[name]
    except KeyError:
        raise PrismError(f"unknown GPU {name!r}: known are {', '.join(GPUS)}") from None
