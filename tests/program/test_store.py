import io
import os
import zipfile

import msgspec
import numpy as np
import pytest

from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)
from prism_plugins.program.store import load_program, save_program


def small_program() -> Program:
    events = np.array(
        [
            (EventKind.PHASE_BEGIN, 0, 0, 0, 0),
            (EventKind.ALLOC, 0, 0, 7, 1024),
            (EventKind.KERNEL, 0, 3, 0, 0),
            (EventKind.COMM, 1, 0, 0, 11),
            (EventKind.WORK_WAIT, 0, 0, 11, 0),
            (EventKind.FREE, 0, 0, 7, 0),
            (EventKind.PHASE_END, 0, 0, 0, 0),
        ],
        dtype=EVENT_DTYPE,
    )
    x = TensorSpec("bfloat16", (4, 8), (1, 4))
    return Program(
        rank=3,
        events=events,
        signatures=[
            OpSignature(
                op="aten::mm",
                inputs=(x, x),
                outputs=(x,),
                scalars=(("dim", (1, 2)), ("alpha", 1.5)),
                attrs={"k": 1},
            )
        ],
        comms=[CommSignature(kind="all_reduce", group=0, dtype="bfloat16", in_numel=32, out_numel=32)],
        groups=[GroupInfo(ranks=(1, 3), name="5", desc="TP")],
        phases=[Phase(kind="forward", microbatch=0, chunk=0, parts=(("forward", 0),))],
        initial=[Allocation(1, 100, "parameters")],
    )


def rewrite(path, **members):
    """Replace members of a program file, as an attacker or a newer version would."""
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in old.items():
            archive.writestr(name, members.get(name.removesuffix(".npy"), data))


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def edit_tables(path, **changes):
    with zipfile.ZipFile(path) as archive:
        tables = msgspec.json.decode(np.load(io.BytesIO(archive.read("tables.npy"))).tobytes())
    tables.update(changes)
    rewrite(path, tables=npy(np.frombuffer(msgspec.json.encode(tables), dtype=np.uint8)))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "program.npz"
    save_program(small_program(), path)
    return path


def test_round_trip(path):
    program, again = small_program(), load_program(path)
    assert np.array_equal(program.events, again.events)
    for field in ("rank", "signatures", "comms", "groups", "phases", "initial", "source"):
        assert getattr(program, field) == getattr(again, field)
    assert [p.name for p in path.parent.iterdir()] == ["program.npz"]


def test_every_truncation_is_refused(path):
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        with pytest.raises(FileFormatError, match=r"program\.npz"):
            load_program(path)


def test_flipped_bytes_never_crash_the_reader(path):
    data = path.read_bytes()
    refused = 0
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            load_program(path)
        except FileFormatError:
            refused += 1
    assert refused > len(data) / 5 * 0.7


def test_foreign_files_are_refused(path):
    path.write_text("hello")
    with pytest.raises(FileFormatError):
        load_program(path)
    with pytest.raises(FileFormatError):
        load_program(path.parent / "absent.npz")
    np.savez(path, a=np.arange(3))
    with pytest.raises(FileFormatError):
        load_program(path)
    np.savez_compressed(path, events=small_program().events, tables=np.zeros(3, np.uint8))
    with pytest.raises(FileFormatError, match="compressed"):
        load_program(path)


def test_newer_schema_says_update(path):
    edit_tables(path, schema=99, unheard_of={"x": 1})
    with pytest.raises(FileFormatError, match="update"):
        load_program(path)


def test_pickles_are_not_read(path):
    rewrite(path, events=npy(np.array([{"a": 1}], dtype=object)))
    with pytest.raises(FileFormatError):
        load_program(path)


def test_absurd_array_header_does_not_allocate(path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": np.lib.format.dtype_to_descr(EVENT_DTYPE), "fortran_order": False, "shape": (10**15,)},
    )
    rewrite(path, events=header.getvalue())
    with pytest.raises(FileFormatError):
        load_program(path)


@pytest.mark.parametrize(
    "event",
    [
        (EventKind.KERNEL, 0, 0, 1, 0),
        (EventKind.COMM, 0, 0, 9, 0),
        (EventKind.PHASE_BEGIN, 0, 0, 5, 0),
        (EventKind.PHASE_BEGIN, 0, 0, 0, 0),
        (EventKind.FREE, 0, 0, 1234, 0),
        (EventKind.ALLOC, 0, 0, 50, -1),
        (EventKind.ALLOC, 0, 0, 7, 10),
        (EventKind.ALLOC, 0, 0, 1, 10),
        (99, 0, 0, 0, 0),
    ],
)
def test_references_out_of_range_are_refused(path, event):
    program = small_program()
    rewrite(path, events=npy(np.concatenate([program.events, np.array([event], dtype=EVENT_DTYPE)])))
    with pytest.raises(FileFormatError):
        load_program(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"groups": [{"ranks": [], "name": "5"}]},
        {"groups": [{"ranks": [1, 1], "name": "5"}]},
        {"comms": [{"kind": "all_reduce", "group": 4}]},
        {"comms": [{"kind": "send", "group": 0, "peer": 2}]},
        {"signatures": [{"op": "aten::mm", "inputs": [["float17", [1]]]}]},
        {"signatures": "none"},
        {"initial": [[1, -5]]},
        {"initial": [[2**63, 5]]},
        {"initial": [[1, 2**63]]},
        {"signatures": [{"op": "aten::mm", "inputs": [["float32", [1], [1, 1]]]}]},
    ],
)
def test_bad_tables_are_refused(path, changes):
    edit_tables(path, **changes)
    with pytest.raises(FileFormatError):
        load_program(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PrismError, match="cannot write"):
        save_program(small_program(), tmp_path / "p.npz")


def test_missing_directory_is_a_clear_error(tmp_path):
    with pytest.raises(PrismError, match="cannot write"):
        save_program(small_program(), tmp_path / "absent" / "p.npz")
