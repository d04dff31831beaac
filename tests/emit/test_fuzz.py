"""Damaged and hostile files: every reader either does its work or refuses in one line with status 2, and changes nothing."""

import gzip
import json
import os
import random
import shutil
import struct
from pathlib import Path

import msgspec
import pytest

from prism_plugins import cli
from prism_plugins.calibration.signatures import Mix, SignatureList
from prism_plugins.costs.calibration import Calibration, Figure
from prism_plugins.costs.cluster import cluster_text
from prism_plugins.diff import read_kineto
from prism_plugins.errors import PrismError
from prism_plugins.options import Job, Options
from prism_plugins.program.model import OpSignature, TensorSpec
from prism_plugins.tune.result import Candidate, TuneDir, TuneResult

READERS = {
    "show": ("show", "latest"),
    "show --json": ("show", "latest", "--json"),
    "communication": ("show", "latest", "--communication"),
    "ops": ("ops", "latest", "--rank", "0"),
    "kineto": ("trace", "latest", "--ranks", "0"),
    "perfetto": ("trace", "latest", "--format", "perfetto"),
    "report": ("report", "latest", "--out", "{out}.html"),
    "what-if": ("what-if", "latest", "--cluster", "dgx-b200"),
    "faults": ("what-if", "latest", "--slow-rank", "1=2"),
    "recorder": ("flight-recorder", "latest", "--out", "{out}"),
}
TURNS = 6
VALUES = [
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "\x1b]0;x\x07</script><script>alert(1)</script>",
    "../../../../etc/passwd", "/etc/passwd", "\ud800", "x" * 100_000, [], [[]], {}, {"": None},
]  # fmt: skip


def leaves(value, path=()):
    """Paths of all values of a JSON document, containers included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from leaves(inner, (*path, key))


def with_value(document, path, value):
    """A copy in which one value is another."""
    if not path:
        return value
    copy = json.loads(json.dumps(document))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


def damaged(raw, dice):
    """Bytes cut short, flipped, doubled or foreign."""
    at = dice.randrange(len(raw))
    match dice.randrange(5):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([raw[at] ^ (1 << dice.randrange(8))]) + raw[at + 1 :]
        case 2:
            return raw + raw
        case 3:
            return raw[:at] + dice.randbytes(50) + raw[at:]
    return dice.choice([b"", b"null", b"[" * 100_000, b"\x00" * 1000, gzip.compress(raw)])


def read(capsys, words, folder):
    """Run a reader; returns its status after judging what it said."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    try:
        status = cli.main(words)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status in (0, 2), words
    if status == 2:
        assert err.count("\n") == 1, err
        assert err.startswith("prism: error: ")
    assert not set(out + err) & {"\x1b", "\x07", "\x9b"}
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {p: after.get(p) for p in before} == before
    assert status == 0 or after == before
    return status


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["run.json", "prediction.json", "program.npz"])
def test_a_damaged_run(run, tmp_path, capsys, name, reader):
    path = run.slice(0).program if name == "program.npz" else run.path / name
    whole = path.read_bytes()
    dice = random.Random(f"{name} {reader}")
    document = json.loads(whole) if name.endswith("json") else None
    paths = list(leaves(document)) if document else []
    for turn in range(TURNS):
        if document is not None and turn % 2:
            changed = json.dumps(with_value(document, dice.choice(paths), dice.choice(VALUES))).encode()
        else:
            changed = damaged(whole, dice)
        path.write_bytes(changed)
        words = [word.format(out=tmp_path / f"out{turn}") for word in READERS[reader]]
        read(capsys, words, run.path)
        for made in (run.kineto, run.trace):
            shutil.rmtree(made, ignore_errors=True)
            made.unlink(missing_ok=True)


