"""``prism setup-te [VERSION]``: Transformer Engine's Python layer for machines that cannot build it."""

from __future__ import annotations

import argparse
import importlib.metadata

_DESCRIPTION = """\
Obtain the Python layer of Transformer Engine with pip, without building anything, so that jobs which use it can be
emulated where it is not installed. It goes into the user's cache, not into the environment; where Transformer Engine is
installed, that is used and this command is not needed."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "setup-te", help="obtain Transformer Engine's Python layer", description=_DESCRIPTION
    )
    parser.add_argument(
        "version", nargs="?", metavar="VERSION", help="as on PyPI, for example 2.13.0 (the default)"
    )
    parser.add_argument("--list", action="store_true", help="show what was set up, and do nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it, and say what was done."""
    from prism_plugins.integrations.transformer_engine.obtain import set_up, set_up_versions

    if arguments.list:
        versions = set_up_versions()
        for version, folder in versions.items():
            print(f"{version}  {folder}")
        if not versions:
            print("nothing was set up yet: prism setup-te")
        return 0
    version, folder, was_there = set_up(arguments.version)
    print(
        f"Transformer Engine {version}: {'was set up before' if was_there else 'Python layer unpacked'} in {folder}"
    )
    try:
        installed = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        print(
            "slices use it whenever a script imports transformer_engine (PRISM_TE=VERSION chooses another one)"
        )
    else:
        print(f"Transformer Engine {installed} is installed in this environment, and is what slices use")
    return 0
