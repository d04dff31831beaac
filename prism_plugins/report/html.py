"""``report.html``: one self-contained file, from ``report.html.j2``."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
import msgspec

from prism_plugins import __version__
from prism_plugins.costs.cluster import Cluster
from prism_plugins.emit.console import gib, milliseconds, tightest, verdict
from prism_plugins.emit.files import replaced_file
from prism_plugins.emit.job_view import JobView
from prism_plugins.emit.ranks import shorten_ranks
from prism_plugins.program.model import MemoryCategory
from prism_plugins.program.prediction import Prediction
from prism_plugins.report import svg
from prism_plugins.report.insight import Insight
from prism_plugins.report.memory_curves import memory_curve
from prism_plugins.report.ops import op_uses
from prism_plugins.report.schedule import schedule, stage_ranks
from prism_plugins.report.traffic import traffic_matrix

TOP_OPS = 24
SHOWN_ROWS = 8
"""Of tables with a row for each class; the others are folded away."""
MAX_MEMORY_CHARTS = 16
_PAIRS = (
    ("iteration", lambda p: p.iteration_time_ms, milliseconds),
    ("compute", lambda p: p.breakdown_ms.compute, milliseconds),
    ("optimizer", lambda p: p.breakdown_ms.optimizer, milliseconds),
    ("exposed communication", lambda p: p.breakdown_ms.exposed_communication, milliseconds),
    ("pipeline bubble", lambda p: p.breakdown_ms.bubble, milliseconds),
    ("host-bound", lambda p: p.breakdown_ms.host, milliseconds),
    ("tokens/s/GPU", lambda p: p.tokens_per_s_per_gpu, lambda x: f"{x:,.0f}"),
    ("TFLOP/s/GPU", lambda p: p.tflops_per_gpu, lambda x: f"{x:,.1f}"),
    ("MFU", lambda p: None if p.mfu is None else 100 * p.mfu, lambda x: f"{x:.1f} %"),
    ("device memory, tightest class", lambda p: _used(p), gib),
)  # fmt: skip


def write_report(
    path: Path,
    prediction: Prediction,
    *,
    title: str,
    view: JobView | None = None,
    insight: Insight | None = None,
    cluster: Cluster | None = None,
    others: Mapping[str, Prediction] | None = None,
) -> None:
    """Write the report, atomically.

    Args:
        title: What was run, for the heading.
        view, insight: The simulated job; without them (the job would not run) only what the prediction holds is shown.
        cluster: For the roofline.
        others: Predictions to show side by side, by name.

    Raises :class:`PrismError` when the place cannot be written.
    """
    with replaced_file(path) as file:
        file.write(
            render(
                prediction, title=title, view=view, insight=insight, cluster=cluster, others=others or {}
            ).encode("utf-8", "replace")
        )


def render(
    prediction: Prediction,
    *,
    title: str,
    view: JobView | None,
    insight: Insight | None,
    cluster: Cluster | None,
    others: Mapping[str, Prediction],
) -> str:
    """The report as text; arguments as those of :func:`write_report`."""
    charts = {}
    if view is not None and view.timeline is not None and insight is not None:
        charts = _charts(prediction, view, insight, cluster)
    return _template().render(
        p=prediction,
        title=title,
        version=__version__,
        verdict=verdict(prediction).plain,
        verdict_class=_verdict_class(prediction),
        tightest=tightest(prediction.memory) if prediction.memory else None,
        breakdown=_breakdown(prediction),
        categories=[str(c) for c in MemoryCategory],
        comparison=_comparison(prediction, others),
        shown_rows=SHOWN_ROWS,
        max_segments=svg.MAX_SEGMENTS,
        others_names=[prediction.cluster, *others],
        **charts,
    )


def _charts(prediction: Prediction, view: JobView, insight: Insight, cluster: Cluster | None) -> dict:
    total = view.timeline.iteration_time_ns
    layout = view.job.layout
    stages = schedule(insight.ranks)
    stage_of = [layout.coords(segment.rank)["pp"] for segment in insight.path.segments]
    program, _, spans = insight.ranks.of(insight.rank)
    ops = op_uses(program, spans, view.costs)
    curves = []
    ranks = stage_ranks(view)
    if len(ranks) > MAX_MEMORY_CHARTS:
        step = (len(ranks) - 1) / (MAX_MEMORY_CHARTS - 1)
        ranks = [ranks[round(i * step)] for i in range(MAX_MEMORY_CHARTS)]
    for rank in ranks:
        one, times, _ = insight.ranks.of(rank)
        curves.append((layout.coords(rank)["pp"], rank, memory_curve(one, times, total_ns=total)))
    top = max(
        (sum(values) for _, _, c in curves for values in zip(*c.by_category.values(), strict=True)), default=0
    )
    capacity = prediction.memory[0].capacity_bytes if prediction.memory else 0
    matrix = traffic_matrix(view, gpus_per_node=view.gpus_per_node)
    roofline = None
    if cluster is not None and "bfloat16" in cluster.gpu.peak_flops:
        roofline = svg.roofline_svg(
            ops[:TOP_OPS],
            peak_flops=cluster.gpu.peak_flops["bfloat16"],
            hbm_bytes_per_s=cluster.gpu.hbm_bytes_per_s,
        )
    return {
        "stages": stages,
        "pipeline": svg.pipeline_svg(stages, total),
        "path": insight.path,
        "path_chart": svg.path_svg(insight.path, stage_of, total, layout.pp),
        "memory_charts": [
            (stage, rank, svg.memory_svg(c, total_ns=total, top_bytes=top, capacity_bytes=capacity))
            for stage, rank, c in curves
        ],
        "used_categories": list(dict.fromkeys(name for _, _, c in curves for name in c.by_category)),
        "num_stages": layout.pp,
        "groups": insight.groups,
        "matrix": matrix,
        "matrix_chart": svg.matrix_svg(matrix),
        "ops": ops[:TOP_OPS],
        "ops_rest": ops[TOP_OPS:],
        "roofline": roofline,
        "gpu": view.gpu,
        "cluster": cluster,
    }  # fmt: skip


def _breakdown(p: Prediction) -> list[tuple[str, str, float, float]]:
    """(name, CSS class, ms, share)."""
    b = p.breakdown_ms
    parts = [
        ("compute", "compute", b.compute),
        ("optimizer", "opt", b.optimizer),
        ("exposed communication", "comm", b.exposed_communication),
        ("pipeline bubble", "bubble", b.bubble),
        ("host-bound", "host", b.host),
    ]
    total = sum(ms for _, _, ms in parts) or 1.0
    return [(name, css, ms, ms / total) for name, css, ms in parts]


def _verdict_class(p: Prediction) -> str:
    severities = {f.severity for f in p.findings if f.kind in ("oom", "audit") or f.severity == "error"}
    return "bad" if "error" in severities else "warn" if "warning" in severities else "good"


def _comparison(p: Prediction, others: Mapping[str, Prediction]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows of (quantity, [(value, ratio to the first)])."""
    rows = []
    for name, get, text in _PAIRS:
        values = [get(each) for each in (p, *others.values())]
        if values[0] is None:
            continue
        cells = [
            ("–", "") if value is None else (text(value), f"{value / values[0]:.3f}" if values[0] else "")
            for value in values
        ]
        rows.append((name, cells))
    return rows if others else []


def _used(p: Prediction) -> float | None:
    return tightest(p.memory).device_used_bytes if p.memory else None


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filters: dict[str, Callable] = {
        "gib": gib,
        "ms": milliseconds,
        "ranks": shorten_ranks,
        "percent": lambda x, digits=1: f"{100 * x:.{digits}f} %",
        "size": _size,
        "words": lambda text: str(text).replace("_", " "),
        "counts": lambda d: ", ".join(f"{name} {count:,}" for name, count in d.items()),
        "fields": lambda struct: msgspec.structs.asdict(struct),
    }  # fmt: skip
    environment.filters.update(filters)
    source = importlib.resources.files("prism_plugins.report").joinpath("report.html.j2").read_text("utf-8")
    return environment.from_string(source)


def _size(num_bytes: float) -> str:
    """Decimal bytes, as network figures are given."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"
