"""Prices device ops by the roofline: the slower of arithmetic and memory traffic at documented efficiencies.

``duration = kernel latency + max(FLOPs / (peak × efficiency), bytes / (HBM × efficiency))``. FLOPs and bytes come from
the signature; which rule prices an op is told by :mod:`prism_plugins.costs.families`; the efficiencies stand in
:mod:`prism_plugins.costs.efficiency`.

Limits: no cache reuse between ops (an operand that the kernel before left in L2 is charged to HBM), no dependence of
the clock on what else the job runs, and GEMM tiles chosen from a short list instead of cuBLAS's heuristics.
"""

from __future__ import annotations

import math

from prism_plugins.costs.base import Price
from prism_plugins.costs.cluster import Cluster
from prism_plugins.costs.efficiency import Efficiency, efficiency_of
from prism_plugins.costs.families import family_of
from prism_plugins.costs.host import enqueue_kind, is_host_work, price_host_work
from prism_plugins.costs.rules import RULES, bytes_bound
from prism_plugins.program.model import OpSignature


class Roofline:
    """Prices ops on one GPU. Stateless; caching is the cost model's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.gpu = cluster.gpu
        self.host = cluster.host
        self.pcie_bytes_per_s = cluster.node.pcie_bytes_per_s
        self.eff: Efficiency = efficiency_of(cluster.gpu.capability)

    def price(self, signature: OpSignature) -> Price:
        """Price one occurrence. Unknown ops get a memory-bound estimate and provenance ``unpriced``."""
        if is_host_work(signature.op):
            return price_host_work(self._cluster, signature)
        family = "fused" if signature.op == "prism::fused" else family_of(signature.op)
        if family == "free":
            return Price(duration_ns=0.0, rule="free", provenance="free", host_ns=self.host.view_us * 1e3)
        if family is None:
            work, provenance = bytes_bound(self, signature, self.eff.elementwise), "unpriced"
        else:
            work, provenance = RULES[family](self, signature), "modelled"
        duration_s = work.seconds + work.kernels * self.eff.kernel_latency_us * 1e-6
        return Price(
            duration_ns=duration_s * 1e9,
            rule=f"roofline/{family or 'unknown'}",
            provenance=provenance,
            host_ns=(self.host.op_us + self.host.enqueue_us.get(enqueue_kind(signature.op), 0.0)) * 1e3,
            flops=work.flops,
            bytes=work.bytes,
        )

    def hbm_seconds(self, nbytes: float, efficiency: float) -> float:
        """Time to move bytes through HBM."""
        return nbytes / (self.gpu.hbm_bytes_per_s * efficiency)

    def peak_flops(self, dtype: str) -> float:
        """Dense peak for GEMM operands of a dtype; float32 runs as tf32 only where a script asks, so it does not here."""
        peaks = self.gpu.peak_flops
        for name in (dtype, "bfloat16", "float16"):
            if name in peaks:
                return peaks[name]
        return max(peaks.values())

    def elements_per_s(self, per_sm: float) -> float:
        """Rate of the whole GPU."""
        return per_sm * self.gpu.num_sms

    def gemm_seconds(self, *, batch: int, m: int, n: int, k: int, dtype: str, nbytes: float) -> float:
        """Time of a (batched) GEMM: power-limited when large, wave-quantised when small, HBM-bound when thin."""
        peak = self.peak_flops(dtype)
        flops = 2.0 * batch * m * n * k
        if not flops:
            return self.hbm_seconds(nbytes, self.eff.batched_gemm)
        ragged = max(
            _tile_utilisation(batch=batch, m=m, n=n, tile=tile, num_sms=self.gpu.num_sms) * quality
            for tile, quality in _TILES
        )
        efficiency = min(self.eff.gemm, self.eff.gemm_burst * ragged * k / (k + _K_RAMP))
        return max(flops / (peak * efficiency), self.hbm_seconds(nbytes, self.eff.batched_gemm))


_TILES = (
    ((128, 256), 1.0),
    ((256, 128), 1.0),
    ((128, 128), 0.95),
    ((64, 128), 0.8),
    ((128, 64), 0.8),
    ((64, 64), 0.6),
)
"""Output tiles cuBLAS chooses from, with the fraction of tensor-core peak each can reach."""
_K_RAMP = 160
"""Elements of K that the prologue and epilogue of a tile cost."""
_SPLIT_K_GAIN = 0.5
"""What split-K recovers of the SMs that a GEMM with too few tiles leaves idle."""


def _tile_utilisation(*, batch: int, m: int, n: int, tile: tuple[int, int], num_sms: int) -> float:
    rows, cols = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    inside = (m * n) / (rows * tile[0] * cols * tile[1])
    tiles = batch * rows * cols
    waves = tiles / num_sms
    full = waves / math.ceil(waves)
    if waves < 1:
        full += (1 - full) * _SPLIT_K_GAIN
    return inside * full
