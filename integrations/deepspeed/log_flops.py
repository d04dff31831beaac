"""The table of DeepSpeed's flops profiler at target scale: its latencies and rates are those of the predicted timers.

The profiler prints one table after each micro-batch of the profiled step, with what the timers ``fwd``, ``bwd`` and
``step`` measured since the step began. Its latencies of single modules are not predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prism_plugins.integration.log_lines import NOT_PREDICTED

_FIELD = re.compile(r"^(?P<label>\S[^:]*): +(?P<value>\S.*?)\s*$")
_MODULE = re.compile(r"[\d.]+ ?\w* ?s = [\d.]+% latency, [\d.]+ ?\w*FLOPS")
_AGGREGATED = re.compile(r"^(\s*fwd latency\s+- ).*")
_FACTOR = re.compile(r"= ([\d.]+) \* fwd flops")
_PREFIX = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_WIDTH = 72


class FlopsProfile:
    """One table, line by line."""

    def __init__(self, timers_ms: Mapping[str, tuple[float, ...]], *, microbatch: int) -> None:
        """``microbatch``: the table is printed after this one, counted from 0."""
        self._seconds = {
            name: sum(timers_ms[timer][: microbatch + 1]) / 1e3
            for name, timer in (("fwd", "fwd"), ("bwd", "bwd"), ("step", "step"))
            if timers_ms.get(timer)
        }
        if len(self._seconds) == 3:
            self._seconds["fwd+bwd"] = self._seconds["fwd"] + self._seconds["bwd"]
            self._seconds["iter"] = self._seconds["fwd+bwd"] + self._seconds["step"]
        self._read: dict[str, float] = {}

    def line(self, line: str) -> str:
        """The line as the target job would print it."""
        if _MODULE.search(line):
            return _MODULE.sub(f"latency {NOT_PREDICTED}", line)
        if aggregated := _AGGREGATED.match(line):
            return f"{aggregated.group(1)}{NOT_PREDICTED}"
        found = _FIELD.match(line)
        if not found:
            return line
        label, value = found.group("label"), found.group("value")
        new = self._value(label)
        if new is None:
            self._remember(label, value)
            return line
        return f"{label + ': ':<{_WIDTH}}{new:<8}"

    def _remember(self, label: str, value: str) -> None:
        if found := re.fullmatch(r"([\d.]+) ?([TGMKmu]?)", value):
            self._read[label] = float(found.group(1)) * _PREFIX[found.group(2)]

    def _value(self, label: str) -> str | None:
        """The predicted value of a field; None for one that does not depend on time."""
        if label.endswith(" latency") and "=" not in label:
            seconds = self._seconds.get(label.removesuffix(" latency"))
            return NOT_PREDICTED if seconds is None else quantity(seconds, "s")
        if "FLOPS per GPU =" in label:
            seconds = self._seconds.get(label.partition("FLOPS per GPU")[0].strip() or "iter")
            flops = self._read.get("fwd flops per GPU")
            factor = _FACTOR.search(label)
            if not seconds or flops is None:
                return NOT_PREDICTED
            return quantity(flops * (float(factor.group(1)) if factor else 1.0) / seconds, "FLOPS")
        if label == "samples/second":
            seconds = self._seconds.get("iter")
            samples = self._read.get("batch size per GPU", 0.0) * self._read.get("world size", 0.0)
            return f"{samples / seconds:.2f}" if seconds and samples else NOT_PREDICTED
        return None


def quantity(value: float, unit: str) -> str:
    """A number with a metric prefix and two decimals, as the profiler writes it: ``5.24 s``, ``3.23 GFLOPS``."""
    prefixes = [(p, m) for p, m in _PREFIX.items() if m >= 1e-6]
    prefix, magnitude = next(((p, m) for p, m in prefixes if value >= m), ("", 1.0))
    return f"{round(value / magnitude, 2):g} {prefix}{unit}"
