from __future__ import annotations

from types import SimpleNamespace

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integrations.deepspeed.offload import HOOKS


def zero_config(**devices):
    sections = {name: SimpleNamespace(device=device) for name, device in devices.items()}
    return SimpleNamespace(**({"offload_param": None, "offload_optimizer": None} | sections))


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_offload_to_nvme_is_refused_and_the_section_named(section):
    read = HOOKS[0].wrap(None, lambda params: zero_config(**{section: "nvme"}), None)
    with pytest.raises(PrismError, match=f"{section}.*not emulated"):
        read({})


def test_offload_to_the_cpu_is_read_as_it_is():
    config = zero_config(offload_param="cpu", offload_optimizer="none")
    assert HOOKS[0].wrap(None, lambda params: config, None)({}) is config


def test_optimizers_in_processes_of_their_own_are_refused():
    read = HOOKS[0].wrap(None, lambda config: config, None)
    with pytest.raises(PrismError, match="zenflow"):
        read(SimpleNamespace(offload_param=None, offload_optimizer=None, zenflow=SimpleNamespace()))
    section = SimpleNamespace(device="cpu", super_offload=True)
    with pytest.raises(PrismError, match="super_offload"):
        read(SimpleNamespace(offload_param=None, offload_optimizer=section, zenflow=None))
