"""``--prism-help``: what the flags do, by example. Uses rich on a terminal, plain text otherwise."""

from __future__ import annotations

import sys

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from prism_plugins.options import TABLE, Option
from prism_plugins.streams import PipeConsole

_EXAMPLES = (
    (
        "The launch you use today, on any machine, as the 1024-GPU job:",
        "torchrun --nproc-per-node 1 pretrain_gpt.py <your arguments> --prism-emulate --prism-world-size 1024",
    ),
    (
        "Another cluster (slices are reused where its GPU is the same; only the prediction runs again):",
        "… --prism-cluster my-cluster.toml",
    ),
    ("Check the inference on four ranks that nothing represents:", "… --prism-audit 4"),
    ("Two slices at a time from two launched processes:", "torchrun --nproc-per-node 2 … --prism-emulate …"),
    (
        "Where torch does not load plugins (TORCH_DEVICE_BACKEND_AUTOLOAD=0):",
        "python -m prism_plugins.run pretrain_gpt.py … --prism-world-size 1024",
    ),
    ("Afterwards:", "prism show RUN · prism ops RUN --rank 17 · prism trace RUN --ranks 0-15"),
)


WIDTH_WITHOUT_TERMINAL = 110
_NARROW = 90
"""Below this many columns the meaning of a flag stands under it instead of beside it."""


def print_help() -> None:
    """Print the help to stdout."""
    console = PipeConsole(file=sys.stdout, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = PipeConsole(file=sys.stdout, highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    console.print("[bold]Prism: emulate a training job of any size with the launch you already use.[/bold]\n")
    console.print(
        "A few ranks of the job (slices) run your unmodified script on a virtual GPU; every other rank follows "
        "by symmetry; the whole job is simulated. You get the iteration time, the memory of every rank, your "
        "framework's own log at target scale, and traces.\n"
    )
    _print_flags(console)
    console.print(
        "\nA flag wins over its environment twin (in brackets); switches take 1 or 0 there. "
        "The script never sees them."
    )
    console.print("\n[bold]Examples[/bold]")
    for what, command in _EXAMPLES:
        console.print(f"  {what}", soft_wrap=True)
        console.print(f"    {escape(command)}", style="cyan", soft_wrap=True)


def _print_flags(console: PipeConsole) -> None:
    if console.width < _NARROW:
        for option in TABLE:
            console.print(_flag(option))
            console.print(Padding(_meaning(option), (0, 0, 0, 4)))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for option in TABLE:
        table.add_row(_flag(option), _meaning(option))
    console.print(table)


def _flag(option: Option) -> str:
    return f"[bold]{option.flag}[/bold] {escape(option.metavar)}".strip()


def _meaning(option: Option) -> str:
    default = f" Default: {escape(option.default)}." if option.default not in ("", "off", "required") else ""
    required = " Required." if option.default == "required" else ""
    twin = "" if option.name == "help" else f" [dim]{escape(f'[{option.env}]')}[/dim]"
    return f"{escape(option.help)}{required}{default}{twin}"
