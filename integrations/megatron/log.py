"""Megatron's log lines: caught as they are printed, and written again at target scale.

A line is rewritten field by field (Megatron separates them by ``|``). Times, throughput and memory become the
predicted ones; what training would compute (losses, norms) is marked with ``*`` as synthesized; counters and the
learning rate stay. Lines are rewritten in the conductor, without Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from prism_plugins.integration import SliceContext
from prism_plugins.integration.log_lines import (
    NOT_PREDICTED,
    SYNTHESIZED_MARK,
    TIMESTAMP,
    PredictedClock,
    holds_rank,
    tap_stdout,
)
from prism_plugins.program.prediction import ClassMemory, Prediction

ITERATION_LINE = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|.*elapsed time per iteration")
MEMORY_LINE = re.compile(r"^\[Rank (\d+)\] .*memory \(MB\) \|")
EXACT_FIELDS = (
    "iteration",
    "consumed samples",
    "skipped samples",
    "learning rate",
    "global batch size",
    "loss scale",
    "number of skipped iterations",
    "number of nan iterations",
)
"""Fields of an iteration line that do not depend on the model's values or the machine."""


def is_log_line(line: str) -> bool:
    """Whether Megatron prints this line once per iteration (training or memory)."""
    return bool(ITERATION_LINE.search(line) or MEMORY_LINE.search(line))


def tap_log(context: SliceContext) -> None:
    """Report the log lines that the script prints, whatever prints them; the output itself is unchanged."""
    tap_stdout(context, is_log_line)


def rewrite_lines(lines: Sequence[str], prediction: Prediction) -> list[str]:
    """The lines as the target job would print them. A line of unknown form is kept as it is."""
    clock = PredictedClock(prediction.iteration_time_ms)
    rewritten = []
    for line in lines:
        memory = MEMORY_LINE.match(line)
        iteration = ITERATION_LINE.search(line)
        if memory:
            rewritten.append(_memory_line(line, int(memory.group(1)), prediction))
        elif iteration:
            rewritten.append(clock.stamp(_iteration_line(line, prediction), int(iteration.group(1))))
        else:
            rewritten.append(line)
    return rewritten


def _iteration_line(line: str, prediction: Prediction) -> str:
    return "|".join(_iteration_field(field, prediction) for field in line.split("|"))


def _iteration_field(field: str, prediction: Prediction) -> str:
    name, colon, value = field.rpartition(":")
    name = name.strip()
    if not colon or not name or TIMESTAMP.search(field):
        return field
    if name.startswith("elapsed time per iteration"):
        return _with_value(field, f"{prediction.iteration_time_ms:.1f}")
    if name.startswith("throughput per GPU"):
        known = prediction.tflops_per_gpu
        return _with_value(field, NOT_PREDICTED if known is None else f"{known:.1f}")
    if name.startswith("tokens per second per GPU") or name.startswith("tokens/s/GPU"):
        known = prediction.tokens_per_s_per_gpu
        return _with_value(field, NOT_PREDICTED if known is None else f"{known:.1f}")
    if name.startswith(("energy per GPU", "power per GPU")):
        return _with_value(field, NOT_PREDICTED)
    if name.startswith(EXACT_FIELDS):
        return field
    return _with_value(field, f"{value.strip()}{SYNTHESIZED_MARK}")


def _memory_line(line: str, rank: int, prediction: Prediction) -> str:
    memory = next((m for m in prediction.memory if holds_rank(m.ranks, rank)), None)
    if memory is None:
        return line
    return "|".join(_memory_field(field, memory) for field in line.split("|"))


def _memory_field(field: str, memory: ClassMemory) -> str:
    name = field.partition(":")[0].strip()
    nbytes = {
        "allocated": memory.allocated_bytes_end,
        "max allocated": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "max reserved": memory.peak_reserved_bytes,
        "total device memory used": memory.device_used_bytes,
    }.get(name)
    return field if nbytes is None else _with_value(field, f"{nbytes / 2**20:.2f}")


def _with_value(field: str, value: str) -> str:
    """The field with its value replaced, spaces around it kept."""
    head, _, tail = field.rpartition(":")
    trailing = tail[len(tail.rstrip()) :]
    return f"{head}: {value}{trailing}"
