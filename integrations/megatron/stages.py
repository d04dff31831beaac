"""What each pipeline stage holds, evaluated with Megatron's own functions for every stage."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.layout import check_layers, uneven_layers


class LayerFunctions(msgspec.Struct, frozen=True):
    """The parts of Megatron that say which layers a stage holds."""

    parallel_state: ModuleType
    transformer_block: ModuleType
    transformer_layer: ModuleType

    @contextlib.contextmanager
    def as_stage(self, stage: int) -> Iterator[None]:
        """Let ``parallel_state`` answer as a rank of ``stage``."""
        state = self.parallel_state
        name = "_MPU_PIPELINE_MODEL_PARALLEL_RANK"
        original = getattr(state, name)
        setattr(state, name, stage)
        try:
            yield
        finally:
            setattr(state, name, original)

    def layers(self, config: Any, stage: int, chunk: int | None) -> int:
        """Transformer layers of a chunk."""
        with self.as_stage(stage):
            return _call(self.transformer_block.get_num_layers_to_build, config, stage, chunk)

    def offset(self, config: Any, stage: int, chunk: int | None) -> int:
        """Global index of the first layer of a chunk."""
        with self.as_stage(stage):
            return _call(self.transformer_layer.get_transformer_layer_offset, config, stage, chunk)


def has_plain_layers(config: Any) -> bool:
    """Whether the model is a stack that ``get_num_layers_to_build`` describes (not a hybrid or custom one)."""
    return not getattr(config, "is_hybrid_model", False)


def check_stage_layers(functions: LayerFunctions, config: Any) -> None:
    """Raise :class:`PrismError` when the layers do not divide over stages and chunks."""
    pp = config.pipeline_model_parallel_size
    if pp == 1 or not has_plain_layers(config) or _custom_layout(config) is not None:
        return
    chunks = _chunks(config)
    try:
        built = [[functions.layers(config, stage, chunk) for chunk in chunks] for stage in range(pp)]
    except AssertionError as error:
        raise uneven_layers(
            config.num_layers, pp, " ".join(str(error).split()) or "Megatron refuses it", chunks=len(chunks)
        ) from error
    check_layers(config.num_layers, built, pp=pp)


def stage_fingerprints(functions: LayerFunctions, config: Any, *, shared_embedding: bool) -> tuple[str, ...]:
    """For each stage a text that is equal for stages that hold the same, e.g. ``8x dense`` or ``embedding, 8x dense``.

    Chunks are separated by ``|``. A model whose layers are not described by Megatron's layer functions gets a
    text of its own per stage, so that no stage stands for another.
    """
    pp = config.pipeline_model_parallel_size
    if not has_plain_layers(config):
        return tuple(f"stage {stage} of a hybrid model" for stage in range(pp))
    chunks = _chunks(config)
    return tuple(
        " | ".join(
            _chunk_text(functions, config, stage, chunk, pp, len(chunks), shared_embedding)
            for chunk in chunks
        )
        for stage in range(pp)
    )


def layers_of_stages(functions: LayerFunctions, config: Any) -> tuple[int, ...]:
    """Transformer layers of each stage; zeros where Megatron's layer functions do not describe the model."""
    pp = config.pipeline_model_parallel_size
    if not has_plain_layers(config):
        return (0,) * pp
    return tuple(
        sum(functions.layers(config, stage, chunk) for chunk in _chunks(config)) for stage in range(pp)
    )


def _chunk_text(
    functions: LayerFunctions,
    config: Any,
    stage: int,
    chunk: int | None,
    pp: int,
    num_chunks: int,
    shared_embedding: bool,
) -> str:
    first = stage == 0 and not chunk
    last = stage == pp - 1 and (chunk is None or chunk == num_chunks - 1)
    count = functions.layers(config, stage, chunk)
    offset = functions.offset(config, stage, chunk) if count else 0
    texts = ["embedding"] if first else []
    texts += _runs([layer_kind(config, offset + i) for i in range(count)])
    texts += _mtp(config, stage, chunk or 0, last)
    if last:
        texts.append("loss (tied to the embedding)" if shared_embedding else "loss")
    return ", ".join(texts) or "nothing"


def layer_kind(config: Any, index: int) -> str:
    """What the layer with this global index is made of, as far as it may differ between layers of a model."""
    kinds = ["moe" if _in_pattern(config, "moe_layer_freq", index) and _has_experts(config) else "dense"]
    if getattr(config, "linear_attention_freq", None) is not None:
        linear = _every_other_than(config.linear_attention_freq, index)
        kinds.append("linear attention" if linear else "full attention")
    for name in ("no_rope_freq", "window_attn_skip_freq"):
        pattern = getattr(config, name, None)
        if pattern is not None:
            kinds.append(f"{name} {_every_other_than(pattern, index)}")
    if getattr(config, "heterogeneous_block_specs", False):
        kinds.append(repr(config.per_block_parameters[index]))
    if getattr(config, "apply_query_key_layer_scaling", False):
        kinds.append(f"scaled as layer {index + 1}")
    return " ".join(kinds)


def _mtp(config: Any, stage: int, chunk: int, last: bool) -> list[str]:
    count = getattr(config, "mtp_num_layers", None)
    if not count:
        return []
    layout = _custom_layout(config)
    if layout is not None:
        names = [getattr(kind, "name", str(kind)) for kind in layout.layout[stage][chunk]]
        count = names.count("mtp")
        return [f"{count}x mtp"] if count else []
    return [f"{count}x mtp"] if last else []


def _has_experts(config: Any) -> bool:
    return getattr(config, "num_moe_experts", None) is not None


def _in_pattern(config: Any, name: str, index: int) -> bool:
    """Megatron's reading of a layer frequency: every n-th layer from layer 0, or an explicit list."""
    pattern = getattr(config, name, 1)
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def _every_other_than(pattern: Any, index: int) -> bool:
    """Megatron's reading of a (n-1):n pattern: all but every n-th layer, or an explicit list."""
    return (index + 1) % pattern != 0 if isinstance(pattern, int) else bool(pattern[index])


def _runs(kinds: list[str]) -> list[str]:
    texts: list[str] = []
    start = 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            texts.append(f"{i - start}x {kinds[start]}")
            start = i
    return texts


def _chunks(config: Any) -> list[int | None]:
    vpp = config.virtual_pipeline_model_parallel_size
    return [None] if vpp is None else list(range(vpp))


def _custom_layout(config: Any) -> Any:
    return getattr(config, "pipeline_model_parallel_layout", None)


def _call(function: Any, config: Any, stage: int, chunk: int | None) -> int:
    parameters = inspect.signature(function).parameters
    arguments = {"vp_stage": chunk, "pp_rank": stage}
    try:
        return function(config, **{k: v for k, v in arguments.items() if k in parameters})
    except TypeError as error:
        raise PrismError(
            f"Megatron's {function.__name__} takes other arguments than prism knows: {error}"
        ) from error
