"""``prism cluster``: the cluster descriptions that ship with the package, and what a file says."""

from __future__ import annotations

import argparse
import sys
import tomllib

import msgspec
from rich.table import Table
from rich.text import Text

from prism_plugins.costs.cluster import cluster_text, load_cluster, parse_cluster, presets
from prism_plugins.emit.console import gib, make_console, show

_DESCRIPTION = """\
List the cluster presets, or show one of them, or a TOML file of your own, with the unit and source of each figure.
A file is checked as --prism-cluster would check it."""

_EPILOG = """\
examples:
  prism cluster list
  prism cluster show dgx-h200
  prism cluster show dgx-h200 --toml > mine.toml      a starting point for --prism-cluster mine.toml
  prism cluster show mine.toml"""

_UNITS = (
    ("_bytes_per_s", "GB/s", 1e9),
    ("_bytes", "GiB", 2**30),
    ("_us", "us", 1.0),
    ("peak_flops", "TFLOP/s", 1e12),
)


def add_command(commands: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "cluster", help="cluster presets and files", description=_DESCRIPTION, epilog=_EPILOG
    )
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=type(parser)
    )
    listing = actions.add_parser("list", help="the presets, one a line")
    listing.set_defaults(run=run_list)
    showing = actions.add_parser("show", help="every figure of a preset or file")
    showing.add_argument("cluster", metavar="PRESET|FILE", help="name of a preset, or path of a TOML file")
    form = showing.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="print the description itself")
    form.add_argument("--json", action="store_true", help="print it as JSON, with every default filled in")
    showing.set_defaults(run=run_show)


def run_list(arguments: argparse.Namespace) -> int:
    """Print the table of presets."""
    del arguments
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("preset", "GPU"):
        table.add_column(column, no_wrap=True)
    for column in ("GPUs a node", "memory", "bf16 TFLOP/s", "link GB/s", "NICs"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in presets():
        cluster = load_cluster(name)
        node = cluster.node
        domain = f" ({cluster.gpus_per_domain} by NVLink)" if node.nvlink_domain_gpus else ""
        nics = f"{node.num_nics} x {8 * node.nic_bytes_per_s / 1e9:.0f} Gb/s" if node.num_nics else "none"
        table.add_row(
            name,
            cluster.gpu.name,
            f"{node.num_gpus}{domain}",
            gib(cluster.gpu.memory_bytes),
            f"{cluster.gpu.peak_flops['bfloat16'] / 1e12:.0f}",
            f"{node.nvlink_bytes_per_s / 1e9:.0f}",
            nics,
        )
    show(table, make_console(sys.stdout))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print one description."""
    text, source = cluster_text(arguments.cluster)
    cluster = parse_cluster(text, source=source)
    if arguments.toml:
        sys.stdout.write(text)
        return 0
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(cluster), indent=1).decode() + "\n")
        return 0
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    comments = source_comments(text)
    given = _flat(tomllib.loads(text))
    above = ""
    for key, value in _flat(msgspec.to_builtins(cluster)).items():
        comment = comments.get(key, "") if key in given else "default"
        table.add_row(key, _readable(key, value), "〃" if comment == above and comment else comment)
        above = comment
    console = make_console(sys.stdout)
    show(Text(f"{cluster.name} ({source})", style="bold"), console)
    show(table, console)
    return 0


def source_comments(text: str) -> dict[str, str]:
    """Key → the comment that belongs to it in a description: behind it, or the lines above it.

    Keys that follow one another share the comment above the first of them.
    """
    found: dict[str, str] = {}
    section, block, open_block = "", [], False
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("["):
            section = f"{line.strip('[]')}." if line else section
            block, open_block = [], False
        elif line.startswith("#"):
            block = [*block, line[1:].strip()] if open_block else [line[1:].strip()]
            open_block = True
        else:
            open_block = False
            key, _, rest = line.partition("=")
            behind = rest.rpartition("#")[2].strip() if "#" in rest else ""
            found[section + key.strip()] = behind or " ".join(block)
            if behind and block:
                found[section + key.strip()] = f"{' '.join(block)} ({behind})"
    return found


def _flat(data: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _readable(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ".".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    for suffix, unit, scale in _UNITS:
        if suffix in key and not (suffix == "_bytes" and value < 2**30):
            return f"{value / scale:,.6g} {unit}"
    return f"{value / 2**20:,.6g} MiB" if "_bytes" in key else f"{value:,}"
