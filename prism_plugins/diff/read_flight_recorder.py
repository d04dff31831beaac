"""Reads dumps of PyTorch's flight recorder (``torch._C._distributed_c10d._dump_nccl_trace``): which collectives ran.

The dump is a pickle. Only plain containers and numbers are accepted: a pickle that wants to import anything is refused
before it does.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

from prism_plugins.diff.real import OpKey, OpTotal, RealRank, RealRun
from prism_plugins.emit.flight_recorder import MESSAGE
from prism_plugins.errors import FileFormatError
from prism_plugins.files import open_regular, read_regular

_MAX_BYTES = 512 << 20
_KINDS = {
    "_all_gather_base": "all_gather", "_allgather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_coalesced": "all_reduce", "all_to_all": "all_to_all", "alltoall_base": "all_to_all",
}  # fmt: skip


def looks_like_dump(path: Path) -> bool:
    """Whether a file begins like a pickle, or is a JSON dump of the recorder."""
    with open_regular(path) as file:
        head = file.read(256)
    return (
        head[:1] == b"\x80"
        or (head.lstrip()[:1] == b"{" and b'"entries"' in head)
        or b'"nccl_version"' in head
    )


def read_flight_recorder(path: Path) -> RealRun:
    """Read a dump, or a folder with one a rank. Calls are totals over the recorder's buffer, not of one iteration.

    Raises :class:`FileFormatError` for anything else.
    """
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    ranks = []
    timed = False
    for index, file in enumerate(files):
        entries = _entries(file)
        calls: dict[OpKey, int] = {}
        ms: dict[OpKey, float] = {}
        for entry in entries:
            key = _key(entry)
            duration = entry.get("duration_ms")
            timed |= isinstance(duration, (int, float))
            calls[key] = calls.get(key, 0) + 1
            ms[key] = ms.get(key, 0.0) + (float(duration) if isinstance(duration, (int, float)) else 0.0)
        ops = {(key,): OpTotal(calls=calls[key], ms=ms[key]) for key in calls}
        ranks.append(RealRank(rank=_rank_of(file, index), iterations=0, iteration_ms=0.0, ops=ops))
    return RealRun(source=f"flight recorder's dump {path}", ranks=tuple(ranks), has_durations=timed)


def _key(entry: dict) -> OpKey:
    group = entry.get("process_group")
    desc = str(group[1]) if isinstance(group, (list, tuple)) and len(group) > 1 else ""
    name = str(entry.get("profiling_name", "")).rpartition(":")[2].partition(" ")[0]
    sizes = [*_sizes(entry.get("input_sizes")), *_sizes(entry.get("output_sizes"))]
    desc = desc.removesuffix(MESSAGE)  # prism's own dumps
    return OpKey(_KINDS.get(name, name), ((max(sizes, default=0),),), desc or "unnamed group")


def _sizes(value: Any) -> list[int]:
    """Elements of each tensor."""
    found = []
    for shape in value if isinstance(value, (list, tuple)) else ():
        elements = 1
        for size in shape if isinstance(shape, (list, tuple)) else ():
            elements *= size if isinstance(size, int) else 0
        found.append(elements)
    return found


def _rank_of(path: Path, index: int) -> int:
    """By the number that ends the file's name (``nccl_trace_rank_3``)."""
    digits = path.stem[len(path.stem.rstrip("0123456789")) :]
    return int(digits) if digits and len(digits) < 9 else index


def _check_pickle(data: bytes) -> None:
    """Refuse a damaged pickle that would take far more memory than it is long: its memo is an array that one number grows."""
    for opcode, argument, _ in pickletools.genops(data):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"entry {argument} of a memo in {len(data)} bytes")


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _entries(path: Path) -> list[dict]:
    data = read_regular(path, max_bytes=_MAX_BYTES)
    try:
        if data[:1] == b"\x80":
            _check_pickle(data)
            dump = _Plain(io.BytesIO(data)).load()
        else:
            dump = json.loads(data)
    except Exception as error:  # a pickle can raise anything
        raise FileFormatError(f"{path} is not a flight recorder's dump: {error}") from None
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FileFormatError(f"{path} is not a flight recorder's dump (it has no entries)")
    return entries
