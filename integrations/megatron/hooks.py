"""Every place where the integration hooks Megatron, as one table."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.megatron import compat, moe
from prism_plugins.integrations.megatron.layout import ParallelSizes, check_world_size
from prism_plugins.integrations.megatron.phases import (
    P2P_METHODS,
    wrap_backward_step,
    wrap_forward_step,
    wrap_p2p,
)
from prism_plugins.integrations.megatron.refusals import NOT_EMULATED, REFUSING, not_emulated, translated
from prism_plugins.integrations.megatron.session import BatchShape, Session
from prism_plugins.integrations.megatron.shards import ORIGINAL_GROUPS, remember_param_groups
from prism_plugins.program.model import Phase

SUPPORTED = "megatron-core 0.12 to 0.19"


def hook_table() -> list[Hook]:
    """The table. Where two hooks name the same attribute, the later one wraps the earlier."""
    schedules = "megatron.core.pipeline_parallel.schedules"
    p2p = "megatron.core.pipeline_parallel.p2p_communication"
    optimizer = "megatron.core.optimizer.optimizer"
    training = "megatron.training.training"
    table = [
        Hook(schedules, "forward_step", _forward_step, "phase forward"),
        Hook(schedules, "backward_step", _backward_step, "phase backward"),
        Hook(schedules, "forward_backward_no_pipelining", _scheduler, "iterations and gradient sync"),
        Hook(schedules, "forward_backward_pipelining_without_interleaving", _scheduler, "the same"),
        Hook(schedules, "forward_backward_pipelining_with_interleaving", _scheduler, "the same"),
        *(
            Hook(
                p2p,
                f"P2PCommunicator.{name}",
                functools.partial(_p2p, name),
                f"phase {name}",
                formerly=name,
            )
            for name in P2P_METHODS
        ),
        Hook(
            "megatron.core.parallel_state",
            "initialize_model_parallel",
            _initialize_model_parallel,
            "layout of the job",
        ),
        *(
            Hook(optimizer, f"{name}.step", _optimizer_step, "phase optimizer")
            for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
        ),
        *(
            Hook(optimizer, f"{name}.__init__", _optimizer_init, "optimizer state and shards")
            for name in ("MixedPrecisionOptimizer", "FP32Optimizer")
        ),
        Hook(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer.__init__",
            _distributed_optimizer_init,
            "parameter groups before they are sharded",
        ),
        Hook(
            "megatron.core.optimizer.layer_wise_optimizer",
            "LayerWiseDistributedOptimizer.__init__",
            _layer_wise_init,
            "sharding that is not computed",
            required=False,
        ),
        Hook(
            "torch.optim.optimizer",
            "register_optimizer_step_pre_hook",
            _torch_optimizer,
            "phase optimizer of scripts that bring their own",
        ),
        Hook(training, "train_step", _train_step, "iterations"),
        *(
            Hook(module, attribute, _refusing, "Megatron's refusals in one line", required=False)
            for module, attribute in REFUSING
        ),
        *(
            Hook(
                module,
                attribute,
                functools.partial(_not_emulated, option, why),
                f"{option} is not emulated yet",
                required=False,
            )
            for module, attribute, option, why in NOT_EMULATED
        ),
        Hook(
            "megatron.core.transformer.transformer_config",
            "TransformerConfig.__post_init__",
            _check_config,
            "layers that do not divide over the stages",
        ),
        Hook("megatron.training.arguments", "validate_args", _validate_args, "a layout that does not fit"),
    ]
    for module, attribute, wrap, why in (*compat.HOOKS, *moe.HOOKS):
        table.append(Hook(module, attribute, wrap, why, required=False))
    return table


# --- phases ---


def _forward_step(session: Session, original: Any, module: ModuleType) -> Any:
    return wrap_forward_step(session.tracker, original)


def _backward_step(session: Session, original: Any, module: ModuleType) -> Any:
    return wrap_backward_step(session.tracker, original)


def _p2p(name: str, session: Session, original: Any, module: ModuleType) -> Any:
    return wrap_p2p(session.tracker, original, name, inspect.signature(original))


def _optimizer_step(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        return session.tracker.run(Phase(kind="optimizer"), lambda: original(*args, **kwargs))

    return step


def _torch_optimizer(session: Session, original: Any, module: ModuleType) -> Any:
    """Optimizers of torch that a script steps itself, through torch's own hooks around every ``step``."""
    opened = [False]

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        opened[0] = session.iterating and not session.tracker.is_open
        if opened[0]:
            if optimizer not in session.optimizers:
                session.optimizers.append(optimizer)
            session.tracker.begin(Phase(kind="optimizer"))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if opened[0]:
            opened[0] = False
            session.tracker.end()

    original(before)
    module.register_optimizer_step_post_hook(after)
    return original


# --- iterations ---


def _scheduler(session: Session, original: Any, module: ModuleType) -> Any:
    """A forward-backward function; without ``megatron.training``, an iteration lasts from one call to the next."""

    @functools.wraps(original)
    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
        config = module.get_model_config(model[0])
        session.phase_syncs(config)
        if not session.in_training_loop:
            if kwargs.get("forward_only"):
                session.end_iteration()
            else:
                batch = BatchShape(
                    num_microbatches=kwargs["num_microbatches"],
                    micro_batch_size=kwargs["micro_batch_size"],
                    seq_length=kwargs["seq_length"],
                )
                session.begin_iteration(model, config, batch)
        return original(*args, **kwargs)

    return forward_backward


def _train_step(session: Session, original: Any, module: ModuleType) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        settings = module.get_args()
        batch = BatchShape(
            num_microbatches=module.get_num_microbatches(),
            micro_batch_size=settings.micro_batch_size,
            seq_length=settings.seq_length,
        )
        session.in_training_loop = True
        session.begin_iteration(arguments["model"], arguments["config"], batch)
        result = original(*args, **kwargs)
        session.end_iteration()
        return result

    return train_step


# --- what the job is ---


def _initialize_model_parallel(session: Session, original: Any, module: ModuleType) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        session.sizes = ParallelSizes.of_call(bound.arguments)
        check_world_size(session.context.spec.world_size, session.sizes)
        return original(*args, **kwargs)

    return initialize_model_parallel


def _optimizer_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session.optimizers.append(self)
        original(self, *args, **kwargs)

    return init


def _distributed_optimizer_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, ORIGINAL_GROUPS, remember_param_groups(optimizer))
        original(self, optimizer, *args, **kwargs)

    return init


def _layer_wise_init(session: Session, original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session.layer_wise_optimizer = True
        original(self, *args, **kwargs)

    return init


# --- what Megatron would refuse ---


def _refusing(session: Session, original: Any, module: ModuleType) -> Any:
    return translated(original)


def _not_emulated(option: str, why: str, session: Session, original: Any, module: ModuleType) -> Any:
    # Ranks that all really run have no virtual peers.
    return original if session.context.spec.real_ranks else not_emulated(original, option, why)


def _check_config(session: Session, original: Any, module: ModuleType) -> Any:
    from prism_plugins.integrations.megatron.stages import check_stage_layers

    checked = translated(original)

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        checked(self, *args, **kwargs)
        from prism_plugins.integrations.megatron.facts import layer_functions

        check_stage_layers(layer_functions(), self)

    return post_init


def _validate_args(session: Session, original: Any, module: ModuleType) -> Any:
    from prism_plugins.integrations.megatron.arguments import check_args

    checked = translated(original)

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        check_args(session.context.spec.world_size, args)
        return checked(args, *rest, **kwargs)

    return validate_args
