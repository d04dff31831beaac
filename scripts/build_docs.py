#!/usr/bin/env python3
"""Build the API reference from the docstrings: one HTML page a module, with a search, in build/docs/index.html.

    python scripts/build_docs.py [--out DIR] [MODULE ...]

Modules default to everything of prism_plugins. Needs pdoc (the `dev` extra) but none of the frameworks. Whatever pdoc
warns of (a module that does not import, an annotation nobody can resolve) fails the build: exit 1.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import typing
import warnings
from pathlib import Path

import pdoc
import pdoc.extract
import pdoc.render

PACKAGES = ("prism_plugins", r"!prism_plugins\.integrations", "prism_plugins.integrations")
"""The integrations, a folder of their own in the repository, are listed once, however the package is installed."""


def main(argv: list[str] | None = None) -> int:
    """Build; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "build" / "docs")
    args = parser.parse_args(argv)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"pdoc\b")
        specs = args.modules or PACKAGES
        names = pdoc.extract.walk_specs(specs)
        for name in names:
            resolve_named_tuples(name)
        pdoc.render.configure(docformat="restructuredtext", footer_text="prism_plugins")
        pdoc.pdoc(*specs, output_directory=args.out)
    for warning in raised:
        print(f"build_docs: {warning.message}", file=sys.stderr)
    print(f"{len(names)} modules in {args.out / 'index.html'}, {len(raised)} warnings")
    return 1 if raised else 0


def resolve_named_tuples(module: str) -> None:
    """Evaluate what ``NamedTuple`` leaves as text: its ``__new__`` lives in a module without the names."""
    for _, member in inspect.getmembers(importlib.import_module(module), inspect.isclass):
        if member.__module__ == module and hasattr(member, "_fields") and issubclass(member, tuple):
            member.__new__.__annotations__ = typing.get_type_hints(member)


if __name__ == "__main__":
    sys.exit(main())
