"""Plan compiled graphs with the real inductor, and run the plan on virtual memory.

``torch.compile`` in a slice is the real one: Dynamo cuts the graphs, AOTAutograd's min-cut partitioner decides what
is saved for backward, inductor fuses, chooses the buffers and orders their reuse. Only the last step differs. The
wrapper module that inductor generates is executed as it is (it allocates, reuses and frees the same buffers as on
a GPU), but every Triton kernel in it is a :class:`FusedKernel`, which records one ``prism::fused`` op. Extern
kernels (GEMMs, attention) go through the dispatcher and are recorded as themselves.

Limits: no Triton is needed or used, so kernels written by hand in Triton inside a compiled region are not planned
(the region runs eagerly, counted); ``max-autotune`` choices (template GEMMs, padding found by benchmark) need a
GPU and are not made; shapes are always static (one plan per shape).
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from prism_plugins.capture.recorder import get_recorder, tensor_spec
from prism_plugins.device.host_memory import real_host_tensors
from prism_plugins.device.regions import summary
from prism_plugins.device.tensors import host_view, is_synthesized, is_virtual, mark_real, mark_synthesized
from prism_plugins.integration import SliceContext
from prism_plugins.program.model import OpSignature


class FusedKernel:
    """Stands for one Triton kernel of inductor: launching it records a ``prism::fused`` op and computes nothing.

    Shapes are static, so all launches of a kernel have one signature, which is interned at the first.
    """

    __slots__ = ("_attrs", "_inputs", "_outputs", "_signature")

    def __init__(self, attrs: dict[str, int | float | str], arg_names: Sequence[str]) -> None:
        self._attrs = attrs
        self._inputs = [i for i, name in enumerate(arg_names) if name.startswith(("in_ptr", "in_out_ptr"))]
        self._outputs = [i for i, name in enumerate(arg_names) if name.startswith(("out_ptr", "in_out_ptr"))]
        self._signature = -1

    def run(self, *args: Any, **_launch: Any) -> None:
        """Launch, with the arguments inductor generates: buffers, then sizes, then ``stream``."""
        recorder = get_recorder()
        if self._signature < 0:
            signature = OpSignature(
                op="prism::fused",
                inputs=tuple(tensor_spec(args[i]) for i in self._inputs),
                outputs=tuple(tensor_spec(args[i]) for i in self._outputs),
                attrs=self._attrs,
            )
            self._signature = recorder.intern(signature)
        recorder.launch(self._signature)


def install_inductor(context: SliceContext) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Patch inductor so that it plans for the virtual device without Triton, and return the backend to give to
    ``torch.compile``. Imports Dynamo and inductor (about 2 s), therefore called at the first compiled call."""
    import torch._dynamo.guards as guards
    import torch._inductor.async_compile as async_compile
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_utils
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.graph import GraphLowering

    no_triton = "a slice plans kernels for a GPU without having Triton"
    context.patch(scheduler, "has_triton", lambda *_: True, why=no_triton)
    context.patch(triton_utils, "triton_hash_with_backend", lambda: "virtual", why=no_triton)
    context.patch(
        guards, "profile_guard_manager", lambda *_: 0.0, why="a latency nobody reads, 10 ms a graph"
    )
    context.patch(
        async_compile.AsyncCompile, "triton", _load_kernel, why="kernels are recorded, not compiled"
    )

    kept_define = TritonScheduling.define_kernel

    def define_kernel(self: Any, src_code: str, node_schedule: Any, kernel: Any) -> str:
        name = kept_define(self, src_code, node_schedule, kernel)
        _KERNELS[name] = _kernel_facts(name, node_schedule, kernel)
        return name

    context.patch(TritonScheduling, "define_kernel", define_kernel, why="note what each fused kernel moves")
    context.patch(
        GraphLowering,
        "compile_to_module",
        _compile_to_module,
        why="execute the plan in memory, without Triton",
    )

    class VirtualDeviceOps(CUDADeviceOpOverrides):
        """Host code around kernels: one device, and streams are the recorder's business."""

        def import_get_raw_stream_as(self, name: str) -> str:
            return f"{name} = int"

        def set_device(self, device_idx: int) -> str:
            return "pass"

        def device_guard(self, device_idx: int) -> str:
            return "__import__('contextlib').nullcontext()"

    common.get_device_op_overrides("cuda")
    common.register_device_op_overrides("cuda", VirtualDeviceOps())

    def plan_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        configure_thread()
        if not _touches_gpu(gm, example_inputs):
            return _eager_graph(gm)
        fallback = fx.GraphModule(gm, gm.graph.__deepcopy__({}))
        try:
            return compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)
        except Exception as error:
            context.assume(
                f"a compiled graph of {len(fallback.graph.nodes)} nodes could not be planned and ran op by op "
                f"({summary(error)})"
            )
            return _eager_graph(fallback)

    def inductor_without_triton(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        configure_thread()
        return compile_fx.compile_fx(gm, example_inputs, inner_compile=plan_graph)

    return inductor_without_triton


def configure_thread() -> None:
    """Set torch's compiler options in the calling thread, where they are not set already.

    Since torch 2.12 they are context variables: autograd's threads, which compile graphs too, start from the
    defaults, and torch restores older values when it leaves a patched context.
    """
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    if not (
        inductor_config.fx_graph_cache
        or functorch_config.enable_autograd_cache
        or dynamo_config.automatic_dynamic_shapes
    ):
        return
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = False
    inductor_config.triton.cudagraphs = False
    functorch_config.enable_autograd_cache = False
    dynamo_config.automatic_dynamic_shapes = False
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 256)
    dynamo_config.accumulated_recompile_limit = max(dynamo_config.accumulated_recompile_limit, 4096)


