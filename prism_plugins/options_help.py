"""``--prism-help``: what the flags do, by example. Uses rich on a terminal, plain text otherwise."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prism_plugins.options import TABLE

_EXAMPLES = (
    (
        "The launch you use today, on any machine, as the 1024-GPU job:",
        "torchrun --nproc-per-node 1 pretrain_gpt.py <your arguments> --prism-emulate --prism-world-size 1024",
    ),
    ("Another cluster (slices are reused, only the prediction runs again):", "… --prism-cluster dgx-a100"),
    ("Check the inference on four ranks that nothing represents:", "… --prism-audit 4"),
    ("Two slices at a time from two launched processes:", "torchrun --nproc-per-node 2 … --prism-emulate …"),
    (
        "Where torch does not load plugins (TORCH_DEVICE_BACKEND_AUTOLOAD=0):",
        "python -m prism_plugins.run pretrain_gpt.py … --prism-world-size 1024",
    ),
    ("Afterwards:", "prism show RUN · prism ops RUN --rank 17 · prism trace RUN --ranks 0-15"),
)


def print_help() -> None:
    """Print the help to stdout."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    console.print("[bold]Prism: emulate a training job of any size with the launch you already use.[/bold]\n")
    console.print(
        "A few ranks of the job (slices) run your unmodified script on a virtual GPU; every other rank follows "
        "by symmetry; the whole job is simulated. You get the iteration time, the memory of every rank, your "
        "framework's own log at target scale, and traces.\n"
    )
    table = Table(box=None, show_header=True, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("flag", no_wrap=True)
    table.add_column("environment", no_wrap=True)
    table.add_column("default")
    table.add_column("meaning")
    for option in TABLE:
        flag = f"{option.flag} {option.metavar}".strip()
        table.add_row(
            escape(flag), "" if option.name == "help" else option.env, option.default, escape(option.help)
        )
    # Off a terminal the table keeps its natural width, so that grep sees whole lines.
    console.print(table, width=None if console.is_terminal else 200)
    console.print(
        "\nA flag wins over its environment twin; switches take 1 or 0 there. The script never sees them."
    )
    console.print("\n[bold]Examples[/bold]")
    for what, command in _EXAMPLES:
        console.print(f"  {what}", soft_wrap=True)
        console.print(f"    {escape(command)}", style="cyan", soft_wrap=True)
