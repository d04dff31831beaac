"""Run the user's script the way ``python script.py`` or ``python -m module`` would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import traceback
from types import ModuleType, TracebackType

from prism_plugins.errors import PrismError
from prism_plugins.program.slices import SliceSpec


def run_script(spec: SliceSpec) -> None:
    """Run ``spec.argv`` as ``__main__`` in this process, with its own ``sys.argv`` and ``sys.path[0]``."""
    target, arguments = spec.argv[0], list(spec.argv[1:])
    if spec.run_as == "module":
        sys.path.insert(0, os.getcwd())
        sys.argv = [target, *arguments]
        if not _exists(target):
            raise PrismError(f"no module named {target}")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.argv = [target, *arguments]
    check_script(spec.run_as, target)
    if os.path.isdir(target):
        runpy.run_path(target, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    _run_file(os.path.abspath(target))


def check_script(run_as: str, target: str) -> None:
    """Raise :class:`PrismError` for a script that is not there. A module is only looked for where it is run."""
    if run_as == "script" and not os.path.exists(target):
        raise PrismError(f"script {target} does not exist")


def script_traceback(error: BaseException) -> str:
    """The traceback from the script's own first frame on; whole when the script was not reached."""
    start = tb = error.__traceback__
    if (
        isinstance(error, SyntaxError)
        and tb is not None
        and _last(tb).tb_frame.f_code.co_filename == __file__
    ):
        return "".join(traceback.format_exception_only(error))  # The script itself; it has no frame yet.
    in_runpy = False
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if name == __file__:
            in_runpy = True
            start = tb.tb_next or tb
        elif in_runpy and (name == runpy.__file__ or name.startswith("<frozen")):
            start = tb.tb_next or tb
        else:
            in_runpy = False
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def raised_by_prism(error: BaseException) -> bool:
    """Whether prism's own code raised it, not the script or what the script calls."""
    tb = error.__traceback__
    module = _last(tb).tb_frame.f_globals.get("__name__", "") if tb is not None else ""
    return module.startswith("prism_plugins.") and module != __name__


def _last(tb: TracebackType) -> TracebackType:
    while tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return False
        raise


def _run_file(path: str) -> None:
    """Execute in the real ``__main__`` module, so that pickling, multiprocessing and inspect see what they expect."""
    with open(path, "rb") as file:
        source = file.read()
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __spec__=None,
        __cached__=None,
    )
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