_KERNELS: dict[str, FusedKernel] = {}
"""Kernels of the graph being lowered, by name. Names repeat between graphs; a graph takes its own when loaded."""


def _load_kernel(_self: Any, kernel_name: str, _source: str, device_str: str = "cuda") -> FusedKernel:
    return _KERNELS[kernel_name]


def _kernel_facts(name: str, node_schedule: Any, kernel: Any) -> FusedKernel:
    """What a fused kernel reads, writes and computes, bytes and FLOPs, from inductor's own dependencies."""
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    nodes = [n for n in node_schedule if isinstance(n, SchedulerNode)]
    removed = V.graph.removed_buffers | kernel.removed_buffers
    produced = {dep.name for node in nodes for dep in node.read_writes.writes}
    read, written = _bytes_by_buffer(nodes, "reads"), _bytes_by_buffer(nodes, "writes")
    flops = 0
    for node in nodes:
        data = getattr(node.node, "data", None)
        if data is not None and hasattr(data, "inner_fn_opcount"):
            flops += data.inner_fn_opcount().num_ops * _num_points(node)
    attrs: dict[str, int | float | str] = {
        "name": name,
        "flops": flops,
        "read_bytes": sum(n for buffer, n in read.items() if buffer not in produced),
        "write_bytes": sum(n for buffer, n in written.items() if buffer not in removed),
    }
    arg_names = [arg.name for arg in kernel.args.python_argdefs()[0]]
    return FusedKernel(attrs, arg_names)


def _bytes_by_buffer(nodes: Sequence[Any], direction: str) -> dict[str, int]:
    """Bytes accessed of each buffer: distinct index expressions add up, capped by the buffer's size."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.utils import get_dtype_size
    from torch._inductor.virtualized import V

    accesses: dict[str, dict[Any, int]] = {}
    for node in nodes:
        numel = _num_points(node)
        for dep in getattr(node.read_writes, direction):
            buffer = V.graph.try_get_buffer(dep.name)
            if buffer is None:
                continue
            accessed = V.graph.get_dep_size_hint(dep)
            if not isinstance(dep, MemoryDep) or dep.is_indirect():
                accessed = min(accessed, numel * get_dtype_size(buffer.get_dtype()))
            index = dep.index if isinstance(dep, MemoryDep) else None
            known = accesses.setdefault(dep.name, {})
            known[index] = max(accessed, known.get(index, 0))
    capped = {}
    for name, by_index in accesses.items():
        buffer = V.graph.try_get_buffer(name)
        size = get_dtype_size(buffer.get_dtype()) * math.prod(map(_size_hint, buffer.get_size()))
        capped[name] = min(sum(by_index.values()), size)
    return capped


def _num_points(node: Any) -> int:
    """Points of a node's iteration space, reduced dimensions included."""
    pointwise, reduced = node.get_ranges()
    return math.prod(map(_size_hint, (*pointwise, *reduced)))


