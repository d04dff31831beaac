"""Decides whether this process is the training script, and replaces it by the conductor if so.

The flag is also seen by processes that merely pass it on (torchrun, deepspeed, ``python -m`` tools) and, as
``PRISM_EMULATE=1``, by everything started from a shell. Only a process that runs a script or a module which is
not such a tool is taken over. ``exec`` gives the conductor a clean interpreter without torch, the same as
``python -m prism_plugins.run script.py …`` started by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

ARMED = "PRISM_ARMED"
"""Set for a conductor that the flags in a launch started, not the user by hand."""

LAUNCHER_SCRIPTS = frozenset(
    [
        "torchrun",
        "torchrun-script",
        "deepspeed",
        "deepspeed.pt",
        "ds",
        "accelerate",
        "accelerate-launch",
        "prism",
        "pytest",
        "py.test",
        "ipython",
        "jupyter",
        "jupyter-lab",
        "jupyter-notebook",
        "ray",
        "horovodrun",
        "colossalai",
        "composer",
        "coverage",
        "kernprof",
        "mprof",
        "pyinstrument",
        "viztracer",
        "debugpy",
        "scalene",
        "memray",
    ]
)
"""Console scripts that start or host the training script."""

LAUNCHER_MODULES = frozenset(
    [
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.launcher",
        "torch.distributed.elastic",
        "torch.utils.bottleneck",
        "deepspeed.launcher",
        "deepspeed",
        "accelerate",
        "pytest",
        "_pytest",
        "prism_plugins",
        "IPython",
        "ipykernel",
        "ipykernel_launcher",
        "jupyter",
        "jupyter_core",
        "notebook",
        "ray",
        "horovod",
        "colossalai",
        "composer",
        "cProfile",
        "profile",
        "trace",
        "pdb",
        "coverage",
        "debugpy",
        "viztracer",
        "scalene",
        "memray",
        "pyinstrument",
        "kernprof",
        "line_profiler",
        "mpi4py",
        "unittest",
        "timeit",
        "runpy",
        "multiprocessing",
        "pip",
        "build",
    ]
)
"""Modules run with ``-m`` (they and their submodules) that start or host the training script."""

_FLAGS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class CommandLine(NamedTuple):
    """How the interpreter was started."""

    flags: tuple[str, ...]
    """Interpreter options before the script."""
    kind: str
    """``script``, ``module``, ``command``, ``stdin`` or ``interactive``."""
    target: str
    """Script path or module name."""
    arguments: tuple[str, ...]


def parse_command_line(orig_argv: Sequence[str]) -> CommandLine:
    """Split ``sys.orig_argv`` as CPython does: options, then ``-m module``, ``-c command`` or a script."""
    rest = list(orig_argv[1:])
    flags: list[str] = []
    while rest:
        word = rest[0]
        if word == "-":
            return CommandLine(tuple(flags), "stdin", "-", tuple(rest[1:]))
        if not word.startswith("-"):
            return CommandLine(tuple(flags), "script", word, tuple(rest[1:]))
        rest.pop(0)
        if word in _FLAGS_WITH_VALUE:
            flags += [word, rest.pop(0)] if rest else [word]
            continue
        if word.startswith("--"):
            flags.append(word)
            continue
        # A cluster of one-letter options; m and c take the rest of the word, or the next word.
        for i, letter in enumerate(word[1:], start=1):
            if letter in "WX":
                if i + 1 == len(word) and rest:
                    flags += [word, rest.pop(0)]
                else:
                    flags.append(word)
                break
            if letter in "mc":
                if i > 1:
                    flags.append(word[:i])
                target = word[i + 1 :] or (rest.pop(0) if rest else "")
                kind = "module" if letter == "m" else "command"
                return CommandLine(tuple(flags), kind, target, tuple(rest))
        else:
            flags.append(word)
    return CommandLine(tuple(flags), "interactive", "", ())


def slice_interpreter_flags() -> list[str]:
    """Interpreter options for slices: those the user's was started with; -P because of ``-m`` (see script.py)."""
    flags = list(parse_command_line(sys.orig_argv).flags)
    return flags if "-P" in flags else [*flags, "-P"]


