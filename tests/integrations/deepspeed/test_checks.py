"""Mistakes in a DeepSpeed configuration: refused in one line, or found where DeepSpeed says nothing."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from prism_plugins.errors import PrismError
from prism_plugins.integrations.deepspeed import checks
from prism_plugins.integrations.deepspeed.checks import batch_problem, engine_findings
from prism_plugins.integrations.deepspeed.session import Session

pytest.importorskip("deepspeed")

GIB = 2**30


class Context:
    def __init__(self):
        self.findings = []
        self.files = []

    def finding(self, finding):
        self.findings.append(finding)

    def depends_on(self, path):
        self.files.append(path)


@pytest.fixture
def configure(monkeypatch):
    """DeepSpeed's own DeepSpeedConfig, hooked, in a data-parallel world of 64; returns what was found."""
    from deepspeed.runtime import config as module

    session = Session(Context())
    for hook in checks.HOOKS:
        if hook.module == module.__name__:
            name = hook.attribute.partition(".")[2]
            original = getattr(module.DeepSpeedConfig, name)
            monkeypatch.setattr(module.DeepSpeedConfig, name, hook.wrap(session, original, module))
    monkeypatch.setattr(module.dist, "get_rank", lambda *a: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda *a: 64)

    def configure(config):
        module.DeepSpeedConfig(config)
        return session.context

    return configure


def config(**changes):
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}} | changes


def test_a_proper_configuration_has_no_findings(configure, tmp_path):
    proper = config(
        steps_per_print=1,
        bf16={"enabled": True},
        sequence_parallel_size=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "own_option": 3}},
        activation_checkpointing={"partition_activations": True},
        flops_profiler={"enabled": False, "profile_step": 3},
        tensorboard={"enabled": False},
        comms_logger={"enabled": False},
        data_types={"grad_accum_dtype": "fp32"},
        _comment="ours",
    )
    assert configure(proper).findings == []
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(proper))
    context = configure(str(path))
    assert (context.findings, context.files) == ([], [path])


@pytest.mark.parametrize(
    ("changes", "severity", "said"),
    [
        ({"zero_optimisation": {"stage": 3}}, "warning", "'zero_optimisation'.*mean 'zero_optimization'"),
        ({"gradient_acumulation_steps": 4}, "warning", "did you mean 'gradient_accumulation_steps'"),
        ({"overlap_comm": True}, "warning", "belongs into 'zero_optimization'"),
        ({"stage3_prefetch_bucket_size": 5}, "warning", "belongs into 'zero_optimization'"),
        ({"our_own_tool": 1}, "info", "does not know the key 'our_own_tool'"),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "warning",
            "did you mean 'activation_checkpointing.partition_activations'",
        ),
    ],
)
def test_keys_that_deepspeed_ignores_are_found(configure, changes, severity, said):
    (finding,) = configure(config(**changes)).findings
    assert (finding.kind, finding.severity) == ("config", severity)
    assert re.search(said, finding.message)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimization": {"stge": 3}}, "zero_optimization: unknown key 'stge', did you mean 'stage'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size = 'big'"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization: stage = 7"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "filled in by Hugging Face"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "cannot be simultaneously enabled"),
        ({"elasticity": {"enabled": True}}, "Elastic training has been removed"),
        ({"autotuning": {"enabled": True}}, "autotuning is not emulated"),
    ],
)
def test_what_deepspeed_refuses_is_one_line(configure, changes, said):
    with pytest.raises(PrismError, match=said) as caught:
        configure(config(**changes))
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_broken(configure, tmp_path):
    with pytest.raises(PrismError, match=r"none\.json does not exist"):
        configure(str(tmp_path / "none.json"))
    path = tmp_path / "broken.json"
    path.write_text('{"train_batch_size": 8,\n "bf16" true}')
    with pytest.raises(PrismError, match=r"broken\.json is not valid JSON: line 2, column 9"):
        configure(str(path))
    path.write_text('{"train_batch_size": 64, "train_batch_size": 128}')
    with pytest.raises(PrismError, match=r"Duplicate keys in DeepSpeed config: .'train_batch_size'."):
        configure(str(path))
    path.write_bytes(b'{"train_batch_size": 64, "x": "\xff"}')
    with pytest.raises(PrismError, match="cannot be read"):
        configure(str(path))
    path.write_text("[1, 2]")
    with pytest.raises(PrismError, match="holds a list instead of a JSON object"):
        configure(str(path))
    for special in (str(tmp_path), "/dev/zero"):
        with pytest.raises(PrismError, match="is not a file"):
            configure(special)


def test_a_batch_size_that_does_not_fit_the_world_is_told_with_what_would(configure):
    with pytest.raises(
        PrismError, match=r"set train_batch_size to 128, or gradient_accumulation_steps to 2$"
    ):
        configure(config(train_batch_size=256, gradient_accumulation_steps=1))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((100, None, None), "64 data-parallel ranks = 64 samples or a multiple; train_batch_size 64 or 128"),
        ((32, None, None), "train_batch_size 64 would fit"),
        ((256, 3, None), "micro-batch 3 x 64 data-parallel ranks = 192 .*; train_batch_size 192 or 384 "),
        ((256, 2, 1), "set train_batch_size to 128, or gradient_accumulation_steps to 2"),
        ((192, 2, 1), "set train_batch_size to 128, or train_micro_batch_size_per_gpu to 3"),
        ((0, 2, 1), "train_batch_size is 0, it must be positive"),
    ],
)
def test_batch_sizes(sizes, said):
    assert re.search(said, batch_problem(*sizes, data_parallel=64))


