"""A calibration: what ops cost on a real GPU, measured by ``prism calibrate``, as one JSON file.

Times depend on the SM clock, and GPUs of this class are held at a power cap, so every figure says at which clock it
was seen and which share of it scales with the clock: at clock ``f`` it takes
``us * (compute_share * clock_mhz / f + 1 - compute_share)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from prism_plugins.costs.nccl.measured import CollectivePoint, merge_points, problem_of
from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import put_in_place, read_regular
from prism_plugins.program.model import OpSignature
from prism_plugins.program.slices import HostFigures

FORMAT = "prism-calibration"
SCHEMA = 1
"""Version of the calibration file. A reader refuses a larger number."""
_MAX_BYTES = 64 << 20
_MAX_US = 1e9


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one op costs."""

    signature: OpSignature
    us: float
    """Time on its stream, microseconds, at ``clock_mhz``: the mean of the measured blocks."""
    median_us: float = 0.0
    clock_mhz: float = 0.0
    """Mean SM clock while it was measured; 0 when it could not be read."""
    burst_clock_mhz: float = 0.0
    """SM clock in a short burst on a rested GPU, the highest the op reaches; 0 when unknown."""
    compute_share: float = 0.0
    """Share of ``us`` that scales with 1/clock, from how both vary between blocks; 0 to 1."""
    spread: float = 0.0
    """Interquartile range over the median of the measured blocks."""
    repetitions: int = 0
    power_w: float = 0.0
    """Board power while the op alone kept the GPU busy; 0 when that was not measured."""
    power_clock_mhz: float = 0.0
    """SM clock then: below the maximum when the power cap held it."""
    provenance: str = "measured"
    """``measured`` or ``scaled`` (by data-sheet ratios from another GPU's measurement)."""


class MixState(msgspec.Struct, frozen=True, kw_only=True):
    """A replayed mix of ops, at the clocks it ran at."""

    name: str
    clock_mhz: float
    """Time-weighted mean."""
    model_w: float
    """Power that the model gives it: where the limiter holds programs like it."""
    shares: dict[str, float]
    """Share of its time by op family."""


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    """Board power of a program: see :mod:`prism_plugins.costs.power`."""

    cap_w: float
    static_w: float
    """Of a GPU at full clocks with next to nothing to do, and the part of a busy GPU's power that does not depend on the
    clock."""
    exponent: float
    """Dynamic power scales with clock ** exponent."""
    max_clock_mhz: float
    mixes: tuple[MixState, ...] = ()
    """The replayed mixes."""
    family_w: dict[str, float] = {}
    """Dynamic power by op family at ``family_clock_mhz``: the mean of its measured ops."""
    family_clock_mhz: dict[str, float] = {}


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time of the issuing thread while the GPU's queue is never empty, microseconds."""

    op_us: float
    """Per kernel of an eager training step of small modules: Python, dispatcher, autograd, launch."""
    dispatch_us: float
    """Per bare aten op without autograd."""
    view_us: float
    comm_us: float = 0.0
    """Per c10d call; 0 when no NCCL group could be made."""
    h2d_bytes_per_s: float = 0.0
    """Large pinned copies; 0 without a GPU."""
    d2h_bytes_per_s: float = 0.0
    cpu: str = ""
    benchmark: HostFigures | None = None
    """What slices of a job are compared with."""


class FamilyError(msgspec.Struct, frozen=True, kw_only=True):
    """Leave-one-out error of the interpolation inside one family, as |predicted / measured - 1|."""

    count: int
    median: float
    p95: float
    num_near: int = 0
    """Of ``count``, those whose nearest neighbour is at most :data:`NEAR` away."""
    near_p95: float = 0.0
    """95th percentile of theirs."""


NEAR = 2.0
"""Doublings of size, summed over an op's dimensions, up to which a neighbour is near; the grids' own steps are one to two."""


