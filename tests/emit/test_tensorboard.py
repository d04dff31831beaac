"""TensorBoard scalars, read with TensorBoard's own reader."""

import pytest

from prism_plugins import cli

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_scalars(run, capsys, prediction):
    assert cli.main(["trace", "latest", "--format", "tensorboard"]) == 0
    reader = event_accumulator.EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    assert reader.Scalars("iteration-time")[-1].value == pytest.approx(1.2345)
    assert reader.Scalars("throughput")[0].value == pytest.approx(prediction.tflops_per_gpu, rel=1e-5)
    assert reader.Scalars("prism/bubble ms")[0].value == pytest.approx(prediction.breakdown_ms.bubble)
    assert [s.step for s in reader.Scalars("iteration-time")] == [1, 2]
    assert "max-mem-allocated-bytes" in tags