def take_over() -> None:
    """Replace this process by the conductor when it is the training script; return otherwise."""
    if not sys.executable or hasattr(sys, "ps1") or sys.flags.interactive:
        return
    line = parse_command_line(sys.orig_argv)
    words = conductor_arguments(line, sys.argv)
    if words is None:
        for advice in launcher_advice(line, os.environ):
            print(f"prism: {advice}", file=sys.stderr, flush=True)
        sys.excepthook = _say_why_last(sys.excepthook)
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(sys.executable, [sys.executable, *words], os.environ | {ARMED: "1"})


def conductor_arguments(line: CommandLine, argv: Sequence[str]) -> list[str] | None:
    """The interpreter's arguments that start the conductor for this command line, or None not to arm.

    ``argv`` is the current ``sys.argv``. It differs from the command line where a tool runs the script in its
    own process (``python -m cProfile train.py``): the script is then emulated without the tool.
    """
    flags = [*line.flags] if "-P" in line.flags else [*line.flags, "-P"]
    conductor = [*flags, "-m", "prism_plugins.run"]
    if line.kind == "script":
        name = os.path.basename(line.target)
        if name.removesuffix(".exe") not in LAUNCHER_SCRIPTS:
            return [*conductor, line.target, *line.arguments]
        return _hosted_script(conductor, line, argv)
    if line.kind == "module":
        if _is_launcher_module(line.target) or _passes_on_a_script(line.arguments):
            return _hosted_script(conductor, line, argv)
        return [*conductor, "-m", line.target, *line.arguments]
    return None


def launcher_advice(line: CommandLine, environ: Mapping[str, str]) -> list[str]:
    """What will stop DeepSpeed's launcher on a machine that is not the cluster, a line each; it runs on regardless."""
    name = os.path.basename(line.target)
    if line.kind != "script" or name not in ("deepspeed", "deepspeed.pt", "ds"):
        return []
    own: list[str] = []
    for word in line.arguments:
        if word.endswith(".py") or word in ("-m", "--module"):
            break
        own.append(word.partition("=")[0])
    advice = []
    if "--autotuning" in own:
        advice.append(
            "deepspeed --autotuning measures trial runs on the GPUs at hand and emulates nothing; leave it out"
        )
    if {"-H", "--hostfile"} & set(own) or os.path.isfile("/job/hostfile"):
        advice.append(
            "deepspeed starts the emulation on the hosts of the hostfile, by ssh; on one machine leave it out and use "
            "--num_gpus 1: the size of the job is --prism-world-size"
        )
    if environ.get("DS_ACCELERATOR", "cpu") != "cpu":
        advice.append(
            f"DS_ACCELERATOR={environ['DS_ACCELERATOR']} makes deepspeed look for that device here; unset it where there "
            "is none"
        )
    return advice


def _say_why_last(hook: Callable[..., object]) -> Callable[..., object]:
    """An excepthook for the launcher: of torchrun's ChildFailedError only what the conductor said, which it left in the error
    file, and not a traceback through torchrun below it. Anything else goes to ``hook``."""

    def shown(kind: type[BaseException], error: BaseException, traceback: object) -> None:
        said = ""
        if kind.__name__ == "ChildFailedError" and hasattr(error, "get_first_failure"):
            failure = error.get_first_failure()[1]
            said = failure.message.get("message", "") if isinstance(failure.message, dict) else ""
        if said.strip():
            print(said.strip().splitlines()[-1], file=sys.stderr, flush=True)
        else:
            hook(kind, error, traceback)

    return shown


def _is_launcher_module(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:n]) in LAUNCHER_MODULES for n in range(1, len(parts) + 1))


def _passes_on_a_script(arguments: Sequence[str]) -> bool:
    """Whether a positional argument before the flag is a Python file: ``python -m tool train.py --prism-emulate``."""
    previous = ""
    for word in arguments:
        if word.startswith("--prism-"):
            return False
        takes_value = previous.startswith("-") and "=" not in previous
        if word.endswith(".py") and not takes_value and os.path.isfile(word):
            return True
        previous = word
    return False


def _hosted_script(conductor: list[str], line: CommandLine, argv: Sequence[str]) -> list[str] | None:
    """The script that a profiler or debugger runs inside its own process, once it has rewritten ``sys.argv``."""
    script = argv[0] if argv else ""
    if not script.endswith(".py") or script not in line.arguments or not os.path.isfile(script):
        return None
    print(f"prism: emulating {script} without {line.target}, which started it", file=sys.stderr)
    return [*conductor, *argv]
