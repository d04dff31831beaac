"""Lints of layouts."""

from __future__ import annotations

import numpy as np
from builders import Builder, collective, one_class_per_rank

from prism_plugins.checks.layout import better_split, held, layout_findings
from prism_plugins.costs.cluster import load_cluster
from prism_plugins.program.slices import JobFacts
from prism_plugins.world.layout import Layout


def findings(layout: Layout, *, builders: list[Builder] | None = None, environment=None) -> list[str]:
    facts = JobFacts(framework="x", layout=layout)
    job = one_class_per_rank({b.rank: b.program() for b in builders or []}, layout)
    cluster = load_cluster("dgx-h100")
    return [f.message for f in layout_findings(facts, job, cluster, None, environment or {})]


def test_tensor_parallelism_across_nodes() -> None:
    (message,) = findings(Layout(world_size=32, tp=16, dp=2))
    assert "crosses nodes of 8 GPUs in 2 of 2 groups" in message
    assert findings(Layout(world_size=32, tp=8, dp=4)) == []
    assert findings(Layout(world_size=8, tp=8)) == []
    (message,) = findings(Layout(world_size=24, tp=6, dp=4))
    assert "in 2 of 4 groups" in message


def test_fewer_micro_batches_than_stages() -> None:
    (message,) = findings(Layout(world_size=8, pp=8, num_microbatches=4))
    assert "4 micro-batches for 8 pipeline stages: at least 64%" in message
    assert findings(Layout(world_size=8, pp=8, num_microbatches=8)) == []


def test_a_better_split_takes_layers_from_the_stage_with_the_loss() -> None:
    busy = np.array([80.0, 80.0, 80.0, 130.0])  # 10 ms a layer, the loss 50 ms
    layers, expected = better_split([8, 8, 8, 8], busy)
    assert sum(layers) == 32
    assert layers[3] < 8
    assert expected < 130
    assert better_split([8, 8], np.array([80.0, 80.0])) is None
    assert better_split([0, 8], np.array([80.0, 80.0])) is None


def test_overlap_that_needs_one_connection() -> None:
    builders = [Builder(r) for r in range(2)]
    for b in builders:
        b.comm(collective(b.group((0, 1), "TENSOR_MODEL_PARALLEL_GROUP")), is_async=True)
    layout = Layout(world_size=2, tp=2)
    (message,) = findings(layout, builders=builders)
    assert "CUDA_DEVICE_MAX_CONNECTIONS is not set" in message
    assert findings(layout, builders=builders, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == []


def test_layers_are_named_without_the_digests_of_their_fields() -> None:
    with_code = "Head-0a1b2c, loss train.<locals>.loss:147tuple(None, list(3, f())) | ties of stage 7: embed"
    assert held(with_code) == "Head, loss train.<locals>.loss | ties of stage 7: embed"
    shown = held("12x Block-3f2a91, Head-0a1b2c, loss train.loss | ties of stage 3: embed")
    assert shown == "12x Block, Head, loss train.loss | ties of stage 3: embed"