def engine(stage=2, bucket=500_000_000, overlap=True, elements=10**9, dp=64, **zero):
    import torch

    optimizer = SimpleNamespace(
        ipg_buckets={torch.bfloat16: None},
        contiguous_gradients=True,
        overlap_comm=overlap,
        reduce_bucket_size=bucket,
        _gradient_reduction_buffer_dtype=lambda: torch.bfloat16,
    )
    param = SimpleNamespace(numel=lambda: elements, requires_grad=True)
    return SimpleNamespace(
        optimizer=optimizer,
        seq_dp_world_size=dp,
        module=SimpleNamespace(parameters=lambda: [param]),
        zero_optimization_stage=lambda: stage,
        zero_reduce_bucket_size=lambda: bucket,
        _config=SimpleNamespace(_param_dict={"zero_optimization": {"overlap_comm": overlap} | zero}),
    )


def test_a_usual_engine_has_no_findings():
    for stage in (1, 2, 3):
        assert engine_findings(engine(stage=stage), 80 * GIB) == []
        assert engine_findings(engine(stage=stage, overlap=False, dp=1), 80 * GIB) == []


@pytest.mark.parametrize(
    ("changes", "severity", "said"),
    [
        ({"bucket": 10**10, "elements": 10**11}, "warning", "2 buffers of 37.3 GiB in all, 47 % of the GPU"),
        (
            {"bucket": 5 * 10**10, "elements": 10**11},
            "error",
            "186.3 GiB in all, more than the GPU's 80.0 GiB",
        ),
        ({"stage": 3, "bucket": 5 * 10**10}, "error", "makes a buffer of 93.1 GiB"),
    ],
)
def test_buckets_beside_which_nothing_fits(changes, severity, said):
    (finding,) = engine_findings(engine(**changes), 80 * GIB)
    assert (finding.kind, finding.severity) == ("bucket", severity)
    assert said in finding.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": 0}, "stage is 0"),
        ({"dp": 1}, "one data-parallel rank"),
        ({"stage": 3, "dp": 1}, "one data-parallel rank"),
        ({"elements": 10**6}, "all 1,000,000 gradient elements fit into one bucket"),
    ],
)
def test_overlap_without_effect(changes, said):
    (finding,) = engine_findings(engine(**changes), 80 * GIB)
    assert (finding.kind, finding.severity) == ("overlap", "warning")
    assert said in finding.message


@pytest.mark.parametrize(
    "optimizer", [None, type("DummyOptim", (), {})(), type("DeepSpeedZeRoOffload", (), {})()]
)
def test_an_engine_without_optimizer_cannot_train(optimizer):
    hook = next(hook for hook in checks.HOOKS if hook.attribute == "DeepSpeedEngine.backward")
    backward = hook.wrap(Session(Context()), lambda self, loss: loss, None)
    with pytest.raises(PrismError, match="needs an optimizer"):
        backward(SimpleNamespace(optimizer=optimizer), 3)
    assert backward(SimpleNamespace(optimizer=object()), 3) == 3


def test_ranks_that_call_other_modules_than_rank_0_are_a_finding_and_the_script_goes_on(monkeypatch):
    from deepspeed.runtime.zero import partitioned_param_coordinator, utils

    monkeypatch.setattr(utils.dist, "get_rank", lambda *a: 2)
    monkeypatch.setattr(utils.dist, "broadcast", lambda tensor, **_: tensor.fill_(7))
    monkeypatch.setattr(utils, "get_accelerator", lambda: SimpleNamespace(device_name=lambda _: "cpu"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    session = Session(Context())
    session.context.spec = SimpleNamespace(rank=2)
    (hook,) = (h for h in checks.HOOKS if h.attribute == "assert_ints_same_as_other_ranks")
    hooked = hook.wrap(session, utils.assert_ints_same_as_other_ranks, partitioned_param_coordinator)
    hooked([7] * 7)
    assert session.context.findings == []
    hooked([7] * 6)
    (finding,) = session.context.findings
    assert (finding.kind, finding.severity, finding.ranks) == ("mismatch", "error", "0,2")
    assert "rank0: 7 rank2: 6" in finding.message


def test_parameters_that_an_optimizer_does_not_have_are_one_line():
    from deepspeed.runtime import engine as module

    refuse = checks._refusing(None, module.DeepSpeedEngine._scheduler_from_config, module)

    def engine(name, **params):
        return SimpleNamespace(scheduler_name=lambda: name, scheduler_params=lambda: params)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(PrismError, match=r"refuses this job \(engine.py:\d+\): .*does not recognize .*Nope"):
        refuse(engine("Nope"), optimizer)
    with pytest.raises(PrismError, match=r"unexpected keyword argument 'warmup'"):
        refuse(engine("WarmupLR", warmup=1), optimizer)
    with pytest.raises(TypeError, match="not an Optimizer"):  # Raised deeper than DeepSpeed's own call.
        refuse(engine("ExponentialLR", gamma=0.9), "a mistake of the script's own")
