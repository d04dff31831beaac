"""How fast a host issues work, by the same two measurements on any machine with torch, whatever its device.

``dispatch_us``: one step of a small training loop on host tensors of a few elements: Python, torch's dispatcher,
autograd, an optimizer. No device takes part, so the ratio of two machines' figures is the ratio of their hosts.

``enqueue_us``: calls of one op by kind on a device whose work nobody waits for. On a GPU that is the dispatcher,
the kernel's own host code (cuBLAS heuristics, TensorIterator), the caching allocator and the driver; on a slice's
virtual device the dispatcher and the recorder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from prism_plugins.program.slices import BENCHMARK_VERSION, HostFigures

KINDS = (
    "view", "elementwise", "gemm", "batched_gemm", "attention", "softmax", "norm", "reduction", "cat", "copy", "fill",
    "gather", "foreach", "event_record", "event_wait", "collective",
)  # fmt: skip
"""Kinds of calls on a device."""
AFTER_ITERATION_S = 0.05
"""Time given to ``dispatch_us`` after each training iteration: the caches hold the iteration, and a step fills but few of them."""
_BATCHES = 7
_NUMEL_SIDE = 192
"""Side of a matrix operand: above the 64 KiB up to which a virtual device computes, short on a GPU."""


class _Scale(torch.autograd.Function):
    """A custom function, of which frameworks have many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * weight, (gradient * x).sum(dim=(0, 1))


class _Layer(nn.Module):
    """The ops of a layer without its arithmetic: (sequence, batch, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        self.norms = nn.ModuleList([nn.LayerNorm(width, device=cpu) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(width, device=cpu))
        self.shift = nn.Parameter(torch.zeros(width, device=cpu))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        s, b, w = x.shape
        y = _Scale.apply(self.norms[0](x), self.scale).view(s, b, 2, w // 2)
        first, second = torch.chunk(y, 2, dim=2)
        rotated = torch.cat((-second, first), dim=2).reshape(s, b, w)
        scores = torch.softmax(rotated.transpose(0, 1).contiguous() * 0.5, dim=-1).transpose(0, 1)
        gated = nn.functional.silu(self.norms[1](scores)) * y.reshape(s, b, w)
        return x + gated + self.shift


class DispatchBenchmark:
    """A training loop that no device takes part in. Draws no random numbers."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._model = nn.Sequential(*(_Layer(8) for _ in range(3)))
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=False)
            self._x = torch.linspace(-1.0, 1.0, 32, device="cpu", dtype=torch.float32).view(2, 2, 8)
            for _ in range(3):
                self._step()

    def measure_us(self, *, budget_s: float) -> float:
        """Median CPU time of a step, microseconds."""
        times: list[float] = []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        until = time.monotonic() + budget_s
        with torch.inference_mode(False), torch.enable_grad():
            while len(times) < _BATCHES or time.monotonic() < until:
                began = time.thread_time()
                self._step()
                times.append(time.thread_time() - began)
        torch.set_num_threads(threads)
        return statistics.median(times) * 1e6

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._x).sum().backward()
        self._optimizer.step()


def figures_of_training(dispatch_us: Iterable[float]) -> HostFigures:
    """Steps that were measured after iterations of this process, and calls on its device measured now."""
    return HostFigures(
        version=BENCHMARK_VERSION,
        dispatch_us=tuple(dispatch_us),
        enqueue_us=measure_enqueue_us(enqueue_calls("cuda") | collective_call("cuda")),
        in_training=True,
    )


def enqueue_calls(device: str) -> dict[str, Callable[[], object]]:
    """One call of each kind, on operands of ``device``."""
    n = _NUMEL_SIDE
    where: Any = {"device": device, "dtype": torch.bfloat16}
    a, b, out = (torch.ones(n, n, **where) for _ in range(3))
    batch, weight = torch.ones(4, n, n, **where), torch.ones(n, **where)
    single = torch.ones(n, n, device=device)
    lists = [[torch.ones(n, n, device=device) for _ in range(8)] for _ in range(2)]
    heads = torch.ones(1, 4, n, 64, **where)
    rows = torch.zeros(n * 48, device=device, dtype=torch.int64)
    event = torch.cuda.Event()
    stream, other = torch.cuda.current_stream(), torch.cuda.Stream()
    return {
        "view": lambda: a.view(-1),
        "elementwise": lambda: torch.add(a, b),
        "gemm": lambda: torch.mm(a, b),
        "batched_gemm": lambda: torch.bmm(batch, batch),
        "attention": lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "softmax": lambda: torch.softmax(a, -1),
        "norm": lambda: nn.functional.layer_norm(a, (n,), weight, weight),
        "reduction": lambda: torch.sum(single, 0),
        "cat": lambda: torch.cat((a, b)),
        "copy": lambda: out.copy_(single),
        "fill": lambda: out.zero_(),
        "gather": lambda: nn.functional.embedding(rows, a),
        "foreach": lambda: torch._foreach_add_(lists[0], lists[1]),
        "event_record": lambda: event.record(stream),
        "event_wait": lambda: other.wait_event(event),
    }


def measure_enqueue_us(calls: dict[str, Callable[[], object]], *, repeats: int = 100) -> dict[str, float]:
    """CPU time of the issuing thread per call, by kind: median over batches, none of which fills the device's queue."""
    found = {}
    with torch.no_grad():
        for kind, call in calls.items():
            times = []
            for _ in range(_BATCHES):
                torch.cuda.synchronize()
                began = time.thread_time()
                for _ in range(repeats):
                    call()
                times.append((time.thread_time() - began) / repeats)
            torch.cuda.synchronize()
            found[kind] = round(statistics.median(times) * 1e6, 3)
    return found


def collective_call(device: str) -> dict[str, Callable[[], object]]:
    """An asynchronous all_reduce in the default group of the process; empty where there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return {}
    x = torch.ones(_NUMEL_SIDE, _NUMEL_SIDE, device=device)
    return {"collective": lambda: dist.all_reduce(x, async_op=True)}
