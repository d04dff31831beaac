"""Where iterations, micro-batches and phases begin and end, whatever style of training loop a script has."""

from types import SimpleNamespace

import pytest
import torch

from prism_plugins.integrations.deepspeed import facts, hooks, memory
from prism_plugins.integrations.deepspeed.session import Session


class Context:
    """Writes down what the session tells the slice."""

    def __init__(self):
        self.told = []
        self.timers = []
        self.facts = None

    def begin_iteration(self, *, ends_by_next=False):
        assert ends_by_next
        self.told.append("iteration")

    def next_iteration(self):
        self.told.append("next")

    def drop_iteration(self):
        self.told.append("dropped")

    def stop_if_enough(self):
        self.told.append("goes on")

    def begin_phase(self, phase):
        self.told.append(f"{phase.kind} {phase.microbatch}")

    def end_phase(self):
        self.told.append("end")

    def tag(self, tensor, category):
        pass

    def set_facts(self, facts):
        pass

    def not_trained_yet(self, why):
        pass

    def timer(self, *span):
        self.timers.append(span)


class Engine(torch.nn.Module):
    """As much of DeepSpeedEngine as the hooks see."""

    optimizer = None

    def __init__(self, accumulation=1, managed=True):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.accumulation, self.managed = accumulation, managed
        self.micro_steps = 0

    def is_gradient_accumulation_boundary(self):
        return self.managed and (self.micro_steps + 1) % self.accumulation == 0

    def managed_gradient_accumulation(self):
        return self.managed


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(facts, "job_facts", lambda *a: None)
    monkeypatch.setattr(memory, "tag_engine", lambda *a: None)
    session = Session(Context())

    def act(engine, name, *args):
        """Call a hooked method of the engine; the original does nothing but count."""

        def original(self, *args):
            if name == "step":
                self.micro_steps += 1

        hook = next(
            h
            for h in hooks.hook_table()
            if h.attribute == f"DeepSpeedEngine.{name}" and h.wrap.__module__ == hooks.__name__
        )
        return hook.wrap(session, original, None)(engine, *args)

    return SimpleNamespace(session=session, act=act, told=session.context.told)


def test_accumulation_by_the_engine(job):
    engine = Engine(accumulation=2)
    for _ in range(2):
        job.act(engine, "forward")
        job.act(engine, "backward", None)
        job.act(engine, "step")
    assert job.told == [
        "iteration", "forward 0", "end", "backward 0", "end", "accumulate 0", "end",
        "forward 1", "end", "backward 1", "end", "optimizer -1", "end", "next",
    ]  # fmt: skip
    job.act(engine, "forward")
    assert job.told[-3:] == ["goes on", "forward 0", "end"]


def test_accelerate_steps_only_at_the_boundary(job):
    """Micro-batches are counted at the forward pass; unmanaged accumulation always steps."""
    engine = Engine(managed=False)
    for _ in range(2):
        job.act(engine, "forward")
        job.act(engine, "backward", None)
    job.act(engine, "step")
    kinds = [line for line in job.told if line[-1].isdigit()]
    assert kinds == ["forward 0", "backward 0", "forward 1", "backward 1", "optimizer -1"]
    assert job.told[-1] == "next"


def test_loss_backward_is_a_phase_of_its_own(job):
    engine = Engine()
    job.act(engine, "forward")
    job.act(engine, "_backward_prologue")
    job.act(engine, "_backward_epilogue")
    job.act(engine, "step")
    assert job.told == [
        "iteration", "forward 0", "end", "backward 0", "end", "optimizer -1", "end", "next",
    ]  # fmt: skip


def test_loss_backward_whose_end_is_not_seen_ends_with_the_step(job):
    engine = Engine()
    job.act(engine, "forward")
    job.act(engine, "_backward_prologue")
    job.act(engine, "step")
    assert job.told[3:] == ["backward 0", "end", "optimizer -1", "end", "next"]


def test_evaluation_through_the_bare_module_is_no_training(job):
    engine = Engine()
    hook = next(h for h in hooks.hook_table() if h.attribute == "Module.train")
    train = hook.wrap(job.session, torch.nn.Module.train, None)
    train(engine.module, False)
    assert job.told == []  # Nothing trains yet.
    job.act(engine, "forward")
    job.act(engine, "step")
    train(torch.nn.Linear(1, 1), False)
    train(engine.module, True)
    assert "dropped" not in job.told
    train(engine.module, False)
    assert job.told[-1] == "dropped"
    assert not engine.module.training


def test_timers_count_while_an_iteration_is_recorded(job):
    job.session.timer_stopped("fwd", 1, 2)
    job.act(Engine(), "forward")
    job.session.timer_stopped("all_reduce", 3, 4)
    job.session.timed_call("comm:all_reduce:1 KB")
    assert job.session.context.timers == [("all_reduce", 3, 4), ("comm:all_reduce:1 KB", 3, 4)]
