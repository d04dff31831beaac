"""Dumps for PyTorch's flight recorder: its own analyzer reads them and agrees with prism's checks."""

from __future__ import annotations

import msgspec
import pytest
from builders import Builder, collective, message, one_class_per_rank

from prism_plugins.checks.calls import calls_of_job
from prism_plugins.checks.matching import matching_findings
from prism_plugins.emit.flight_recorder import PREFIX, write_dumps
from prism_plugins.program.job import JobPrograms

WORLD = (0, 1, 2, 3)


def job(wrong: str = "") -> JobPrograms:
    """Collectives on two kinds of groups, single messages and exchanges of pairs; rank 3 may do something else."""
    builders = [Builder(r) for r in WORLD]
    for b in builders:
        odd = wrong if b.rank == 3 else ""
        world = b.group(WORLD, "WORLD")
        pair = b.group((0, 1) if b.rank < 2 else (2, 3), "PAIR")
        for n in (8, 16):
            call = msgspec.structs.replace(collective(world, n), site="train.py:7")
            if odd == "dtype":
                call = msgspec.structs.replace(call, dtype="bfloat16")
            elif odd == "size":
                call = msgspec.structs.replace(call, in_numel=n + 1, out_numel=n + 1)
            elif odd == "kind":
                call = msgspec.structs.replace(call, kind="broadcast", peer=0)
            if not (odd == "missing" and n == 16):
                b.comm(call)
            b.comm(
                msgspec.structs.replace(
                    collective(pair, n), kind="reduce_scatter", in_numel=2 * n, out_numel=n
                )
            )
            b.comm(msgspec.structs.replace(collective(pair, n), kind="all_gather", out_numel=2 * n))
        peer = b.rank % 2
        b.comm(message("recv" if peer else "send", pair, 1 - peer, 24 + (odd == "message")))
        b.comm(message("send", pair, 1 - peer, 5), message("recv", pair, 1 - peer, 5), is_async=True)
    return one_class_per_rank({b.rank: b.program() for b in builders})


def analyse(programs: JobPrograms, directory):
    pytest.importorskip("tabulate")
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    assert len(write_dumps(programs, WORLD, directory)) == 4
    args = JobConfig().parse_args([str(directory), "--prefix", PREFIX])
    details, version = read_dir(args)
    return builder.build_db(details, args, version)


def test_the_analyzer_reads_a_sound_job_and_finds_nothing(tmp_path):
    programs = job()
    database = analyse(programs, tmp_path)
    assert matching_findings(calls_of_job(programs)) == []
    assert all(c.pass_check for c in database.collectives)
    # 2 x (WORLD + reduce_scatter and all_gather of two pairs); of each pair a message and both of an exchange
    assert len(database.collectives) == 2 * (1 + 2 * 2) + 2 * (1 + 2)
    assert {(g.desc, g.size) for g in database.groups} == {("WORLD", 4), ("PAIR", 2), ("PAIR message", 2)}
    frames = [c.collective_frames for c in database.collectives if c.collective_name == "nccl:all_reduce"]
    assert frames[0][0]["filename"] == "train.py"
    assert frames[0][0]["line"] == 7


@pytest.mark.parametrize("wrong", ["dtype", "size", "kind", "missing", "message"])
def test_the_analyzer_finds_what_the_checks_find(wrong, tmp_path, caplog):
    programs = job(wrong)
    found = matching_findings(calls_of_job(programs))
    assert found
    database = analyse(programs, tmp_path)
    if wrong == "missing":  # told, but passed
        assert "Not all ranks joining collective" in caplog.text
        assert "missing ranks: {3}" in caplog.text
        return
    bad = [c for c in database.collectives if not c.pass_check]
    assert bad
    group = "PAIR" if wrong == "message" else "WORLD"
    assert {c.pg_desc.split(":")[-1].removesuffix(" message") for c in bad} == {group}
    assert all(group in finding.message for finding in found)