def _size_hint(size: Any) -> int:
    """A size as a number; symbolic ones by the example they were traced with."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=0))


def _compile_to_module(graph: Any) -> types.SimpleNamespace:
    """Replaces ``GraphLowering.compile_to_module``: load the generated wrapper from memory."""
    code = graph.codegen()[0]
    module = types.ModuleType(f"prism_region_{graph.graph_id}")
    with _stub_triton():
        exec(compile(code.value, f"<inductor graph {graph.graph_id}>", "exec"), module.__dict__)
    module.empty_strided_cuda = _empty_strided
    module.assert_size_stride = module.assert_alignment = _nothing
    graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []
    mutated = sorted(graph.graph_input_names.index(name) for name in graph.mutated_inputs)
    call = _with_values(module.call, _HostGraph(graph.orig_gm), mutated)
    return types.SimpleNamespace(call=call, runner=None, __file__=None)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _stub_triton():
    """Let the generated module's ``import triton`` succeed; its kernels are strings that nobody compiles."""
    names = [n for n in ("triton", "triton.language") if n not in sys.modules]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    if "triton.language" in names:
        sys.modules["triton"].language = sys.modules["triton.language"]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class _HostGraph:
    """A graph as plain CPU code, for the values of small real tensors. Built at the first use."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._host: fx.GraphModule | None = None

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        if self._host is None:
            graph = self._gm.graph.__deepcopy__({})
            for node in graph.nodes:
                node.args = fx.node.map_aggregate(node.args, _device_to_cpu)
                node.kwargs = fx.node.map_aggregate(node.kwargs, _device_to_cpu)
            self._host = fx.GraphModule(self._gm, graph)
        with torch.no_grad():
            return self._host(*args)


def _device_to_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _with_values(
    call: Callable[[list[Any]], Sequence[Any]], host_graph: _HostGraph, mutated: Sequence[int]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Run the plan; give its outputs real values when every input has them, else mark them synthesized."""

    def run(args: list[Any]) -> Sequence[Any]:
        # The plan frees its inputs as it goes (``args`` is consumed), so only mutated ones are held here.
        changed = [args[i] for i in mutated]
        if any(isinstance(a, torch.Tensor) and is_synthesized(a) for a in args):
            outputs = call(args)
            for tensor in (*changed, *outputs):
                if isinstance(tensor, torch.Tensor) and is_virtual(tensor):
                    mark_synthesized(tensor)
            return outputs
        hosts = [host_view(a).clone() if isinstance(a, torch.Tensor) else a for a in args]
        outputs = call(args)
        if not changed and all(isinstance(t, torch.Tensor) and is_synthesized(t) for t in outputs):
            return outputs  # too large to hold values
        with real_host_tensors():
            values = host_graph(hosts)
        for index, tensor in zip(mutated, changed, strict=True):
            host_view(tensor).copy_(hosts[index])
            mark_real(tensor)
        for tensor, value in zip(outputs, values, strict=True):
            if isinstance(tensor, torch.Tensor) and not is_synthesized(tensor):
                host_view(tensor).copy_(value)
                mark_real(tensor)
        return outputs

    return run


def _touches_gpu(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether any input or intermediate lives on the virtual device."""
    values = [*example_inputs, *(node.meta.get("val") for node in gm.graph.nodes)]
    return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)


def _eager_graph(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Run a graph op by op, in the calling convention of compiled graphs (the list of inputs is consumed)."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)
