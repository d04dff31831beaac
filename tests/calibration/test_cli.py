"""``prism calibrate`` on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prism_plugins.calibration.signatures import (
    Mix,
    SignatureList,
    read_signatures,
    write_signatures,
)
from prism_plugins.cli import main
from prism_plugins.costs.calibration import Calibration, Figure, read_calibration, write_calibration
from prism_plugins.program.model import OpSignature, TensorSpec

X = TensorSpec("float32", (32, 64))
ADD = OpSignature(op="aten::add.Tensor", inputs=(X, X), outputs=(X,))
MM = OpSignature(
    op="aten::mm", inputs=(X, TensorSpec("float32", (64, 16))), outputs=(TensorSpec("float32", (32, 16)),)
)
FUSED = OpSignature(op="prism::fused", inputs=(X,), outputs=(X,), attrs={"name": "f"})
LIST = SignatureList(signatures=(ADD, MM, FUSED), mixes=(Mix(name="a", ops=(0, 1, 2), counts=(8, 4, 2)),))


def test_a_signature_list_is_measured_and_what_cannot_be_is_named(tmp_path: Path, capsys) -> None:
    write_signatures(LIST, tmp_path / "sigs.json")
    out = tmp_path / "c.json"
    assert (
        main(
            [
                "calibrate",
                "--from",
                str(tmp_path / "sigs.json"),
                "--device",
                "cpu",
                "--no-host",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    calibration = read_calibration(out)
    assert {f.signature.op for f in calibration.figures} == {"aten::add.Tensor", "aten::mm"}
    assert all(f.repetitions >= 20 and f.us > 0 for f in calibration.figures)
    assert calibration.not_measured == {"prism::fused: kernels of the compiler are not rebuilt": 1}
    capsys.readouterr()
    assert main(["calibrate", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "2 figures: 2 measured" in shown
    assert "not measured: 1 x prism::fused" in shown


def calibration(gpu: str, **us: float) -> Calibration:
    return Calibration(
        gpu=gpu,
        figures=[
            Figure(signature=OpSignature(op=f"aten::{name}", inputs=(X,)), us=value)
            for name, value in us.items()
        ],
    )


def test_merge_lets_the_later_file_win_and_refuses_two_gpus(tmp_path: Path, capsys) -> None:
    files = []
    for i, c in enumerate(
        (calibration("A", exp=1.0, neg=2.0), calibration("A", neg=3.0), calibration("B", neg=3.0))
    ):
        files.append(str(tmp_path / f"{i}.json"))
        write_calibration(c, files[-1])
    out = tmp_path / "out.json"
    assert main(["calibrate", "merge", *files[:2], "--out", str(out)]) == 0
    assert {f.signature.op: f.us for f in read_calibration(out).figures} == {
        "aten::exp": 1.0,
        "aten::neg": 3.0,
    }
    assert main(["calibrate", "merge", *files, "--out", str(out)]) == 2
    assert "different GPUs" in capsys.readouterr().err
    assert main(["calibrate", "diff", files[0], files[1]]) == 0
    assert "1 ops in both, 1 only in a, 0 only in b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b'{"format": "prism-calibration", "schema": 1, "gpu": "H', "truncated"),
        (b'{"format": "prism-run", "schema": 1}', "not a calibration"),
        (b'{"format": "prism-calibration", "schema": 99}', "schema 99"),
        (b"[" * 100_000, "bad.json"),
        (b'{"format": "prism-calibration", "schema": 1, "gpu": 7}', "gpu"),
        (msgspec.json.encode(calibration("A", exp=-1.0)), "takes -1.0 us"),
        (msgspec.json.encode(calibration("")), "which GPU"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, capsys, content: bytes, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert main(["calibrate", "show", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_mistakes_are_one_line(tmp_path: Path, capsys) -> None:
    for words in (
        ["calibrate"],
        ["calibrate", "--out", "x"],
        ["calibrate", "shwo", "x"],
        ["calibrate", "show", str(tmp_path / "none.json")],
        ["calibrate", "--from", str(tmp_path / "none"), "--out", "x"],
        ["calibrate", "diff", "x"],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_signature_list_is_refused(tmp_path: Path) -> None:
    from prism_plugins.errors import FileFormatError

    file = tmp_path / "sigs.json"
    write_signatures(msgspec.structs.replace(LIST, mixes=(Mix(name="a", ops=(9,), counts=(1,)),)), file)
    with pytest.raises(FileFormatError, match="signatures that are not there"):
        read_signatures(file)
