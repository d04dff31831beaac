"""The prediction as TensorBoard scalars, named as Megatron names its own so that they lie in the same charts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from prism_plugins.emit.console import tightest
from prism_plugins.errors import PrismError
from prism_plugins.program.prediction import Prediction


def scalars(prediction: Prediction) -> dict[str, float]:
    """Tag → value. ``iteration-time`` is in seconds and ``throughput`` in TFLOP/s/GPU, as in Megatron-LM."""
    p = prediction
    values = {"iteration-time": p.iteration_time_ms / 1e3}
    if p.tflops_per_gpu is not None:
        values["throughput"] = p.tflops_per_gpu
    if p.samples_per_s is not None:
        values["prism/samples per second"] = p.samples_per_s
    if p.tokens_per_s_per_gpu is not None:
        values["prism/tokens per second and GPU"] = p.tokens_per_s_per_gpu
    if p.mfu is not None:
        values["prism/mfu"] = p.mfu
    for name in p.breakdown_ms.__struct_fields__:
        values[f"prism/{name} ms"] = getattr(p.breakdown_ms, name)
    for dims, ms in p.exposed_communication_ms.items():
        values[f"prism/exposed {dims} ms"] = ms
    for name, spans in p.timers_ms.items():
        values[f"{name}-time"] = sum(spans) / 1e3
    if p.memory:
        worst = tightest(p.memory)
        values["max-mem-allocated-bytes" if p.framework == "megatron" else "prism/max allocated bytes"] = (
            worst.peak_allocated_bytes
        )
        values["prism/device used bytes"] = worst.device_used_bytes
    return {tag: float(value) for tag, value in values.items()}


def write_tensorboard(folder: Path, prediction: Prediction, *, steps: int = 2) -> None:
    """Write an event file with every scalar at steps 1 to ``steps``, which draws a line.

    Raises :class:`PrismError` where tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise PrismError("tensorboard is not installed: pip install tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder)) as writer:
        for step in range(1, steps + 1):
            for tag, value in scalars(prediction).items():
                writer.add_scalar(tag, value, step)
        writer.add_text("prism/assumptions", "\n\n".join(f"* {line}" for line in prediction.assumptions), 1)
