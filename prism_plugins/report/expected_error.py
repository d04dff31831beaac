"""How far the iteration time may be off: the measured errors of what priced it, weighted by time.

Errors of single ops partly cancel in a sum; adding their medians' magnitudes, as here, does not assume that they do.
"""

from __future__ import annotations

import numpy as np

from prism_plugins.costs.cluster import Host
from prism_plugins.costs.families import family_of
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.spans import DeviceSpans, SpanKind
from prism_plugins.host_speed import BUSY
from prism_plugins.program.model import Program
from prism_plugins.program.prediction import Breakdown, ExpectedError

BETWEEN_GPUS = 0.02
"""Of a measured op: one job took 2100, 2138 and 2139 ms on three H200s (docs/accuracy.md)."""
COLLECTIVES = 0.087
"""Median error of the NCCL model over 562 published and own points (docs/accuracy.md, scripts/check_collectives.py)."""
MAX_UNKNOWN_SHARE = 0.3
HOST_BOUND_SHARE = 0.1


def expected_error(
    view: JobView, program: Program, spans: DeviceSpans, breakdown: Breakdown
) -> ExpectedError:
    """The expected error of a job's iteration time, from the slowest rank's."""
    calibration = getattr(view.costs, "calibration", None)
    costs = view.costs.in_state_of(program.signatures)
    kernels = spans.kind != SpanKind.COMMUNICATION
    refs = program.events["ref"][spans.row[kernels]]
    length = np.bincount(
        refs, weights=(spans.end_ns - spans.transfer_start_ns)[kernels], minlength=len(program.signatures)
    )
    known_ns = weighted = unknown_ns = scaled_ns = 0.0
    for ref in np.flatnonzero(length).tolist():
        signature = program.signatures[ref]
        price = costs.price_op(signature)
        family = family_of(signature.op) or ""
        error: float | None = None
        if price.provenance == "measured":
            error = BETWEEN_GPUS
        elif price.provenance == "interpolated" and calibration is not None and family in calibration.errors:
            error = calibration.errors[family].median
        scaled_ns += float(length[ref]) * (price.provenance == "scaled")
        if error is None:
            unknown_ns += float(length[ref])
        else:
            known_ns += float(length[ref])
            weighted += error * float(length[ref])
    total = known_ns + unknown_ns
    if not total:
        return ExpectedError(basis="no device time")
    parts = breakdown.compute + breakdown.optimizer + breakdown.exposed_communication + breakdown.host
    host_share = breakdown.host / parts if parts else 0.0
    cluster = getattr(view.costs, "cluster", None)
    host = cluster.host if cluster is not None else Host()
    if host_share > HOST_BOUND_SHARE:
        busy = ", which was busy" if host.stretch > BUSY else ""
        spread = f" (±{100 * host.spread:.0f} % on this machine{busy})" if host.measured_in_slices else ""
        return ExpectedError(
            basis=f"{100 * host_share:.0f} % of the slowest rank's time is the host's{spread}, and hosts of one kind differ "
            "by 1.7: measure yours (prism calibrate --host)"
        )
    if unknown_ns > MAX_UNKNOWN_SHARE * total:
        gpu = view.gpu.name
        why = (
            f"op times are scaled to {gpu} from another GPU and were never compared with a real one"
            if scaled_ns > 0.5 * unknown_ns
            else f"{100 * unknown_ns / total:.0f} % of the compute time has formulas only (prism calibrate measures it)"
        )
        return ExpectedError(basis=why)
    communication = breakdown.exposed_communication
    computing = breakdown.compute + breakdown.optimizer
    fraction = (
        weighted / known_ns * computing + COLLECTIVES * communication + host.spread * breakdown.host
    ) / parts
    return ExpectedError(
        fraction=fraction,
        basis="median errors of ops and collectives and the spread of the host's times, weighted by their time"
        + (f"; {100 * unknown_ns / total:.0f} % of the compute time has none" if unknown_ns else ""),
    )
