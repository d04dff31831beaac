"""A cost model with some prices changed: what an iteration would be if something cost less."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from prism_plugins.costs.base import CostModel, Interference, Price
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import CommSignature, OpSignature
from prism_plugins.program.prediction import Finding


class Altered:
    """A cost model with some prices changed."""

    def __init__(
        self,
        costs: CostModel,
        *,
        op: Callable[[OpSignature, Price], Price] = lambda _, price: price,
        comm: Callable[[tuple[int, ...], Price], Price] = lambda _, price: price,
    ) -> None:
        self.name = costs.name
        self.interference: Interference | None = getattr(costs, "interference", None)
        self._costs = costs
        self._op, self._comm = op, comm

    def price_op(self, signature: OpSignature) -> Price:
        """Price a device op."""
        return self._op(signature, self._costs.price_op(signature))

    def price_comm(self, comm: CommSignature, ranks: tuple[int, ...], rank: int) -> Price:
        """Price a collective or p2p call."""
        return self._comm(ranks, self._costs.price_comm(comm, ranks, rank))

    def in_state_of(self, signatures: list[OpSignature]) -> CostModel:
        """The altered model at the clocks of these ranks."""
        return Altered(self._costs.in_state_of(signatures), op=self._op, comm=self._comm)

    def settle(self, job: JobPrograms) -> None:
        """Clocks stay as the unchanged job settled."""

    def assumptions(self) -> tuple[str, ...]:
        """Those of the model."""
        return self._costs.assumptions()

    def findings(self) -> tuple[Finding, ...]:
        """Those of the model."""
        return self._costs.findings()


def without_host(costs: CostModel) -> Altered:
    """The model of a host that issues work in no time."""

    def free(_: object, price: Price) -> Price:
        return msgspec.structs.replace(price, host_ns=0.0)

    return Altered(costs, op=free, comm=free)
