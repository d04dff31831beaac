"""The interface of a cost model: prices one signature at a time; the engine caches by signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from prism_plugins.program.model import CommSignature, OpSignature

if TYPE_CHECKING:
    from prism_plugins.program.job import JobPrograms
    from prism_plugins.program.prediction import Finding


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What one occurrence of a signature costs on the target cluster."""

    duration_ns: float
    """Time on its stream."""
    rule: str
    """Which rule priced it, e.g. ``roofline/gemm``, ``measured``, ``nccl/Ring/Simple``."""
    provenance: str
    """``measured``, ``interpolated`` (between measured ops), ``scaled`` (from another GPU), ``modelled``, ``free``
    (launches no kernel) or ``unpriced``."""
    host_ns: float = 0.0
    """Host time to issue it (framework and launch)."""
    flops: float = 0.0
    bytes: float = 0.0
    """Device-memory traffic (compute) or bytes on the wire of the busiest link (communication)."""
    channels: int = 0
    """Of a collective: NCCL channels, each of which holds an SM."""
    link: str = ""
    """Of a collective: the link that limits it, ``gpu`` (NVLink, PCIe) or ``nic``."""
    link_share: float = 0.0
    """Share of that link's rate that it takes on average; two at once that ask for more than 1 slow each other down."""


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """What compute and collectives share on one GPU."""

    num_sms: int
    hbm_bytes_per_s: float
    """What HBM gives to all together, bytes/s."""
    streams_share: bool = True
    """Kernels of several streams slow each other down; False where their durations were measured side by side."""
    launch_queue: int = 0
    """Kernels that a GPU takes in advance: the host waits for room to launch more. 0: it never waits."""


class CostModel(Protocol):
    """Prices ops and communication on one described cluster."""

    name: str
    """For reports: model, cluster, version of the data behind it."""
    interference: Interference | None
    """None: collectives and compute do not slow each other down."""

    def price_op(self, signature: OpSignature) -> Price:
        """Price a device op. Never raises for an unknown op: provenance is then ``unpriced`` and the duration a
        memory-bound estimate, never zero."""
        ...

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price a collective or p2p call of ``rank`` in a group of these global ranks, from the moment the last
        member arrived. For send/recv ``ranks`` is the pair (sender, receiver)."""
        ...

    def assumptions(self) -> tuple[str, ...]:
        """What this model assumes, one line each, for the report."""
        ...

    def settle(self, job: JobPrograms) -> None:
        """Find the clocks at which the GPUs run this job. Called before a simulation."""
        ...

    def in_state_of(self, signatures: list[OpSignature]) -> CostModel:
        """The model at the clocks of the ranks whose programs have this table of signatures."""
        ...

    def findings(self) -> tuple[Finding, ...]:
        """What the user must know about the data behind the prices."""
        ...


class SteadyClock:
    """For models that keep one clock whatever a job does."""

    def settle(self, job: JobPrograms) -> None:
        """Nothing changes."""

    def in_state_of(self, signatures: list[OpSignature]) -> CostModel:
        """The model itself."""
        del signatures
        return self  # type: ignore[return-value]

    def findings(self) -> tuple[Finding, ...]:
        """None."""
        return ()
