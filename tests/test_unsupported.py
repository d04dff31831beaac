"""Ways to train that no integration takes end with one line that names them."""

import types

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.unsupported import ENTRY_POINTS, refuse_unsupported


class ImportedModules:
    """The part of a slice's context that is used: modules that the script "imports", and patches."""

    def __init__(self, **modules):
        self.modules = modules

    def on_import(self, name, hook):
        if name in self.modules:
            hook(self.modules[name])

    def patch(self, target, name, replacement, *, why):
        setattr(target, name, replacement)


def test_deepspeed_is_named_until_an_integration_takes_it():
    module = types.SimpleNamespace(initialize=lambda **kwargs: "engine")
    refuse_unsupported(ImportedModules(deepspeed=module), {"deepspeed", "megatron"})
    assert module.initialize() == "engine"
    refuse_unsupported(ImportedModules(deepspeed=module), {"megatron"})
    with pytest.raises(PrismError, match=r"trains with DeepSpeed, .* not emulate yet .*knows: megatron\)"):
        module.initialize(model=None)


@pytest.mark.parametrize("entry", [e for e in ENTRY_POINTS if e.integration == "torch"], ids=lambda e: e.what)
def test_torch_still_has_the_entry_points(entry):
    module = pytest.importorskip(entry.module)
    cls, name = entry.attribute.split(".")
    assert callable(getattr(getattr(module, cls), name))
