"""What makes single ranks slower than their class."""

from __future__ import annotations

import msgspec
import numpy as np


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on the kernels of single ranks; 1 for all others."""

    slow_ranks: dict[int, float] = {}
    """Rank → how many times as long its kernels last."""

    def factor(self, rank: int) -> float:
        """Of one rank."""
        return self.slow_ranks.get(rank, 1.0)

    def labels(self, num_ranks: int) -> np.ndarray:
        """int64 per rank: equal for ranks with equal factors."""
        factors = np.ones(num_ranks)
        for rank, factor in self.slow_ranks.items():
            factors[rank] = factor
        return np.unique(factors, return_inverse=True)[1].reshape(-1).astype(np.int64)
