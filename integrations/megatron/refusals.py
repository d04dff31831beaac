"""Megatron's own refusals (assertions with a message) as one line for the user instead of a traceback."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism_plugins.errors import PrismError

REFUSING = (
    ("megatron.core.num_microbatches_calculator", "init_num_microbatches_calculator"),
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear.__init__"),
    ("megatron.core.tensor_parallel.layers", "RowParallelLinear.__init__"),
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention.__init__"),
    ("megatron.core.transformer.torch_norm", "WrappedTorchNorm.__new__"),
    ("megatron.core.fusions.fused_layer_norm", "FusedLayerNorm.__init__"),
    ("megatron.core.ssm.mamba_mixer", "MambaMixer.__init__"),
    ("megatron.core.optimizer", "get_megatron_optimizer"),
    ("megatron.core.optimizer.muon", "get_megatron_muon_optimizer"),
)
"""(module, attribute) of functions that refuse a configuration; whatever they assert is the user's to mend."""

_GRAPHS = "a graph's capture and replay are not recorded; without graphs the same kernels run, and the host launches each of them"

NOT_EMULATED = (
    (
        "megatron.core.transformer.cuda_graphs",
        "CudaGraphManager.__init__",
        "--cuda-graph-impl local",
        _GRAPHS,
    ),
    (
        "megatron.core.transformer.cuda_graphs",
        "TECudaGraphHelper.__init__",
        "--cuda-graph-impl transformer_engine",
        _GRAPHS,
    ),
    (
        "megatron.core.full_cuda_graph",
        "FullCudaGraphWrapper.__init__",
        "a graph of the whole iteration",
        _GRAPHS,
    ),
    (
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        "FullyShardedDataParallel.__init__",
        "--use-megatron-fsdp",
        "its ranks tell each other which part of every parameter they hold, and virtual peers do not know",
    ),
)
"""(module, attribute, option, why): what a slice with virtual peers cannot run yet."""

ADVICE = (
    (
        "gradient_accumulation_fusion",
        "add --prism-apex if the cluster has Apex, else --no-gradient-accumulation-fusion",
    ),
    ("persist_layer_norm", "add --prism-apex if the cluster has Apex, else --no-persist-layer-norm"),
    ("scaled_masked_softmax", "add --prism-apex if the cluster has Apex, else --no-masked-softmax-fusion"),
    ("rope_fusion", "run `prism setup-te` (Transformer Engine's Python layer), or add --no-rope-fusion"),
    ("mambassm", "which cannot be emulated yet: mamba-ssm launches CUDA kernels"),
    ("context parallelism is only supported", "run `prism setup-te` (Transformer Engine's Python layer)"),
    (
        "apex",
        "add --prism-apex if the cluster has Apex (or install it, or Transformer Engine), or switch the feature off",
    ),
    (
        "transformer_engine",
        "run `prism setup-te` (Transformer Engine's Python layer), or use --transformer-impl local",
    ),
    (
        "transformer engine",
        "run `prism setup-te` (Transformer Engine's Python layer), or use --transformer-impl local",
    ),
)
"""(what the message mentions, what to do), first match counts."""


def translated(function: Callable) -> Callable:
    """``function`` with its assertions and errors raised as :class:`PrismError`; not that memory ran out."""

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (AssertionError, ValueError, RuntimeError, ImportError) as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's, a RuntimeError
                raise
            raise refusal(error) from error

    return refusing


def not_emulated(function: Callable, option: str, why: str) -> Callable:
    """``function`` replaced by a :class:`PrismError` that names the option."""

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> None:
        raise PrismError(f"{option} is not emulated yet: {why}")

    return refusing


def refusal(error: BaseException) -> PrismError:
    """One line: what Megatron says, where it says it, and what to do where that is known."""
    text = " ".join(str(error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if not text:
        text = f"it asserts `{frame.line}`"
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    lowered = text.lower()
    advice = next((f", {what}" for word, what in ADVICE if word in lowered), "")
    # The message ends the line: Megatron appends to it where it happened.
    return PrismError(f"Megatron refuses this configuration{advice} ({where}): {text}")
