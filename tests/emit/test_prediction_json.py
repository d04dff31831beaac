"""prediction.json and predicted.log: the keys are a contract, and a reader is told what is wrong with a file."""

import json

import pytest

from prism_plugins.emit.predicted_log import write_predicted_log
from prism_plugins.emit.prediction_json import read_prediction, write_prediction
from prism_plugins.errors import FileFormatError, PrismError

KEYS = {
    "schema", "world_size", "layout", "cluster", "device", "iteration_time_ms", "tokens_per_s_per_gpu",
    "tflops_per_gpu", "breakdown_ms", "memory", "slices", "classes", "findings", "unpriced_ops",
    "synthesized_reads", "assumptions", "audit", "simulate_seconds",
}  # fmt: skip


@pytest.fixture
def file(tmp_path, prediction):
    path = tmp_path / "prediction.json"
    write_prediction(path, prediction)
    return path


def test_keys_are_those_agreed(file):
    data = json.loads(file.read_text())
    assert data.keys() >= KEYS
    assert data["breakdown_ms"].keys() == {"compute", "exposed_communication", "bubble", "host", "optimizer"}
    assert data["layout"].keys() >= {"tp", "pp", "vpp", "cp", "ep", "etp", "dp"}
    assert data["memory"][0].keys() >= {
        "ranks", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "by_category",
    }  # fmt: skip
    assert data["slices"][0].keys() == {"rank", "seconds", "ops", "collectives", "cached"}
    assert data["audit"].keys() >= {"ranks", "matched"}


def test_it_comes_back_as_it_was(file, prediction):
    assert read_prediction(file) == prediction


def test_keys_of_a_later_version_are_ignored(file, prediction):
    data = json.loads(file.read_text())
    data["later"] = {"x": 1}
    data["memory"][0]["later"] = 1
    file.write_text(json.dumps(data))
    assert read_prediction(file) == prediction


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda _: "", "truncated"),
        (lambda _: "[1, 2]", "not what it should be"),
        (lambda _: '{"schema": 1, "results": []}', "not what it should be"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "newer version"),
        (lambda text: text.replace('"world_size": 64', '"world_size": "many"'), "world_size"),
    ],
)
def test_a_spoilt_file_is_named(file, spoil, says):
    file.write_text(spoil(file.read_text()))
    with pytest.raises(FileFormatError, match=says) as caught:
        read_prediction(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"prediction\.json is missing"):
        read_prediction(tmp_path / "prediction.json")


def test_a_place_that_cannot_be_written(tmp_path, prediction):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrismError, match="cannot write"):
        write_prediction(tmp_path / "file" / "prediction.json", prediction)


def test_log_header_says_what_is_predicted_and_what_is_not(tmp_path, prediction):
    path = tmp_path / "predicted.log"
    write_predicted_log(path, [" iteration 1/ 2 | lm loss: 1.0E+00 |"], prediction)
    lines = path.read_text().splitlines()
    assert lines[-1] == " iteration 1/ 2 | lm loss: 1.0E+00 |"
    header = "\n".join(lines[:-1])
    assert "64 ranks on dgx-h100" in header
    assert "predicted: times" in header
    assert "synthesized: what training would compute (loss" in header
    assert all(line.startswith("#") for line in lines[:-1])
