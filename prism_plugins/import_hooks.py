"""Run a function right after a module was imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Hook = Callable[[ModuleType], None]


class ImportHooks(importlib.abc.MetaPathFinder):
    """A meta path finder that lets the other finders find, and adds hooks to what their loader executes."""

    def __init__(self) -> None:
        self._hooks: dict[str, list[Hook]] = {}
        self._finding: set[str] = set()

    def install(self) -> None:
        """Put this finder first."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take this finder out again; modules already imported stay hooked."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def add(self, module: str, hook: Hook) -> None:
        """Call ``hook(module)`` after the import of ``module``; now, if it was imported before."""
        self._hooks.setdefault(module, []).append(hook)
        loaded = sys.modules.get(module)
        if loaded is not None:
            hook(loaded)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find as the other finders do; for a hooked name, wrap the loader's ``exec_module``."""
        # Another tool's finder of this kind asks all finders too, us included.
        if fullname not in self._hooks or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            for finder in sys.meta_path:
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        self._wrap(spec.loader)
                    return spec
        finally:
            self._finding.discard(fullname)
        return None

    def _wrap(self, loader: importlib.abc.Loader) -> None:
        # On the instance: whatever else the loader offers (get_code, get_source, …) stays as it is.
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in list(self._hooks.get(module.__name__, ())):
                hook(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
