"""The ops that take most of a rank's device time, and where they stand on the GPU's roofline."""

from __future__ import annotations

import msgspec
import numpy as np

from prism_plugins.costs.base import CostModel
from prism_plugins.costs.families import family_of
from prism_plugins.emit.spans import DeviceSpans, SpanKind
from prism_plugins.emit.trace_names import op_name
from prism_plugins.program.model import OpSignature, Program


class OpUse(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct op in an iteration of one rank."""

    name: str
    family: str
    shapes: str
    dtype: str
    calls: int
    total_ms: float
    share: float
    """Of the rank's kernel time."""
    mean_us: float
    flops: float
    """Of one call."""
    bytes: float
    """HBM traffic of one call."""
    rule: str
    provenance: str

    @property
    def intensity(self) -> float:
        """FLOP per byte of HBM traffic; 0 where there is none."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def tflops(self) -> float:
        """TFLOP/s it reaches."""
        return self.flops / (self.mean_us * 1e6) if self.mean_us else 0.0

    @property
    def gb_per_s(self) -> float:
        """GB/s of HBM it moves."""
        return self.bytes / (self.mean_us * 1e3) if self.mean_us else 0.0


def op_uses(program: Program, spans: DeviceSpans, costs: CostModel) -> list[OpUse]:
    """All distinct ops of a program, the one with most device time first."""
    kernels = spans.kind != SpanKind.COMMUNICATION
    refs = program.events["ref"][spans.row[kernels]]
    length = (spans.end_ns - spans.transfer_start_ns)[kernels]
    n = len(program.signatures)
    total, calls = np.bincount(refs, weights=length, minlength=n), np.bincount(refs, minlength=n)
    everything = float(total.sum()) or 1.0
    model = costs.in_state_of(program.signatures)
    uses = []
    for ref in np.argsort(-total).tolist():
        if not calls[ref]:
            continue
        signature = program.signatures[ref]
        price = model.price_op(signature)
        tensors = (*signature.inputs, *signature.outputs)
        uses.append(
            OpUse(
                name=op_name(signature),
                family="fused" if signature.op == "prism::fused" else family_of(signature.op) or "other",
                shapes=shapes_text(signature),
                dtype=tensors[0].dtype if tensors else "",
                calls=int(calls[ref]),
                total_ms=float(total[ref]) / 1e6,
                share=float(total[ref]) / everything,
                mean_us=float(total[ref]) / int(calls[ref]) / 1e3,
                flops=price.flops,
                bytes=price.bytes,
                rule=price.rule,
                provenance=price.provenance,
            )
        )
    return uses


def shapes_text(signature: OpSignature, limit: int = 3) -> str:
    """``4096×12288 · 12288×3072``, cut after a few tensors."""
    shown = ["×".join(map(str, tensor.shape)) or "scalar" for tensor in signature.inputs[:limit]]
    more = len(signature.inputs) - limit
    return " · ".join(shown) + (f" · +{more}" if more > 0 else "")
