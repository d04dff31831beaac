from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from prism_plugins.errors import PrismError
from prism_plugins.integrations.transformer_engine import module, obtain
from prism_plugins.integrations.transformer_engine.calls import IMPLEMENTATIONS, Call, bound
from prism_plugins.integrations.transformer_engine.signatures import (
    Change,
    Interface,
    apply,
    difference,
    interface_of,
    known_versions,
    minor_version,
)

for _part in module._PARTS:
    importlib.import_module(f"prism_plugins.integrations.transformer_engine.{_part}")


def test_the_interface_of_a_version_is_that_of_its_release():
    old, new = (interface_of(version)[0] for version in ("2.8.0", "2.13.0"))
    assert len(old.functions) == 105
    assert "glu" in new.functions
    assert "glu" not in old.functions
    assert "grad_logits" in new.functions["fused_topk_with_score_function_bwd"]
    assert "grad_logits" not in old.functions["fused_topk_with_score_function_bwd"]
    assert new.enums["NVTE_Fused_Attn_Backend"][0] == "NVTE_F16_max512_seqlen"


def test_versions_not_in_the_table_take_the_nearest_below():
    newest = known_versions()[-1]
    assert interface_of("99.0.0")[1] == newest
    assert interface_of("1.0")[1] == known_versions()[0]
    assert interface_of("2.13.7+cu13.abc")[1] == minor_version("2.13.7+cu13.abc") == "2.13"


def test_difference_and_apply_are_inverse():
    old = Interface(functions={"f": ("a",), "g": ("b",)}, enums={"E": ("x",)}, classes=("C",))
    new = Interface(functions={"f": ("a", "c"), "h": ()}, enums={"E": ("x", "y")}, classes=("D",))
    change = difference(old, new)
    assert change == Change(
        functions={"f": ("a", "c"), "h": ()}, enums={"E": ("x", "y")}, classes=("D",), removed=("C", "g")
    )
    assert apply(old, change) == new


@pytest.mark.parametrize("version", known_versions())
def test_every_implementation_is_of_a_function_that_some_version_has(version):
    filled = ModuleType("tex")
    assert module.fill_module(filled, version) == version
    interface = interface_of(version)[0]
    missing = set(interface.functions) - set(IMPLEMENTATIONS)
    for name in missing - {"bulk_overlap_ag_with_external_gemm"}:
        with pytest.raises(PrismError, match=rf"calls {name}, which prism does not emulate yet"):
            getattr(filled, name)()


def test_nothing_is_implemented_that_no_version_has():
    known = {name for version in known_versions() for name in interface_of(version)[0].functions}
    assert set(IMPLEMENTATIONS) <= known


def test_arguments_are_bound_by_name_and_surplus_ones_refused():
    seen: list[Call] = []
    function = bound("f", ("a", "b"), seen.append)
    function(1, b=2)
    assert (seen[0].name, seen[0].a, seen[0].b, seen[0].c, seen[0].first()) == ("f", 1, 2, None, 1)
    with pytest.raises(TypeError, match="does not take"):
        function(1, 2, 3)
    with pytest.raises(TypeError, match="c"):
        function(c=1)


def test_the_version_that_was_set_up_last_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(obtain, "cache_folders", lambda: [tmp_path])
    calls: list[str] = []

    def pip(requirement, target):
        calls.append(requirement)
        version = requirement.partition("==")[2]
        (target / "transformer_engine" / "pytorch").mkdir(parents=True)
        (target / "transformer_engine" / "__init__.py").touch()
        (target / f"transformer_engine-{version}.dist-info").mkdir()

    monkeypatch.setattr(obtain, "_pip", pip)
    assert obtain.selected() is None
    assert obtain.set_up("2.8.0") == ("2.8.0", tmp_path / "transformer_engine" / "2.8.0", False)
    obtain.set_up("2.13.0")
    assert obtain.selected()[0].name == "2.13.0"
    assert obtain.set_up("2.8.0")[2]
    assert obtain.selected()[0].name == "2.8.0"
    assert calls == ["transformer_engine==2.8.0", "transformer_engine==2.13.0"]
    assert obtain.set_up_folder("2.13").name == "2.13.0"
    with pytest.raises(PrismError, match=r"prism setup-te 2\.9"):
        obtain.set_up_folder("2.9")
    with pytest.raises(PrismError, match="no version"):
        obtain.set_up("../x")


def test_an_unfinished_folder_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(obtain, "cache_folders", lambda: [tmp_path])
    (tmp_path / "transformer_engine" / "2.13.0" / "transformer_engine").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "selected").write_text("2.13.0\n")
    assert obtain.selected() is None
    assert obtain.set_up_versions() == {}
