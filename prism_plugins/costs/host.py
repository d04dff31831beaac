"""The host: which kind of call an op is for the issuing thread, and the price of work on host memory.

Work on host memory are ops named ``host::…``, such as the optimizer step of ZeRO-Offload.
Loops that make views (``host::views``) take the host's own time a view. All else is taken as bound by the host's
memory, which the GPUs of a node share evenly: their ranks do the same at
the same time. Threads are assumed to be enough to reach the bandwidth, and bound to the rank's own socket.
"""

from __future__ import annotations

import functools

from prism_plugins.costs.base import Price
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.families import base_name, family_of
from prism_plugins.costs.traffic import footprint, traffic
from prism_plugins.program.model import OpSignature

MEMORY_EFFICIENCY = 0.45
"""Of the peak of the host's memory. CPU-Adam takes 0.22, 0.51, 1.03, 2.41 and 2.57 s for 1, 2, 4, 8 and 10 billion
parameters (Ren et al., ZeRO-Offload, arXiv 2101.06840, table of Adam latencies) on two Xeon 8168, twelve channels of
DDR4-2666: 256 GB/s. At 30 bytes a parameter (four fp32 tensors read, three and an fp16 copy written) that is 100 to
136 GB/s, 117 in the middle."""

_REWRITTEN = {"cpu_adam": 7 / 4, "cpu_adagrad": 5 / 3, "cpu_lion": 5 / 3}
"""Optimizers: traffic as a multiple of the tensors given (parameter, gradient, states), of which all but the gradient
are written as well."""


_KIND_OF_FAMILY = {
    "gemm": "gemm",
    "scaled_gemm": "gemm",
    "grouped_gemm": "gemm",
    "batched_gemm": "batched_gemm",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "cudnn_attention_forward": "attention",
    "cudnn_attention_backward": "attention",
    "softmax_forward": "softmax",
    "softmax_backward": "softmax",
    "norm_forward": "norm",
    "norm_backward": "norm",
    "reduction": "reduction",
    "scan": "reduction",
    "loss": "reduction",
    "cat": "cat",
    "copy": "copy",
    "fill": "fill",
    "gather": "gather",
    "scatter": "gather",
    "foreach": "foreach",
    "fused_optimizer": "foreach",
    "multi_tensor": "foreach",
    "free": "",
}
"""Kinds of :mod:`prism_plugins.host_benchmark` by op family; others are issued like element-wise ops."""


@functools.cache
def enqueue_kind(op: str) -> str:
    """Which kind of call an op is for the issuing thread; empty where it calls nothing on the device."""
    if op.startswith("host::"):
        return ""
    return _KIND_OF_FAMILY.get(family_of(op) or "", "elementwise")


def is_host_work(op: str) -> bool:
    """Whether an op runs on the host."""
    return op.startswith("host::")


def price_host_work(cluster: Cluster, signature: OpSignature) -> Price:
    """Price one occurrence; the duration is time of the host."""
    if base_name(signature.op) == "views":
        us = dict(signature.scalars)["count"] * cluster.host.loop_us * (cluster.host.slice_factor or 1.0)
        return Price(duration_ns=us * 1e3, rule="host/views", provenance="modelled")
    rewritten = _REWRITTEN.get(base_name(signature.op))
    if rewritten is None:
        nbytes = traffic(signature)
    else:
        nbytes = rewritten * sum(footprint(t) for t in signature.inputs)
    rate = cluster.host.memory_bytes_per_s * MEMORY_EFFICIENCY / cluster.gpus_per_node
    return Price(
        duration_ns=nbytes / rate * 1e9, rule="roofline/host_memory", provenance="modelled", bytes=nbytes
    )