class Calibration(msgspec.Struct, kw_only=True):
    """See the module docstring."""

    format: str = FORMAT
    schema: int = SCHEMA
    gpu: str
    """As torch.cuda.get_device_name reports it."""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    date: str = ""
    """ISO 8601, when it was measured."""
    clock_range_mhz: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest SM clock seen while figures were measured."""
    power: PowerModel | None = None
    host: HostCosts | None = None
    figures: list[Figure] = []
    collectives: list[CollectivePoint] = []
    not_measured: dict[str, int] = {}
    """Why signatures could not be measured, and how many."""
    errors: dict[str, FamilyError] = {}
    """Leave-one-out errors by family; of the shipped file."""


class _Header(msgspec.Struct):
    format: str = ""
    schema: int = 0


def signature_key(s: OpSignature) -> tuple:
    """What makes two signatures the same op at the same cost."""
    return (s.op, s.inputs, s.outputs, s.scalars, tuple(sorted(s.attrs.items())))


def read_calibration(path: str | Path) -> Calibration:
    """Read and check a calibration file.

    Raises:
        FileFormatError: missing, truncated, foreign, of a newer schema, or with figures that cannot be.
    """
    try:
        data = read_regular(path, max_bytes=_MAX_BYTES)
    except FileFormatError as error:
        raise FileFormatError(f"calibration {error}") from None
    return parse_calibration(data, source=str(path))


def parse_calibration(data: bytes, *, source: str) -> Calibration:
    """Decode and check; ``source`` names it in errors. Raises as :func:`read_calibration`."""
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise FileFormatError(
                f"calibration {source} is not a calibration file (format {header.format[:40]!r})"
            )
        if header.schema > SCHEMA:
            raise FileFormatError(
                f"calibration {source} has schema {header.schema}, this prism reads up to {SCHEMA}; "
                "update prism-plugins"
            )
        calibration = msgspec.json.decode(data, type=Calibration)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"calibration {source}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"calibration {source} is truncated or not JSON: {error}") from None
    _check(calibration, source)
    return calibration


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write to a temporary file and rename it. Raises PrismError when the place cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    lines = [msgspec.json.encode(figure) for figure in calibration.figures]
    head = msgspec.json.encode(msgspec.structs.replace(calibration, figures=[]))
    body = head.replace(b'"figures":[]', b'"figures":[\n' + b",\n".join(lines) + b"]", 1)
    try:
        temporary.write_bytes(body + b"\n")
        put_in_place(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PrismError(f"cannot write the calibration {path}: {error.strerror or error}") from error


def merge(calibrations: Sequence[Calibration]) -> Calibration:
    """One calibration of several of the same GPU; later ones win where both measured an op.

    Raises PrismError when they are of different GPUs.
    """
    names = list(dict.fromkeys(c.gpu for c in calibrations))
    if len(names) != 1:
        raise PrismError(f"calibrations of different GPUs do not merge: {', '.join(names)}")
    figures: dict[tuple, Figure] = {}
    for calibration in calibrations:
        for figure in calibration.figures:
            key = signature_key(figure.signature)
            known = figures.get(key)
            if known is not None and figure.power_w == 0.0:
                figure = msgspec.structs.replace(
                    figure, power_w=known.power_w, power_clock_mhz=known.power_clock_mhz
                )
            figures[key] = figure
    last = calibrations[-1]
    not_measured: dict[str, int] = {}
    for calibration in calibrations:
        for reason, count in calibration.not_measured.items():
            not_measured[reason] = not_measured.get(reason, 0) + count
    lows, highs = zip(*(c.clock_range_mhz for c in calibrations), strict=True)
    return msgspec.structs.replace(
        last,
        figures=list(figures.values()),
        collectives=merge_points(c.collectives for c in calibrations),
        clock_range_mhz=(min((x for x in lows if x > 0), default=0.0), max(highs)),
        power=next((c.power for c in reversed(calibrations) if c.power), None),
        host=next((c.host for c in reversed(calibrations) if c.host), None),
        not_measured=not_measured,
        errors={},
    )


def _check(calibration: Calibration, source: str) -> None:
    """Raise FileFormatError for values that no measurement gives."""

    def require(good: bool, what: str) -> None:
        if not good:
            raise FileFormatError(f"calibration {source}: {what}")

    require(bool(calibration.gpu), "it does not say which GPU was measured")
    for point in calibration.collectives:
        problem = problem_of(point)
        require(not problem, problem)
    for figure in calibration.figures:
        s = figure.signature
        require(0 < figure.us < _MAX_US, f"{s.op[:60]} takes {figure.us} us")
        require(0 <= figure.compute_share <= 1, f"{s.op[:60]} has compute_share {figure.compute_share}")
        for value in (
            figure.clock_mhz,
            figure.burst_clock_mhz,
            figure.power_w,
            figure.power_clock_mhz,
            figure.spread,
        ):
            require(0 <= value < 1e5, f"{s.op[:60]} has a clock, power or spread of {value}")
        problem = s.problem()
        require(not problem, problem)
    power = calibration.power
    if power is not None:
        require(
            0 < power.static_w < power.cap_w < 1e5, f"power cap {power.cap_w} W, static {power.static_w} W"
        )
        require(0 < power.max_clock_mhz < 1e5, f"maximum clock {power.max_clock_mhz} MHz")
        require(0 < power.exponent < 10, f"power exponent {power.exponent}")
        for mix in power.mixes:
            require(
                power.static_w < mix.model_w < 1e5 and 0 < mix.clock_mhz < 1e5,
                f"mix {mix.name[:60]} ran at {mix.model_w} W, {mix.clock_mhz} MHz",
            )
        require(
            power.family_w.keys() == power.family_clock_mhz.keys()
            and all(0 < x < 1e5 for x in (*power.family_w.values(), *power.family_clock_mhz.values())),
            "power by family",
        )
    host = calibration.host
    if host is not None:
        for name in ("op_us", "dispatch_us", "view_us", "comm_us"):
            require(0 <= getattr(host, name) < 1e6, f"host.{name} is {getattr(host, name)}")
        if host.benchmark is not None:
            dispatch, enqueue = host.benchmark.dispatch_us, host.benchmark.enqueue_us
            require(
                bool(dispatch)
                and all(0 < us < 1e6 for us in dispatch)
                and all(0 <= us < 1e6 for us in enqueue.values()),
                "host.benchmark has a time that cannot be",
            )
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
            require(0 <= getattr(host, name) < 1e13, f"host.{name} is {getattr(host, name)}")


def count_by_provenance(figures: Iterable[Figure]) -> dict[str, int]:
    """How many figures of each kind."""
    counts: dict[str, int] = {}
    for figure in figures:
        counts[figure.provenance] = counts.get(figure.provenance, 0) + 1
    return counts
