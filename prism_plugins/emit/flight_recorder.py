"""An iteration of virtual ranks as dumps of PyTorch's flight recorder, for its own analyzer (``torchfrtrace``).

The format is PyTorch's (``TORCH_NCCL_DUMP_ON_TIMEOUT``; read by ``torch.distributed.flight_recorder``): a pickle of plain
containers, strings and numbers a rank.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prism_plugins.emit.files import replaced_file
from prism_plugins.program.calls import P2P, phase_at
from prism_plugins.program.job import JobPrograms
from prism_plugins.program.model import CommSignature, GroupInfo, Program
from prism_plugins.simulate.compile import comm_ops

VERSION = "2.10"
"""Of the recorder's format: entries of coalesced collectives are recorded one by one from 2.7 on."""
PREFIX = "rank_"
MESSAGE = " message"
"""Ends the description of the groups of two that messages get."""
_NAMES = {
    "barrier": "all_reduce_barrier",
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
}
_DTYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip


def write_dumps(job: JobPrograms, ranks: Iterable[int], directory: Path) -> list[Path]:
    """One file a rank, ``rank_<R>``. The analyzer wants every member of every group.

    Raises :class:`PrismError` when the directory cannot be written.
    """
    from prism_plugins.program.infer import program_of

    names: dict[tuple[tuple[int, ...], str, int], str] = {}
    paths = []
    for rank in ranks:
        path = directory / f"{PREFIX}{rank}"
        with replaced_file(path) as file:
            pickle.dump(dump_of(program_of(job, rank), names), file, protocol=2)
        paths.append(path)
    return paths


def dump_of(program: Program, names: dict[tuple[tuple[int, ...], str, int], str]) -> dict[str, Any]:
    """The dump of one rank. ``names`` gives groups of equal members, description and ordinal the same name on all ranks.

    Messages are entries of a group of their sender and receiver, one for each direction: the analyzer takes whatever
    it finds in a group as a call of all of its members, and pairs entries by number.
    """
    seen: Counter[tuple[tuple[int, ...], str]] = Counter()
    groups: dict[str, GroupInfo] = {}
    uids = []
    for group in program.groups:
        key = (group.ranks, group.desc)
        uids.append(names.setdefault((*key, seen[key]), str(len(names))))
        seen[key] += 1
    entries = _entries(program, uids, groups)
    return {
        "version": VERSION,
        "pg_config": {
            uid: {"name": uid, "desc": group.desc, "ranks": str(list(group.ranks))}
            for uid, group in groups.items()
        },
        "pg_status": {},
        "entries": entries,
    }


def _entries(program: Program, uids: list[str], groups: dict[str, GroupInfo]) -> list[dict[str, Any]]:
    """Entries in issue order; fills in the groups they use."""
    ops = comm_ops(program)
    sequence: Counter[str] = Counter()
    entries: list[dict[str, Any]] = []
    for op in range(len(ops)):
        event = int(ops.event[op])
        together: dict[tuple[str, str], list[CommSignature]] = {}
        for i, part in enumerate(ops.parts(op)):
            comm = program.comms[part]
            uid, group, name = _place(comm, program, uids)
            groups[uid] = group
            # Coalesced collectives of a group are one entry; of messages, each is one.
            together.setdefault((uid, name if comm.kind not in P2P else f"{name}#{i}"), []).append(comm)
        for (uid, name), comms in together.items():
            sequence[uid] += 1
            is_p2p = comms[0].kind in P2P
            inputs, outputs = [_sizes(c)[0] for c in comms], [_sizes(c)[1] for c in comms]
            dtypes = [_DTYPES.get(c.dtype, c.dtype) for c in comms]
            entries.append(
                {
                    "record_id": len(entries),
                    "pg_id": comms[0].group,
                    "process_group": (uid, groups[uid].desc),
                    "collective_seq_id": sequence[uid],
                    "p2p_seq_id": sequence[uid] if is_p2p else 0,
                    "op_id": len(entries),
                    "profiling_name": f"nccl:{name.partition('#')[0]}",
                    "time_created_ns": event,
                    "time_discovered_started_ns": event,
                    "time_discovered_completed_ns": event,
                    "duration_ms": 0.0,
                    "input_sizes": inputs,
                    "input_dtypes": dtypes,
                    "output_sizes": outputs,
                    "output_dtypes": dtypes,
                    "state": "completed",
                    "retired": True,
                    "timeout_ms": 600_000,
                    "is_p2p": is_p2p,
                    "frames": _frames(comms[0], program, event),
                }
            )
    return entries


def _place(comm: CommSignature, program: Program, uids: list[str]) -> tuple[str, GroupInfo, str]:
    """(name of the group, the group, name of the call)."""
    group = program.groups[comm.group]
    if comm.kind not in P2P:
        return uids[comm.group], group, _NAMES.get(comm.kind, comm.kind)
    peer = group.ranks[comm.peer]
    sender, receiver = (program.rank, peer) if comm.kind == "send" else (peer, program.rank)
    ranks = tuple(sorted((sender, receiver)))
    source, target = ranks.index(sender), ranks.index(receiver)
    name = f"send {source}->{target}" if comm.kind == "send" else f"recv {target}<-{source}"
    uid = f"{uids[comm.group]}.{sender}to{receiver}"
    return uid, GroupInfo(ranks=ranks, name=uid, desc=group.desc + MESSAGE), name


def _sizes(comm: CommSignature) -> tuple[list[int], list[int]]:
    if comm.kind == "barrier":
        return [1], [1]
    if comm.kind in P2P:
        return [comm.in_numel or comm.out_numel], [comm.in_numel or comm.out_numel]
    return [comm.in_numel], [comm.out_numel]


def _frames(comm: CommSignature, program: Program, event: int) -> list[dict[str, Any]]:
    path, _, line = comm.site.rpartition(":")
    if not path:
        return []
    return [{"name": f"phase {phase_at(program, event)}", "filename": path, "line": int(line)}]
