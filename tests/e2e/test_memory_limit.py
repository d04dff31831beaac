"""A job larger than its GPUs: the launch ends, and says so. On a CPU build and, in native mode, on a CUDA build."""

import pytest


@pytest.mark.parametrize("width", [pytest.param(60000, marks=pytest.mark.slow), 80000])
def test_a_model_beside_the_limit_of_80_gb(place, width):
    done = place.run("train.py", "--width", width)
    prediction = place.prediction()
    # Weights, gradients and two moments of Adam, float32; the bias and activations are small beside them.
    needed = 4 * 4 * width * width
    for memory in prediction["memory"]:
        assert memory["capacity_bytes"] < 80e9 * 1.07
        assert needed <= memory["peak_allocated_bytes"]
        assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] < memory["device_used_bytes"]
    found = [f for f in prediction["findings"] if (f["kind"], f["severity"]) == ("oom", "error")]
    if needed < 60e9:
        assert not found
        assert "out of memory" not in done.stdout
    else:
        assert sorted(",".join(f["ranks"] for f in found).split(",")) == [str(rank) for rank in range(8)]
        assert "out of memory on ranks " in done.stdout