@pytest.mark.parametrize("form", ["trace", "dump", "log"])
def test_a_damaged_recording_of_a_real_job(run, tmp_path, capsys, form):
    dice = random.Random(form)
    if form == "trace":
        assert cli.main(["trace", "latest", "--ranks", "0"]) == 0
        whole = gzip.decompress(run.kineto_trace(0).read_bytes())
    elif form == "dump":
        assert cli.main(["flight-recorder", "latest", "--out", str(tmp_path / "d")]) == 0
        whole = next((tmp_path / "d").iterdir()).read_bytes()
    else:
        whole = b" iteration 1/ 2 | elapsed time per iteration (ms): 12.5 | lm loss: 3.1E+00 |\n" * 20
    capsys.readouterr()
    document = json.loads(whole) if form == "trace" else None
    paths = list(leaves(document)) if document else []
    path = tmp_path / ("t.json" if form == "trace" else "real")
    for turn in range(TURNS):
        if document is not None and turn % 2:
            path.write_text(json.dumps(with_value(document, dice.choice(paths), dice.choice(VALUES))))
        else:
            path.write_bytes(damaged(whole, dice))
        read(capsys, ["diff", "latest", str(path)], run.path)


def test_a_file_that_unpacks_to_far_more_than_a_trace(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(read_kineto, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    assert read(capsys, ["diff", "latest", str(path)], run.path) == 2


def test_a_dump_that_would_take_all_memory(run, tmp_path, capsys):
    """The index of a memo is four bytes, and the memo an array of that length."""
    path = tmp_path / "dump"
    path.write_bytes(b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b".")
    assert read(capsys, ["diff", "latest", str(path)], run.path) == 2


def test_links_and_unreadable_files(run, tmp_path, capsys):
    path = tmp_path / "loop.json"
    path.symlink_to(path)
    assert read(capsys, ["diff", "latest", str(path)], run.path) == 2
    run.prediction.unlink()
    run.prediction.mkdir()
    for reader in READERS.values():
        words = [word.format(out=tmp_path / "out") for word in reader]
        read(capsys, words, run.path)


def test_numbers_beyond_all_bounds(run, capsys):
    document = json.loads(run.prediction.read_text())
    document["memory"][0]["peak_reserved_bytes"] = 10**400
    run.prediction.write_text(json.dumps(document))
    for words in (["show", "latest"], ["report", "latest"]):
        assert read(capsys, words, run.path) == 2


NAMED = {
    "diff": ("diff", "latest", "{file}"),
    "report --with": ("report", "latest", "--with", "{file}", "--out", "{out}"),
    "what-if --cluster": ("what-if", "latest", "--cluster", "{file}"),
    "cluster show": ("cluster", "show", "{file}"),
    "calibrate show": ("calibrate", "show", "{file}"),
    "calibrate merge": ("calibrate", "merge", "{file}", "{file}", "--out", "{out}"),
    "calibrate diff": ("calibrate", "diff", "{file}", "{file}"),
    "calibrate --from": ("calibrate", "--from", "{file}", "--device", "cpu", "--no-host", "--out", "{out}"),
    "calibrate --nccl-tests": ("calibrate", "--nccl-tests", "{file}", "--out", "{out}"),
    "tune --calibration": ("tune", "--world-size", "8", "--calibration", "{file}", "--out", "{out}", "train.py"),
    "tune --cluster": ("tune", "--world-size", "8", "--cluster", "{file}", "--out", "{out}", "train.py"),
    "tune --out": ("tune", "--world-size", "8", "--out", "{file}", "train.py"),
}  # fmt: skip
"""Readers of a file that the user names."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", NAMED)
def test_a_named_file_that_is_none(run, tmp_path, capsys, reader):
    """A pipe that nobody writes to, a device without end, a folder, nothing, and files of another kind."""
    (tmp_path / "train.py").write_text("import argparse\n")
    pipe, folder, foreign = tmp_path / "pipe.toml", tmp_path / "folder", tmp_path / "photo.toml"
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    foreign.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40)
    unreadable = tmp_path / "loop.toml"
    unreadable.symlink_to(unreadable)
    for path in (pipe, Path("/dev/zero"), folder, foreign, unreadable, tmp_path / "gone" / "gone.toml"):
        if reader == "tune --out" and path.name == "gone.toml":
            continue  # makes it
        words = [word.format(file=path, out=tmp_path / "out.json") for word in NAMED[reader]]
        assert read(capsys, words, run.path) == 2, path
        assert not (tmp_path / "out.json").exists()


NCCL_TESTS = """\
# Using devices
#  Rank  0 Group  0 Pid 313 on node-0 device  0 [0x18] NVIDIA H200
#  Rank  1 Group  0 Pid 314 on node-0 device  1 [0x2a] NVIDIA H200
# all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    27.10   38.69   67.71      0    26.93   38.94   68.14      0
  1073741824     268435456     float     sum      -1   4020.1  267.09  467.41      0   4016.4  267.34  467.84      0
"""
CALIBRATION = Calibration(
    gpu="NVIDIA H200",
    figures=[
        Figure(signature=OpSignature(op="aten::mm", inputs=(X, X), outputs=(X,)), us=10.0, median_us=9.0)
        for X in (TensorSpec("bfloat16", (64, 64)), TensorSpec("float32", (8, 8)))
    ],
)


@pytest.mark.parametrize("kind", ["calibration", "signatures", "nccl-tests", "cluster", "tune.json"])
def test_a_damaged_file_of_ones_own(run, tmp_path, capsys, kind):
    """Readers that need no run: whatever the file says, they end with 0 or refuse it in a line."""
    path, out = tmp_path / "file.toml", tmp_path / "out.json"
    words = {
        "calibration": [("calibrate", "show", path), ("calibrate", "diff", path, path)],
        "signatures": [("calibrate", "--from", path, "--device", "cpu", "--no-host", "--budget-s", 0, "--out", out)],
        "nccl-tests": [("calibrate", "--nccl-tests", path, "--out", out)],
        "cluster": [("cluster", "show", path), ("what-if", "latest", "--cluster", path)],
        "tune.json": [],
    }[kind]  # fmt: skip
    whole = {
        "calibration": lambda: msgspec.json.encode(CALIBRATION),
        "signatures": lambda: msgspec.json.encode(
            SignatureList(
                signatures=tuple(f.signature for f in CALIBRATION.figures),
                mixes=(Mix(name="a", ops=(0, 1), counts=(2, 1)),),
            )
        ),
        "nccl-tests": lambda: NCCL_TESTS.encode(),
        "cluster": lambda: cluster_text("dgx-h100")[0].encode(),
        "tune.json": lambda: msgspec.json.encode(
            TuneResult(
                job=Job(options=Options(world_size=8), run_as="script", argv=("train.py",)),
                cluster="dgx-h100",
                capacity_bytes=80 << 30,
                candidates=(Candidate(knobs={"tp": 2}, arguments=("--x 1",), bound_ms=1.0),),
            )
        ),
    }[kind]()
    dice = random.Random(kind)
    document = json.loads(whole) if whole[:1] == b"{" else None
    paths = list(leaves(document)) if document else []
    refused = 0
    for turn in range(4 * TURNS):
        if document is not None and turn % 2:
            path.write_text(json.dumps(with_value(document, dice.choice(paths), dice.choice(VALUES))))
        else:
            path.write_bytes(damaged(whole, dice))
        if kind == "tune.json":
            refused += claim_damaged(tmp_path / "search", path.read_bytes())
        for each in words:
            refused += read(capsys, [str(word) for word in each], run.path) == 2
        out.unlink(missing_ok=True)
    assert refused > TURNS


def claim_damaged(folder, content):
    """Whether a search refuses, in one line, to go on in a directory; what is in it stays as it is."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "tune.json").write_bytes(content)
    job = Job(options=Options(world_size=8), run_as="script", argv=("train.py",))
    said = ""
    try:
        TuneDir(folder).claim(job, {})
    except PrismError as error:
        said = str(error)
    assert "\n" not in said
    assert (folder / "tune.json").read_bytes() == content
    return bool(said)
