"""Ways to train that no integration takes end with one line that names them."""

import operator
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


def test_a_way_to_train_is_named_until_an_integration_takes_it():
    module = pytest.importorskip("torch.nn.parallel.distributed")
    cls = types.SimpleNamespace(__init__=lambda *args: None)
    stand_in = types.SimpleNamespace(DistributedDataParallel=cls)
    modules = ImportedModules(**{module.__name__: stand_in})
    refuse_unsupported(modules, {"torch", "megatron"})
    cls.__init__()
    refuse_unsupported(modules, {"megatron"})
    with pytest.raises(
        PrismError,
        match=r"trains with torch's DDP, .* not emulate yet; .* framework it knows instead \(megatron\)",
    ):
        cls.__init__()


@pytest.mark.parametrize("entry", [e for e in ENTRY_POINTS if e.integration == "torch"], ids=lambda e: e.what)
def test_torch_still_has_the_entry_points(entry):
    module = pytest.importorskip(entry.module)
    assert callable(operator.attrgetter(entry.attribute)(module))
