"""Reads what nccl-tests print (github.com/NVIDIA/nccl-tests)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from prism_plugins.costs.nccl.measured import CollectivePoint, problem_of
from prism_plugins.errors import PrismError
from prism_plugins.files import read_regular

PROGRAMS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "gather_perf": "gather",
    "scatter_perf": "scatter",
    "sendrecv_perf": "p2p",
}
_RANK = re.compile(r"#\s+Rank\s+\d+\s.*\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*?)\s*$")
_TAG = re.compile(r"^(\[[\d,]+\](<\w+>)?:?\s*)+")
_COLUMNS_FROM_RIGHT = 8
"""time, algbw, busbw, #wrong: out-of-place, then in-place."""
_MAX_BYTES = 16 << 20


class NcclTests(msgspec.Struct, frozen=True, kw_only=True):
    """What an output says."""

    gpu: str
    """Name of the first GPU; empty when the output does not list ranks."""
    points: list[CollectivePoint]


def read_nccl_tests(path: str | Path, *, kind: str = "") -> NcclTests:
    """Read an output file.

    Raises:
        PrismError: it cannot be read, or as :func:`parse_nccl_tests`.
    """
    text = read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8", "replace")
    return parse_nccl_tests(text, source=str(path), kind=kind)


def parse_nccl_tests(text: str, *, source: str, kind: str = "") -> NcclTests:
    """The points of an output; in-place times for all_reduce, reduce and broadcast, as torch calls them, else out-of-place.

    Args:
        text: What a run of one nccl-test printed, mpirun's line tags included.
        source: Names it in errors.
        kind: The collective, where the output does not name the program.

    Raises:
        PrismError: no program or table, a table without the columns of times, an error of NCCL, wrong results, ranks that
            are not listed. Names the line.
    """
    lines = [_TAG.sub("", line.rstrip()) for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        if "Test NCCL failure" in line or "Test CUDA failure" in line or "Test failure" in line:
            raise PrismError(f"{source}, line {number}: the test failed: {line.strip()[:200]}")
    kind = kind or _program(lines, source)
    hosts = [match for line in lines if (match := _RANK.match(line))]
    if len(hosts) < 2:
        raise PrismError(f"{source}: fewer than two '# Rank' lines; the group size is not known")
    points = []
    header = ""
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if line.startswith("#"):
            if "size" in words and "count" in words:
                header = line
                _check_header(words, source, number)
            continue
        if not words or not words[0].isdigit():
            continue
        if not header:
            raise PrismError(
                f"{source}, line {number}: figures before any header with the columns size and time"
            )
        points.append(_point(words, kind, hosts, source=source, number=number))
    if not points:
        raise PrismError(f"{source}: no line with figures; is this the output of an nccl-test?")
    return NcclTests(gpu=hosts[0][2], points=points)


def _program(lines: list[str], source: str) -> str:
    named = {kind for line in lines for program, kind in PROGRAMS.items() if re.search(rf"\b{program}", line)}
    if len(named) == 1:
        return named.pop()
    what = f"several programs ({', '.join(sorted(named))})" if named else "no program such as all_reduce_perf"
    raise PrismError(f"{source} names {what}; say which collective it is: --collective all_reduce")


def _check_header(words: list[str], source: str, number: int) -> None:
    missing = [column for column in ("time", "algbw", "busbw") if words.count(column) < 2]
    if missing:
        raise PrismError(
            f"{source}, line {number}: the table lacks the column {missing[0]!r} (needed for out-of-place and in-place)"
        )


def _point(
    words: list[str], kind: str, hosts: list[re.Match[str]], *, source: str, number: int
) -> CollectivePoint:
    where = f"{source}, line {number}"
    if len(words) < _COLUMNS_FROM_RIGHT + 3:
        raise PrismError(f"{where}: {len(words)} columns, the header has more; the line is cut")
    out_of_place, in_place = words[-8:-4], words[-4:]
    chosen = (
        in_place
        if kind in ("all_reduce", "reduce", "broadcast") and _is_number(in_place[0])
        else out_of_place
    )
    if not _is_number(chosen[0]):
        raise PrismError(f"{where}: no time in the column 'time' ({chosen[0][:20]!r})")
    wrong = chosen[3]
    if _is_number(wrong) and float(wrong) >= 1:
        raise PrismError(f"{where}: {wrong} wrong results; these figures are of no use")
    point = CollectivePoint(
        kind=kind,
        gpus=2 if kind == "p2p" else len(hosts),
        nodes=1 if kind == "p2p" else len({match[1] for match in hosts}),
        nbytes=int(words[0]),
        us=float(chosen[0]),
    )
    if problem := problem_of(point):
        raise PrismError(f"{where}: {problem}")
    return point


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
