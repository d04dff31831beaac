"""Outputs of a run: console summary, prediction.json, predicted.log, Kineto traces. See docs/architecture.md."""

from prism_plugins.emit.all import emit_all, write_traces
from prism_plugins.emit.job_view import JobView

__all__ = ["JobView", "emit_all", "write_traces"]
