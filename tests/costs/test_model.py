"""The cost model as the simulator sees it."""

from __future__ import annotations

import subprocess
import sys

from prism_plugins.costs.cluster import load_cluster
from prism_plugins.costs.model import build_cost_model
from prism_plugins.program.model import CommSignature, OpSignature, TensorSpec


def test_equal_signatures_are_priced_once() -> None:
    costs = build_cost_model(load_cluster())
    x = TensorSpec("bfloat16", (64, 64))

    def make() -> OpSignature:
        return OpSignature(op="prism::fused", inputs=(x,), outputs=(x,), attrs={"name": "a", "read_bytes": 8})

    assert costs.price_op(make()) is costs.price_op(make())


def test_equal_placements_share_a_price_and_different_ones_do_not() -> None:
    costs = build_cost_model(load_cluster())
    comm = CommSignature(kind="all_reduce", group=0, dtype="float32", in_numel=1 << 20, out_numel=1 << 20)
    assert costs.price_comm(comm, (0, 1), 0) is costs.price_comm(comm, (8, 9), 8)
    assert costs.price_comm(comm, (0, 1), 0).duration_ns != costs.price_comm(comm, (0, 8), 0).duration_ns


def test_assumptions_are_single_lines_that_name_the_cluster() -> None:
    costs = build_cost_model(load_cluster("dgx-a100"))
    lines = costs.assumptions()
    assert "dgx-a100" in costs.name
    assert any("A100" in line for line in lines)
    assert all(line and "\n" not in line for line in lines)


def test_costs_and_simulation_do_not_import_torch() -> None:
    code = "import sys, prism_plugins.costs.model, prism_plugins.simulate.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
