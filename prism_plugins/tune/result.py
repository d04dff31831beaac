"""tune.json: what a search found. Written atomically after every step, so that a search that was stopped goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.integration.tuning import Value
from prism_plugins.options import Job
from prism_plugins.program.model import SCHEMA
from prism_plugins.rundir import read_json, write_json
from prism_plugins.tune.compose import Estimate


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was composed, and perhaps emulated."""

    knobs: dict[str, Value]
    arguments: tuple[str, ...]
    """To paste in place of the launch's own; ``(drop --flag)`` names one to take out."""
    bound_ms: float
    """No emulation is faster."""
    bound_bytes: int = 0
    """None needs less memory."""
    composed: Estimate | None = None
    emulated: Estimate | None = None
    verified: Estimate | None = None
    """From slices on a real GPU (``--verify``)."""
    unverified: str = ""
    """Why these came to nothing."""
    run: str = ""
    """Run directory of the emulation."""
    tokens_per_s_per_gpu: float | None = None
    failed: str = ""
    """Why its emulation did not come to a prediction."""

    @property
    def best(self) -> Estimate | None:
        """The emulated estimate where there is one."""
        return self.emulated or self.composed


class Counts(msgspec.Struct, kw_only=True):
    """What became of the points of the space."""

    points: int = 0
    illegal: dict[str, int] = {}
    """By reason, an example each."""
    legal: int = 0
    judged: int = 0
    """Of the legal ones, how many the framework's own validation was asked about."""
    too_big_by_bound: int = 0
    slower_by_bound: int = 0
    slower_by_layers: int = 0
    """The work of their layers, as probed, takes longer than the best composed layout."""
    composed: int = 0
    too_big: int = 0
    """Of the composed ones."""
    emulated: int = 0
    left: int = 0
    """Not looked at when the search ended."""


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that comes closest to fitting."""

    knobs: dict[str, Value]
    memory_bytes: int
    source: str
    """``composed``, or ``bound``: it needs at least that."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The best composed layout where something else is as it is not in the launch."""

    what: str
    """``gpus``, ``nic`` (factor on the rate of the NICs) or ``sequence`` (tokens)."""
    value: float
    legal: int
    best: Candidate | None = None
    note: str = ""
    """Why there is none."""


class TuneResult(msgspec.Struct, kw_only=True):
    """The whole file."""

    schema: int = SCHEMA
    status: str = "running"
    """``running``, ``done``, ``budget over`` or ``interrupted``."""
    job: Job
    chosen: dict[str, tuple[str, ...]] = {}
    cluster: str
    capacity_bytes: int
    own: Candidate | None = None
    """The user's launch."""
    candidates: tuple[Candidate, ...] = ()
    """Those that fit: the fastest emulated one, then all others by time; all by time where composed ones are faster than it by
    more than their error."""
    counts: Counts = msgspec.field(default_factory=Counts)
    closest_miss: Miss | None = None
    composition_error: float | None = None
    """Largest |composed / emulated - 1| of iteration times over the emulated layouts."""
    sensitivity: tuple[Variant, ...] = ()
    proven: bool = False
    """No layout left has a bound, or a composed time less that error, below the best emulated one."""
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    host_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Host time of an op, a view and a collective that all layouts share; zeros where each has those of its own slices."""


class TuneDir:
    """Paths of one search."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result = path / "tune.json"
        self.cluster = path / "cluster.toml"
        self.runs = path / "runs"
        self.page = path / "tune.html"

    def read(self) -> TuneResult:
        """tune.json. Raises :class:`PrismError` where there is none, :class:`FileFormatError` for a foreign one."""
        if not self.result.exists():
            raise PrismError(f"{self.path} is not the directory of a search (it has no tune.json)")
        return read_json(self.result, TuneResult)

    def write(self, result: TuneResult) -> None:
        """Write tune.json."""
        write_json(self.result, result)

    def claim(self, job: Job, chosen: dict[str, tuple[str, ...]]) -> TuneResult | None:
        """Make the directory, or take over that of an earlier start of the same search, whose state is returned.

        Raises :class:`PrismError` for one of another job, or a directory with something else in it.
        """
        if not self.path.exists():
            self.runs.mkdir(parents=True)
            return None
        if not self.path.is_dir():
            raise PrismError(f"{self.path} is a file; name a directory")
        if not self.result.exists():
            if any(p.name not in ("runs", "warm", "probes") for p in self.path.iterdir()):
                raise PrismError(
                    f"{self.path} is not empty and holds no search (no tune.json); nothing was written"
                )
            self.runs.mkdir(exist_ok=True)
            return None
        try:
            earlier = self.read()
        except FileFormatError as error:
            raise PrismError(f"{error}; name another directory, or remove it") from None
        if (earlier.job.argv, earlier.job.options.world_size) != (job.argv, job.options.world_size) or (
            earlier.job.options.cluster != job.options.cluster or earlier.chosen != chosen
        ):
            raise PrismError(f"{self.path} holds the search of another launch; name another directory")
        self.runs.mkdir(exist_ok=True)
        return earlier


def describe(knobs: Mapping[str, object]) -> str:
    """A layout in a few words: ``tp8 pp16 vpp2 mb2 sp recompute:full``, ``ZeRO-3 mb4 offload:optimizer bucket 5e+08``."""
    k = dict(knobs)
    if "zero" in k:
        sizes = [f"{name}{k[name]}" for name in ("tp", "pp") if k.get(name, 1) != 1]
        text = " ".join([f"ZeRO-{k['zero']}", *sizes, f"mb{k['micro_batch']}"])
        if k["offload"] != "none":
            text += f" offload:{k['offload']}"
        if k["zero"]:
            bucket = k["bucket"]
            text += f" bucket {bucket:.0e}" if isinstance(bucket, int) else f" bucket {bucket}"
            text += " overlap" if k["overlap"] else ""
        return text
    parts = [f"{name}{k[name]}" for name in ("tp", "cp", "ep", "etp", "pp", "vpp") if k.get(name, 1) != 1]
    text = " ".join(parts) or "data parallel only"
    if k.get("stages", "even") != "even":
        text += f" {k['stages']}"
    if "micro_batch" in k:
        text += f" mb{k['micro_batch']}"
    if k.get("sp"):
        text += " sp"
    if k.get("recompute", "none") != "none":
        text += f" recompute:{k['recompute']}"
    if k.get("order", "dp-pp") != "dp-pp":
        text += f" {k['order']}"
    if "optimizer" in k:
        text += f" {k['optimizer']}"
    return text
