"""Compiled regions allocate what they allocate on a GPU, and record what they run there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from prism_plugins.device import tensors

HERE = Path(__file__).parent
DEVICE = "virtual"
TRUTH = json.loads((HERE.parent / "data" / "regions_h200.json").read_text())["regions"]


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def assumptions_of(run):
    """What running it made the slice assume."""
    context = load("regions_setup").CONTEXT
    before = len(context.assumptions)
    run()
    return context.assumptions[before:]


def recorded(run):
    return load("regions_setup").recorded(run)


def compiled(function, **options):
    load("regions_setup")
    return torch.compile(function, **options)


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape, dtype=dtype, device="cuda").requires_grad_(grad)


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_memory_equals_an_h200(name):
    cases = load("region_cases")
    case = cases.CASES[name]
    measured = {key: value for key, value in TRUTH[name].items() if key != "kernels"}
    results = []
    assumed = assumptions_of(lambda: results.append(cases.measure(case, compiled(case.function))))
    assert results == [measured]
    assert assumed == []


@pytest.mark.parametrize(
    "name", ["weighted_swiglu_back", "cross_entropy_gradient", "block_grad", "rms_norm_grad"]
)
def test_kernels_are_those_an_h200_ran(name):
    cases = load("region_cases")
    case = cases.CASES[name]
    function = compiled(case.function)
    inputs = cases.make_inputs(case)

    def run():
        outputs = function(*inputs)
        if case.grad:
            wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.grad(outputs, wanted, torch.ones_like(outputs))

    run()
    names = [s.attrs["name"] for s in recorded(run) if s.op == "prism::fused"]
    assert [n[:80] for n in names] == [n for n, _ in TRUTH[name]["kernels"] if n.startswith("triton")]


def test_a_fused_op_says_what_it_moves():
    cases = load("region_cases")
    function = compiled(cases.swiglu)
    y = randn(512, 4, 2048, dtype=torch.bfloat16)
    function(y)
    (op,) = recorded(lambda: function(y))
    assert op.op == "prism::fused"
    assert op.attrs["read_bytes"] == y.nbytes
    assert op.attrs["write_bytes"] == y.nbytes // 2
    assert 3 * y.numel() // 2 < op.attrs["flops"] < 20 * y.numel()
    assert [i.shape for i in op.inputs] == [(512, 4, 2048)]
    assert [o.shape for o in op.outputs] == [(512, 4, 1024)]
    assert op.outputs[0].dtype == "bfloat16"


def test_gemms_inside_a_region_are_recorded_as_themselves():
    cases = load("region_cases")
    function = compiled(cases.mlp)
    x, up, down = randn(512, 256), randn(256, 512), randn(512, 256)
    function(x, up, down)
    ops = [s.op for s in recorded(lambda: function(x, up, down))]
    assert [op.split(".")[0] for op in ops] == ["aten::mm", "prism::fused", "aten::mm"]


def test_small_real_inputs_give_real_values():
    function = compiled(lambda a, b: (torch.softmax(a @ b, -1), (a * 2 + 1).sum()))
    a, b = randn(4, 8), randn(8, 4)
    soft, total = function(a, b)
    a, b = a.cpu(), b.cpu()
    assert not tensors.is_synthesized(soft)
    torch.testing.assert_close(soft.cpu(), torch.softmax(a @ b, -1))
    torch.testing.assert_close(total.item(), (a * 2 + 1).sum().item())


def test_real_values_flow_into_inplace_changes_and_gradients():
    def step(x, buffer):
        buffer.add_(x.detach())
        return (x * x * buffer).sum()

    function = compiled(step)
    x, buffer = randn(8, grad=True), torch.ones(8, device="cuda")
    function(x, buffer).backward()
    torch.testing.assert_close(buffer.cpu(), x.detach().cpu() + 1)
    torch.testing.assert_close(x.grad.cpu(), 2 * x.detach().cpu() * buffer.cpu())


def test_unknown_inputs_give_synthesized_values():
    function = compiled(lambda big, small: (big.sum(), small + big.mean()))
    total, shifted = function(randn(512, 512), torch.zeros(4, device="cuda"))
    assert tensors.is_synthesized(total)
    assert tensors.is_synthesized(shifted)


def test_large_results_of_real_values_stay_shape_only():
    function = compiled(lambda x: x.expand(2**20, 4) + 1)
    assert tensors.is_shape_only(function(torch.ones(4, device="cuda")))


def test_dropout_draws_real_numbers():
    function = compiled(lambda x: F.dropout(x, 0.5))
    dropped = function(torch.ones(4096, device="cuda")).cpu()
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert 1500 < (dropped == 0).sum() < 2600


def test_grad_mode_and_shapes_get_their_own_plans():
    cases = load("region_cases")
    function = compiled(cases.swiglu)
    y = randn(1024, 1024, grad=True)
    with torch.no_grad():
        assert not function(y).requires_grad
    assert function(y).requires_grad
    assert function(y[:512]).shape == (512, 512)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert compiled(lambda a: a @ a.t())(y).dtype == torch.bfloat16


def test_python_around_the_graph_runs_every_time():
    class Counter:
        calls = 0

        @compiled
        def add(self, x, *, scale=1.0):
            self.calls += 1
            return x * scale

    counter = Counter()
    for _ in range(3):
        result = counter.add(torch.ones(4, device="cuda"), scale=3.0)
    assert counter.calls == 3
    assert result.tolist() == [3.0] * 4


def test_regions_nest():
    inner = compiled(lambda x: F.silu(x) * 2)
    outer = compiled(lambda x: inner(x + 1).sum(-1))
    x = randn(512, 1024)
    outer(x)
    assert [s.op for s in recorded(lambda: outer(x))] == ["prism::fused"]


def test_modules_and_decorator_arguments():
    load("regions_setup")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).to("cuda")
    assert torch.compile(model)(randn(512, 256)).shape == (512, 256)

    @torch.compile(dynamic=True)
    def double(x):
        return x * 2

    assert double(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    eager = torch.compile(lambda x: x + 1, backend="eager")
    assert eager(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]


def test_host_tensors_compile_without_a_compiler():
    function = compiled(lambda x: torch.relu(x).sum())
    assert function(torch.tensor([-1.0, 2.0])).item() == 2.0


def test_scripted_functions_are_planned_and_said_to_be():
    load("regions_setup")

    def scale(x, factor: float):
        return torch.tanh(x) * factor

    made = []
    assumed = assumptions_of(lambda: made.append(torch.jit.script(scale)))
    assert len(assumed) == 1
    assert "scale" in assumed[0]
    x = randn(512, 1024)
    made[0](x, 2.0)
    assert [s.op for s in recorded(lambda: made[0](x, 2.0))] == ["prism::fused"]


def test_what_cannot_be_traced_runs_op_by_op_and_is_said():
    @compiled
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    function = compiled(lambda x: broken(x) * 2, fullgraph=True)
    results = []
    assumed = assumptions_of(lambda: results.append(function(torch.ones(2, device="cuda"))))
    assert results[0].tolist() == [4.0, 4.0]
    assert len(assumed) == 1
    assert "op by op" in assumed[0]

    class Broken(torch.nn.Module):
        def forward(self, x):
            return broken(x)

    model = torch.compile(Broken(), fullgraph=True)
    assumed = assumptions_of(lambda: results.append(model(torch.ones(2, device="cuda"))))
    assert results[1].tolist() == [2.0, 2.0]
    assert "Broken" in assumed[0]


def test_modes_that_need_a_gpu_are_said_to_be_planned_as_default():
    assumed = assumptions_of(lambda: compiled(lambda x: x + 1, mode="max-autotune"))
    assert assumed == ["torch.compile(mode='max-autotune', options=None) is planned as mode='default'"]


def test_regions_compile_on_autograds_threads():
    """Megatron calls compiled gradients inside the backward of an autograd function."""
    cases = load("region_cases")
    back = compiled(cases.swiglu_back)

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return cases.swiglu(y)

        @staticmethod
        def backward(ctx, g):
            return back(g, *ctx.saved_tensors)

    y = randn(512, 512, dtype=torch.bfloat16, grad=True)
    ops = []
    assumed = assumptions_of(lambda: ops.extend(recorded(lambda: SwiGLU.apply(y).sum().backward())))
    assert not assumed, assumed
    assert [s.op for s in ops].count("prism::fused") == 1
