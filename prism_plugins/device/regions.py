"""Compiled regions: ``torch.compile`` and ``torch.jit.script`` as a slice offers them.

On a GPU a compiled region saves for backward what the min-cut partitioner chose and runs a few fused kernels. A
region that simply ran op by op would keep every intermediate alive and record ten ops for one kernel, so memory and
time would both be wrong. Here a region is really compiled, by the backend of
:mod:`prism_plugins.device.regions_inductor`; only kernels are replaced by records.

Decorating costs nothing: Dynamo is imported at the first call of a region on the virtual device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from prism_plugins.integration import SliceContext


def install_regions(context: SliceContext) -> None:
    """Replace ``torch.compile`` and ``torch.jit.script`` (functions; scripted modules run op by op, counted)."""
    regions = _Regions(context)
    regions.real_compile = context.patch(
        torch, "compile", regions.compile, why="plan compiled regions without Triton or a GPU"
    )
    regions.real_script = context.patch(
        torch.jit, "script", regions.script, why="a scripted function is fused on a GPU, interpreted here"
    )


class _Regions:
    """Makes regions, and the backend they share."""

    def __init__(self, context: SliceContext) -> None:
        self.real_compile: Callable[..., Any] = torch.compile
        self.real_script: Callable[..., Any] = torch.jit.script
        self._context = context
        self._backend: Callable[..., Any] | None = None
        self._configure_thread: Callable[[], None] = lambda: None

    def compile(
        self,
        model: Callable[..., Any] | None = None,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        disable: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``torch.compile`` with the same arguments; backends other than inductor are left alone."""
        if model is None:
            return functools.partial(
                self.compile,
                fullgraph=fullgraph,
                dynamic=dynamic,
                backend=backend,
                mode=mode,
                options=options,
                disable=disable,
                **kwargs,
            )
        if disable or backend != "inductor":
            return self.real_compile(
                model,
                fullgraph=fullgraph,
                dynamic=dynamic,
                backend=backend,
                mode=mode,
                options=options,
                disable=disable,
                **kwargs,
            )
        if mode not in (None, "default") or options:
            self._context.assume(
                f"torch.compile(mode={mode!r}, options={options!r}) is planned as mode='default'"
            )
        if isinstance(model, torch.nn.Module):
            optimized = self._compiled(model, fullgraph=fullgraph, **kwargs)
            optimized.forward = self._region(model, compiled=optimized.forward)
            return optimized
        return self._region(model, fullgraph=fullgraph, **kwargs)

    def script(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.jit.script``: functions become compiled regions."""
        if isinstance(obj, torch.nn.Module | type):
            self._context.assume(f"torch.jit.script of {_name(obj)}: its ops are not fused")
            return self.real_script(obj, *args, **kwargs)
        if not callable(obj):
            return self.real_script(obj, *args, **kwargs)
        self._context.assume(f"torch.jit.script of {_name(obj)} is planned by inductor, as torch.compile is")
        return self._region(obj)

    def backend(self) -> Callable[..., Any]:
        """The backend; made at the first call."""
        if self._backend is None:
            from prism_plugins.device.regions_inductor import configure_thread, install_inductor

            self._backend = install_inductor(self._context)
            self._configure_thread = configure_thread
        return self._backend

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        return self.real_compile(function, backend=self.backend(), dynamic=False, **options)

    def _region(
        self, function: Callable[..., Any], *, compiled: Callable[..., Any] | None = None, **options: Any
    ) -> Callable[..., Any]:
        """``function`` compiled at its first call, run op by op (and counted) once that failed."""
        failed = False

        @functools.wraps(function.forward if isinstance(function, torch.nn.Module) else function)
        def region(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled, failed
            if failed:
                return function(*args, **kwargs)
            if compiled is None:
                compiled = self._compiled(function, **options)
            self._configure_thread()
            try:
                return compiled(*args, **kwargs)
            except _compile_errors() as error:
                self._context.assume(
                    f"compiled region {_name(function)} could not be traced and runs op by op ({summary(error)})"
                )
                failed = True
                return function(*args, **kwargs)

        region._torchdynamo_inline = function
        return region


def summary(error: BaseException) -> str:
    """Type and first line of an error, for a list of assumptions."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:120]}"


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def _name(obj: Any) -> str:
    return getattr(obj, "__qualname__", None) or type(obj).__qualname__
