"""Hooks run after the import, once, and leave the module's loader whole."""

import importlib
import importlib.abc
import inspect
import runpy
import sys

import pytest

from prism_plugins.import_hooks import ImportHooks


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    package = tmp_path / "hooked_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("value = 1\n")
    (package / "part.py").write_text("def f():\n    return 1\n\nif __name__ == '__main__':\n    ran = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = ImportHooks()
    finder.install()
    yield finder
    finder.remove()
    for name in list(sys.modules):
        if name.startswith("hooked_pkg"):
            del sys.modules[name]


def test_called_after_the_module_was_executed(hooks):
    seen = []
    hooks.add("hooked_pkg.part", lambda module: seen.append(module.f()))
    import hooked_pkg  # noqa: F401

    assert seen == []
    importlib.import_module("hooked_pkg.part")
    importlib.import_module("hooked_pkg.part")
    assert seen == [1]


def test_called_now_when_already_imported(hooks):
    import hooked_pkg

    seen = []
    hooks.add("hooked_pkg", seen.append)
    assert seen == [hooked_pkg]


def test_a_hook_may_replace_what_the_module_offers(hooks):
    hooks.add("hooked_pkg.part", lambda module: setattr(module, "f", lambda: 2))
    from hooked_pkg.part import f

    assert f() == 2


def test_gets_along_with_another_tools_hooks(hooks):
    class Asking(importlib.abc.MetaPathFinder):
        """As ours: lets all other finders find."""

        def find_spec(self, name, path, target=None):
            others = (f for f in sys.meta_path if f is not self)
            return next((spec for f in others if (spec := f.find_spec(name, path, target))), None)

    seen = []
    hooks.add("hooked_pkg.part", seen.append)
    for place in (0, len(sys.meta_path)):
        other = Asking()
        sys.meta_path.insert(place, other)
        try:
            module = importlib.import_module("hooked_pkg.part")
        finally:
            sys.meta_path.remove(other)
        assert seen == [module]
        seen.clear()
        del sys.modules["hooked_pkg.part"]


def test_source_stays_visible_and_dash_m_works(hooks):
    hooks.add("hooked_pkg.part", lambda module: None)
    import hooked_pkg.part as part

    assert "return 1" in inspect.getsource(part)
    del sys.modules["hooked_pkg.part"]
    assert runpy.run_module("hooked_pkg.part", run_name="__main__")["ran"]


def test_a_missing_module_stays_missing(hooks):
    hooks.add("hooked_pkg.nothing", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_pkg.nothing")


def test_errors_of_a_hook_reach_the_importer(hooks):
    def fail(module):
        raise ValueError("no such function upstream")

    hooks.add("hooked_pkg", fail)
    with pytest.raises(ValueError, match="no such function"):
        importlib.import_module("hooked_pkg")
