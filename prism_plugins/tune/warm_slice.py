"""``python -m prism_plugins.tune.warm_slice SPEC.json IN OUT``: many slices of one script from one start.

Importing torch and a framework takes a slice some seconds, a reduced job's few iterations a fraction of one. So the script
is started once, as rank 0, and stopped where it reads its command line (its first ``argparse`` call without explicit
arguments); from there the process is forked once for each command line to try. IN and OUT are file descriptors:
requests are lines of JSON, and so are the answers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism_plugins.integration.tuning import Verdict
from prism_plugins.program.slices import SliceSpec
from prism_plugins.rundir import SliceDir, read_json, write_bytes
from prism_plugins.slice import Slice, end_with_parent, run_child
from prism_plugins.slice_env import slice_environment
from prism_plugins.tune.warm import Answer, Request

_POLL_S = 0.02


class WarmSlice(Slice):
    """A slice that waits, where its script reads its command line, for the command lines to run."""

    def __init__(self, spec: SliceSpec, requests: int, answers: int) -> None:
        super().__init__(spec)
        self._requests = requests
        self._answers = answers
        self._buffer = b""

    def watch_arguments(self) -> None:
        """Stop at the first reading of the command line."""
        original = argparse.ArgumentParser.parse_known_args
        at_start = list(self.spec.argv[1:])

        def stop(parser: Any, args: Any = None, namespace: Any = None, *rest: Any, **kwargs: Any) -> Any:
            if args is not None and list(args) != at_start:
                return original(parser, args, namespace, *rest, **kwargs)
            argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
            self._serve(parser)
            return original(parser, None if args is None else sys.argv[1:], namespace, *rest, **kwargs)

        argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign]

    def _serve(self, parser: Any) -> None:
        """Answer requests; returns in a copy that is to run on as a slice."""
        _start_device()
        _warm_compiler()
        gc.collect()
        gc.freeze()
        self._answer(Answer(number=-1))
        children: dict[int, int] = {}
        while True:
            for pid, number in list(children.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del children[pid]
                    self._answer(Answer(number=number, status=status))
            if not select.select([self._requests], [], [], _POLL_S)[0]:
                continue
            for request in self._read():
                pid = os.fork()
                if pid:
                    children[pid] = request.number
                    continue
                end_with_parent()
                os.close(self._requests)
                os.close(self._answers)
                if request.spec is not None:
                    self._become(request.spec)
                    return
                self._judge(parser, request)
                os._exit(0)

    def _read(self) -> Iterator[Request]:
        data = os.read(self._requests, 1 << 20)
        if not data:
            os._exit(0)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Request)

    def _answer(self, answer: Answer) -> None:
        os.write(self._answers, msgspec.json.encode(answer) + b"\n")

    def _become(self, spec: SliceSpec) -> None:
        """Be the slice of ``spec`` from here on."""
        self.spec = spec
        self.dir = SliceDir(Path(spec.slice_dir))
        self._started = time.monotonic()
        assert self.context is not None
        self.context.spec = spec
        self.journal.resize(spec)
        os.environ.update(slice_environment(spec))
        self.dir.path.mkdir(parents=True, exist_ok=True)
        log = os.open(self.dir.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.argv = [sys.argv[0], *spec.argv[1:]]

    def _judge(self, parser: Any, request: Request) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        os.environ["WORLD_SIZE"] = str(request.world_size)
        assert self.context is not None
        self.context.spec = msgspec.structs.replace(self.spec, world_size=request.world_size)
        answers = []
        for integration in self.integrations:
            if hasattr(integration, "tuner"):
                judged = integration.tuner().judge(parser, request.commands)
                answers.append([msgspec.structs.replace(v, framework=integration.name) for v in judged])
        verdicts = likeliest(answers)
        write_bytes(Path(request.out), msgspec.json.encode(verdicts))


def likeliest(answers: Sequence[list[Verdict]]) -> list[Verdict]:
    """The verdicts of the framework that the script uses: more than one may have been imported, but the launch's own arguments
    make sense to one only."""
    given = [verdicts for verdicts in answers if verdicts]
    return next((v for v in given if any(one.legal for one in v)), given[0] if given else [])


def _start_device() -> None:
    """Start torch's device before the first fork, and let copies go on with it.

    A real GPU's context does not survive a fork, so torch refuses it in a copy; the virtual one has nothing to lose.
    """
    import torch

    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False


def _warm_compiler() -> None:
    """Compile one small function: Dynamo and inductor import and set up most of what they need once. No autograd: its
    threads would not survive a fork.

    Whatever goes wrong here will in the script as well, if it compiles anything, and is told there.
    """
    with contextlib.suppress(Exception):
        import torch

        def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x + bias, approximate="tanh")

        with torch.no_grad():
            x = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
            torch.compile(bias_gelu)(x, x[0])
        torch._dynamo.reset()


def main() -> None:
    """Entry point of the child process; never returns."""
    end_with_parent()
    spec = read_json(Path(sys.argv[1]), SliceSpec)
    piece = WarmSlice(spec, int(sys.argv[2]), int(sys.argv[3]))
    piece.watch_arguments()
    run_child(piece)
    os._exit(0)


if __name__ == "__main__":
    main()
