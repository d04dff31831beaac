"""The parallel layout of the target world and its rank arithmetic.

Every question about ranks is answered by one reshaped grid (``arange(world).reshape(...)``), never by stride
formulas. Megatron's order string lists dimensions from the fastest to the slowest varying: ``tp-cp-ep-dp-pp``
means that neighbouring ranks differ in tp. Attention and dense layers use the dense grid (tp, cp, dp, pp);
experts use the expert grid (etp, ep, edp, pp) over the same ranks.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from prism_plugins.errors import PrismError


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parallel dimensions and the framework's rank order."""

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    """Virtual pipeline chunks per stage; 1 when not interleaved."""
    order: str = "tp-cp-ep-dp-pp"
    num_microbatches: int = 1

    def validate(self) -> None:
        """Raise :class:`PrismError` unless the sizes multiply to the world size on both grids."""
        names = self.order.split("-")
        if len(set(names)) != len(names) or not set(names) <= {"tp", "cp", "ep", "dp", "pp"}:
            raise PrismError(f"rank order {self.order!r} must name each of tp, cp, ep, dp and pp once")
        for name in ("world_size", "tp", "cp", "pp", "dp", "ep", "etp", "vpp"):
            if getattr(self, name) < 1:
                raise PrismError(f"layout has {name}={getattr(self, name)}; every size is at least 1")
            if getattr(self, name) > 1 and name in ("tp", "cp", "pp", "dp", "ep") and name not in names:
                raise PrismError(f"rank order {self.order!r} lacks {name}, which is {getattr(self, name)}")
        dense = self.tp * self.cp * self.dp * self.pp
        if dense != self.world_size:
            raise PrismError(
                f"layout tp={self.tp} cp={self.cp} dp={self.dp} pp={self.pp} covers {dense} ranks, "
                f"not the world size {self.world_size}"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise PrismError(
                f"expert layout etp={self.etp} ep={self.ep} pp={self.pp} does not divide the world size {self.world_size}"
            )

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def sizes(self, *, expert: bool = False) -> dict[str, int]:
        """Dimension sizes of the dense or of the expert grid, fastest varying first."""
        if expert:
            size = {"tp": self.etp, "ep": self.ep, "dp": self.edp, "pp": self.pp, "cp": 1}
        else:
            size = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": 1}
        return {name: size[name] for name in self.order.split("-")}

    def grid(self, *, expert: bool = False) -> np.ndarray:
        """Ranks as an array with one axis per dimension, slowest varying first."""
        return _grid(tuple(reversed(self.sizes(expert=expert).values())))

    def coords(self, rank: int, *, expert: bool = False) -> dict[str, int]:
        """Coordinates of a rank, by dimension name."""
        sizes = self.sizes(expert=expert)
        index = np.unravel_index(rank, tuple(reversed(sizes.values())))
        return {name: int(i) for name, i in zip(reversed(sizes), index, strict=True)}

    def rank_of(self, coords: dict[str, int], *, expert: bool = False) -> int:
        """The rank at these coordinates."""
        sizes = self.sizes(expert=expert)
        return int(
            np.ravel_multi_index(
                tuple(coords[name] for name in reversed(sizes)), tuple(reversed(sizes.values()))
            )
        )


@functools.lru_cache(maxsize=64)
def _grid(shape: tuple[int, ...]) -> np.ndarray:
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    grid.flags.writeable = False
    return grid
