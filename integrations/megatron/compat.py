"""What a training script does around its iterations that must neither fail nor leave traces when emulated.

Each hook replaces one function of Megatron; whatever is skipped or assumed is said through
``SliceContext.assume`` when it happens, not before.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integrations.megatron.session import Session

HELPERS = "megatron.core.datasets.helpers_cpp"


# --- compiled helpers and kernels ---


def _compile_helpers(session: Session, original: Any, module: ModuleType) -> Any:
    """One process at a time compiles, for the Python that runs; nothing is compiled that is there already."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        folder = Path(module.__file__).parent
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        with (Path(tempfile.gettempdir()) / f"prism-megatron-helpers-{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            importlib.invalidate_caches()
            if importlib.util.find_spec(HELPERS) is None:
                _make_helpers(folder)

    return compile_helpers


def _make_helpers(folder: Path) -> None:
    try:
        import pybind11
    except ImportError:
        raise PrismError(
            "Megatron compiles its dataset helpers with pybind11, which is not installed: pip install pybind11"
        ) from None
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    command = [
        "make",
        "-C",
        str(folder),
        f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
        f"CPPFLAGS={' '.join(f'-I{path}' for path in includes)}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PrismError("Megatron compiles its dataset helpers with make, which is not installed") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PrismError(f"Megatron's dataset helpers in {folder} do not compile: {last}")
    importlib.invalidate_caches()


def _load_fused_kernels(session: Session, original: Any, module: ModuleType) -> Any:
    """Megatron's legacy fused kernels ask nvcc for its version and compile nothing that its core uses."""

    def load(args: Any) -> None:
        return None

    return load


# --- checkpoints and evaluation ---


def _save_checkpoint(session: Session, original: Any, module: ModuleType) -> Any:
    def save(*args: Any, **kwargs: Any) -> None:
        session.context.assume("checkpoints are not written, and their time is not part of an iteration")

    return functools.wraps(original)(save)


def _load_checkpoint(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> tuple[int, int]:
        session.context.assume(
            "checkpoints are not read: training starts at iteration 0 with synthesized weights"
        )
        return 0, 0

    return load


def _dist_checkpoint_save(session: Session, original: Any, module: ModuleType) -> Any:
    return _save_checkpoint(session, original, module)


def _dist_checkpoint_load(session: Session, original: Any, module: ModuleType) -> Any:
    """Hands back the tensors that the checkpoint would have been read into."""

    @functools.wraps(original)
    def load(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        session.context.assume("checkpoints are not read: the state stays as it was initialised")
        sharded = (ShardedTensor, ShardedObject)
        return dict_list_map_outplace(lambda x: x.data if isinstance(x, sharded) else x, sharded_state_dict)

    return load


def _evaluate(session: Session, original: Any, module: ModuleType) -> Any:
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> None:
        session.context.assume("evaluation is skipped: only training iterations are predicted")

    return functools.wraps(original)(evaluate_and_print_results)


# --- data ---


def _num_samples(session: Session, original: Any, module: ModuleType) -> Any:
    """Index caches of a whole training run are large, and a slice sees a few iterations of it."""

    @functools.wraps(original)
    def get_train_valid_test_num_samples() -> tuple[Any, ...]:
        batch = module.get_args().global_batch_size
        enough = (session.context.spec.iterations + 2) * batch
        train, *others = original()
        return (min(train, enough), *(n if n is None else min(n, batch) for n in others))

    return get_train_valid_test_num_samples


def _build_indices(session: Session, original: Any, module: ModuleType) -> Any:
    """Every slice builds its index in memory: there is no rank 0 at its side to write it, and nothing is left."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        self.config = copy.copy(config)
        # With mock set and no path, Megatron neither reads nor writes a cache; it means nothing else here.
        self.config.mock, self.config.path_to_cache, self.config.defer_npy_index_mmap = True, None, False
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = config

    return build


def _batch_of_tp_rank(session: Session, original: Any, module: ModuleType) -> Any:
    """Ranks that get their batch from a virtual peer count every token in the loss, as the mock data does."""

    @functools.wraps(original)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        mask = batch.get("loss_mask")
        is_source = module.mpu.get_tensor_model_parallel_rank() == 0
        if mask is not None and not is_source and not session.context.spec.real_ranks:
            from prism_plugins.device.tensors import host_view, is_shape_only

            if not is_shape_only(mask):
                host_view(mask).fill_(1)
        return batch

    return get_batch_on_this_tp_rank


def _embedding(session: Session, original: Any, module: ModuleType) -> Any:
    """On a real GPU every rank embeds tokens of its own part of the vocabulary.

    Mock data holds small token numbers, which all fall into the first rank's part: other ranks would embed zeros, and by
    mirror semantics compute on zeros from there on. That draws less power, and clocks higher, than the job does.
    """
    if session.context.spec.device != "cuda" or session.context.spec.real_ranks:
        return original

    @functools.wraps(original)
    def forward(self: Any, input_: Any) -> Any:
        part = self.num_embeddings_per_partition
        if part < self.num_embeddings:
            from prism_plugins.capture.recorder import get_recorder

            session.context.assume(
                "tokens are folded into each tensor-parallel rank's part of the vocabulary"
            )
            with get_recorder().answering():
                input_.remainder_(part).add_(self.vocab_start_index)
        return original(self, input_)

    return forward


# --- writers ---


def _no_writer(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def set_writer(args: Any) -> None:
        if getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", ""):
            session.context.assume("nothing is written to TensorBoard or Weights & Biases")

    return set_writer


def _no_progress_log(session: Session, original: Any, module: ModuleType) -> Any:
    """``progress.txt`` in the checkpoint directory tells a real job's later runs how far it came."""

    def append_to_progress_log(*args: Any, **kwargs: Any) -> None:
        session.context.assume("nothing is appended to the job's progress log")

    return functools.wraps(original)(append_to_progress_log)


def _no_straggler_detector(session: Session, original: Any, module: ModuleType) -> Any:
    """The detector reads clocks, power and temperature of the GPU and compares ranks, all but one virtual."""

    @functools.wraps(original)
    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        session.context.assume("the straggler detector stays off")

    return nothing


# --- norms without Apex or Transformer Engine ---


def _torch_norm(session: Session, original: Any, module: ModuleType) -> Any:
    """Sequence parallelism with torch's norms, which Megatron refuses because only Apex's or TE's mark their weights.

    The weights are marked as those norms do it, so their gradients are reduced over the tensor-parallel group.
    """

    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        needs_apex = [
            name for name in ("sequence_parallel", "persist_layer_norm") if getattr(config, name, False)
        ]
        if not needs_apex:
            return original(cls, config, *args, **kwargs)
        session.context.assume(
            f"Apex is not installed: {config.normalization} with {' and '.join(needs_apex)} is emulated by torch's "
            "kernels"
        )
        plain = copy.copy(config)
        for name in needs_apex:
            setattr(plain, name, False)
        norm = original(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _next_batch(session: Session, original: Any, module: ModuleType) -> Any:
    """A slice never reruns an iteration: drop the micro-batches Megatron keeps for that, which with dense
    attention masks are hundreds of MiB of host memory an iteration."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        batch = original(self)
        self.saved_microbatches.clear()
        return batch

    return __next__


HOOKS = (
    (
        "megatron.core.rerun_state_machine",
        "RerunDataIterator.__next__",
        _next_batch,
        "micro-batches kept for a rerun",
    ),
    ("megatron.core.datasets.utils", "compile_helpers", _compile_helpers, "slices compile at the same time"),
    (
        "megatron.core.tensor_parallel.layers",
        "VocabParallelEmbedding.forward",
        _embedding,
        "activations of zeros on a real GPU",
    ),
    ("megatron.legacy.fused_kernels", "load", _load_fused_kernels, "asks nvcc for its version"),
    ("megatron.training.training", "save_checkpoint", _save_checkpoint, "checkpoints are emulated"),
    ("megatron.training.training", "save_checkpoint_and_time", _save_checkpoint, "checkpoints are emulated"),
    ("megatron.training.training", "load_checkpoint", _load_checkpoint, "checkpoints are emulated"),
    (
        "megatron.core.dist_checkpointing.serialization",
        "save",
        _dist_checkpoint_save,
        "checkpoints are emulated",
    ),
    (
        "megatron.core.dist_checkpointing.serialization",
        "load",
        _dist_checkpoint_load,
        "checkpoints are emulated",
    ),
    ("megatron.training.training", "evaluate_and_print_results", _evaluate, "evaluation is skipped"),
    ("megatron.training.training", "get_train_valid_test_num_samples", _num_samples, "large index caches"),
    (
        "megatron.core.datasets.gpt_dataset",
        "GPTDataset._build_document_sample_shuffle_indices",
        _build_indices,
        "index caches that rank 0 alone writes",
    ),
    (
        "megatron.core.datasets.blended_dataset",
        "BlendedDataset._build_indices",
        _build_indices,
        "index caches that rank 0 alone writes",
    ),
    ("megatron.training.utils", "get_batch_on_this_tp_rank", _batch_of_tp_rank, "batches of a virtual peer"),
    ("megatron.training.global_vars", "_set_tensorboard_writer", _no_writer, "writers are harmless"),
    ("megatron.core.utils", "StragglerDetector.configure", _no_straggler_detector, "reads the real GPU"),
    ("megatron.core.utils", "StragglerDetector.report", _no_straggler_detector, "reads the real GPU"),
    ("megatron.training.utils", "append_to_progress_log", _no_progress_log, "writers are harmless"),
    ("megatron.training.global_vars", "_set_wandb_writer", _no_writer, "writers are harmless"),
    (
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        _torch_norm,
        "sequence parallelism without Apex",
    ),
)
"""(module, attribute, wrapper, why)."""
