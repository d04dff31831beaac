"""What a script does around its iterations: checkpoints are neither written nor read, monitors write nothing."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from prism_plugins.integrations.deepspeed import compat
from prism_plugins.integrations.deepspeed.session import Session


class Context:
    def __init__(self):
        self.assumptions = []

    def assume(self, text):
        self.assumptions.append(text)


@pytest.fixture
def session():
    return Session(Context())


def hooked(session, attribute):
    """The replacement of an attribute, made from the real original."""
    hook = next(hook for hook in compat.HOOKS if hook.attribute == attribute)
    module = importlib.import_module(hook.module)
    original = module
    for part in attribute.split("."):
        original = getattr(original, part)
    return hook.wrap(session, original, module)


def test_every_hooked_attribute_exists():
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for hook in compat.HOOKS:
        hooked(Session(Context()), hook.attribute)


def test_a_checkpoint_is_not_written_and_its_size_is_told(session, tmp_path):
    pytest.importorskip("deepspeed")
    master = torch.zeros(1024, 1024)
    adam = SimpleNamespace(state={master: {"exp_avg": master, "exp_avg_sq": master, "step": 3}})
    engine = SimpleNamespace(optimizer=SimpleNamespace(optimizer=adam))
    assert hooked(session, "DeepSpeedEngine.save_checkpoint")(engine, tmp_path / "out") is True
    assert not list(tmp_path.iterdir())
    assert session.context.assumptions[0] == compat.NOT_WRITTEN
    assert "12.0 MiB of optimizer state" in session.context.assumptions[1]


def test_a_checkpoint_that_is_there_is_not_read_and_training_starts_at_zero(session, tmp_path):
    pytest.importorskip("deepspeed")
    load = hooked(session, "DeepSpeedEngine.load_checkpoint")
    assert load(None, tmp_path) == (None, None)
    (tmp_path / "step7").mkdir()
    (tmp_path / "latest").write_text("step7")
    path, state = load(None, tmp_path)
    assert path == str(tmp_path / "step7")
    assert (state["step"], state.get("epoch", 5), dict(state)) == (0, 5, {})
    assert load(None, tmp_path, tag="other") == (None, None)
    assert session.context.assumptions[0] == compat.NOT_READ
    assert any("'step' is taken as 0" in line for line in session.context.assumptions)


def test_monitors_stay_enabled_but_silent(session):
    pytest.importorskip("deepspeed")
    monitor = SimpleNamespace()
    hooked(session, "MonitorMaster.__init__")(monitor, SimpleNamespace(enabled=True))
    assert monitor.enabled
    assert monitor.tb_monitor is monitor.wandb_monitor is monitor.csv_monitor is monitor.comet_monitor is None
    assert session.context.assumptions == [compat.NO_MONITOR]
