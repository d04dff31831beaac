"""The hook table against the installed Megatron: fails when upstream renames what is hooked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.import_hooks import ImportHooks
from prism_plugins.integration.hook_table import Hook, apply_hooks
from prism_plugins.integrations.megatron.hooks import SUPPORTED, hook_table
from prism_plugins.integrations.megatron.phases import P2P_METHODS
from prism_plugins.integrations.megatron.refusals import translated
from prism_plugins.integrations.megatron.session import Session
from prism_plugins.integrations.megatron.triton_stub import provide_triton

HOOKS = hook_table()


def _apply(hooks: list[Hook], module: ModuleType) -> None:
    context = FakeContext()
    apply_hooks(context, Session(context), hooks, module, framework="Megatron", supported=SUPPORTED)


class FakeContext:
    def __init__(self) -> None:
        self.spec = SimpleNamespace(world_size=8, moe_load="balanced", iterations=3, real_ranks=())
        self.assumptions: list[str] = []
        self.events: list[str] = []

    def patch(self, target, name, replacement, *, why):
        original = getattr(target, name)
        setattr(target, name, replacement)
        return original

    def assume(self, text):
        self.assumptions.append(text)

    def begin_phase(self, phase):
        self.events.append(phase.kind)

    def end_phase(self):
        self.events.append("end")


def attribute(hook: Hook):
    value = importlib.import_module(hook.module)
    for part in hook.attribute.split("."):
        value = getattr(value, part)
    return value


@pytest.fixture
def triton(monkeypatch):
    """Triton's stand-in, as a slice has it."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    hooks = ImportHooks()
    hooks.install()
    provide_triton(SimpleNamespace(on_import=hooks.add, spec=SimpleNamespace(device="cpu")))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: f"{h.module}.{h.attribute}")
def test_every_hooked_attribute_exists(hook: Hook, triton):
    package = ".".join(hook.module.split(".")[:2])
    if package in ("megatron.training", "megatron.legacy") and importlib.util.find_spec(package) is None:
        pytest.skip("megatron.training comes with a checkout of Megatron-LM only")
    assert callable(attribute(hook))


def test_p2p_methods_take_the_arguments_their_parts_are_told_by():
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    for name, parts_of in P2P_METHODS.items():
        parameters = inspect.signature(getattr(P2PCommunicator, name)).parameters
        assert all(isinstance(part, str) for part in parts_of(dict.fromkeys(parameters, True)))
    public = {n for n, f in vars(P2PCommunicator).items() if callable(f) and not n.startswith("_")}
    assert public == set(P2P_METHODS)


def test_a_renamed_attribute_is_named():
    module = ModuleType("megatron.core.somewhere")
    hook = Hook("megatron.core.somewhere", "old_name", lambda s, o, m: o, "phase forward")
    with pytest.raises(PrismError, match=r"no megatron\.core\.somewhere\.old_name, .* phase forward"):
        _apply([hook], module)


def test_an_attribute_that_may_be_missing_is_left_out():
    hook = Hook("megatron.core.somewhere", "gone", lambda s, o, m: o, "comfort", required=False)
    _apply([hook], ModuleType("megatron.core.somewhere"))


def test_phases_outside_iterations_are_not_reported():
    context = FakeContext()
    session = Session(context)
    session.tracker.backward(lambda: None, object())
    session.iterating = True
    session.tracker.backward(lambda: None, object())
    assert context.events == ["backward", "end"]


def refuse_with(message: str):
    def refuse():
        raise AssertionError(message)

    return refuse


def test_an_assertion_becomes_one_line_that_says_where():
    refuse = refuse_with("gradient_accumulation_fusion needs\n  a CUDA extension")
    with pytest.raises(PrismError) as caught:
        translated(refuse)()
    assert str(caught.value) == (
        "Megatron refuses this configuration, add --prism-apex if the cluster has Apex, else --no-gradient-accumulation-fusion "
        f"(test_hooks.py:{refuse.__code__.co_firstlineno + 1}): "
        "gradient_accumulation_fusion needs a CUDA extension"
    )


def test_mamba_layers_are_refused_with_the_reason(triton):
    if importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("mamba-ssm is installed")
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    assert "triton" not in sys.modules or importlib.util.find_spec("triton") is not None
    with pytest.raises(PrismError, match=r"cannot be emulated yet: .*MambaSSM is not installed"):
        translated(mixer.MambaMixer.__init__)(None, None, None, 8)


def test_what_cannot_be_emulated_is_refused_unless_every_rank_is_real():
    hook = next(h for h in HOOKS if "use-megatron-fsdp" in h.why)
    session = Session(FakeContext())
    with pytest.raises(PrismError, match="--use-megatron-fsdp is not emulated yet: "):
        hook.wrap(session, attribute(hook), None)(None)
    session.context.spec.real_ranks = (0, 1)
    assert hook.wrap(session, attribute(hook), None) is attribute(hook)


def test_an_assertion_without_words_shows_itself():
    with pytest.raises(PrismError, match="it asserts `raise AssertionError"):
        translated(refuse_with(""))()
