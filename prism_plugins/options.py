"""The options of an emulation: flags, their environment twins, validation, one typed object.

Every option is one row of :data:`TABLE`, which also feeds ``--prism-help``. Flags win over the environment. They
are taken out of the command line, so that the script's own parser never sees them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from prism_plugins.arming import ARMED
from prism_plugins.errors import PrismError
from prism_plugins.gpu.timing import DEFAULT_ITERATIONS
from prism_plugins.moe_load import BALANCED, parse_moe_load

MAX_WORLD_SIZE = 1 << 20
LOGGING_RANK = -1
"""Stands for the rank that prints the framework's log, which only the slices tell."""
DEVICES = ("auto", "virtual", "cuda", "cpu")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. Written to run.json."""

    world_size: int
    """Ranks of the target world."""
    cluster: str = "dgx-h100"
    """Preset name or path of a TOML file."""
    calibration: str = ""
    """Calibration file, ``none`` for formulas alone; empty: the one that ships."""
    device: str = "virtual"
    """``virtual``, ``cpu`` or ``cuda``; ``auto`` is resolved before this object is made."""
    ranks: tuple[int, ...] = ()
    """Ranks of interest: sliced themselves, whether or not another rank represents them."""
    iterations: int = 5
    """Iterations a slice runs at most while it waits for two equal ones."""
    audit: int = 0
    """Further ranks to slice only to compare them with their inferred program."""
    strict: bool = False
    """Unpriced ops are an error."""
    out: str = ""
    """Run directory; empty: prism_out/<time>-<script>."""
    jobs: int = 1
    """Slices at a time, in each launched process."""
    cache: bool = True
    gpu_memory: int = 0
    """On ``cuda``: bytes of the GPU that a slice may take, so that a larger GPU behaves as the target's; 0: all."""
    replay: tuple[int, ...] = ()
    """On ``cuda``: ranks to run again among timed virtual participants."""
    moe_load: str = BALANCED
    """Tokens per expert, see :mod:`prism_plugins.moe_load`."""
    apex: bool = False
    """The cluster has NVIDIA Apex."""
    tune_s: float = 0.0
    """Search for the best layout for so many seconds instead of emulating the launch's own; 0: do not."""
    tune_knobs: tuple[str, ...] = ()
    """``name=value,value`` each: the only values of a knob that the search may choose."""

    @property
    def all_ranks(self) -> bool:
        """Whether every rank of the target world is of interest."""
        return len(self.ranks) == self.world_size


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Options and the user's own command."""

    options: Options
    run_as: str
    """``script`` or ``module``."""
    argv: tuple[str, ...]
    """Script path or module name, then its arguments."""


class Option(NamedTuple):
    """One row of the table."""

    flag: str
    metavar: str
    """Empty for a switch."""
    parse: Callable[[str], Any]
    default: str
    """As shown in the help."""
    help: str

    @property
    def env(self) -> str:
        """The environment twin: ``--prism-world-size`` is ``PRISM_WORLD_SIZE``."""
        return self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def name(self) -> str:
        """Key of the parsed value."""
        return self.flag.removeprefix("--prism-").replace("-", "_")


def _integer(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expects a whole number, not {text!r}") from None
        if not lowest <= value <= highest:
            raise ValueError(f"must be between {lowest} and {highest}, not {value}")
        return value

    return parse


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}, not {text!r}{_did_you_mean(text, values)}")
        return text

    return parse


def _switch(text: str) -> bool:
    low = text.lower()
    if low in ("1", "true", "yes", "on"):
        return True
    if low in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"is a switch: 1 or 0, not {text!r}")


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|)", re.IGNORECASE)


def _size(text: str) -> int:
    """``80GiB``, ``80GB`` or plain bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expects a size such as 80GiB, not {text!r}")
    unit = found[2].upper()
    base = 1024 if "I" in unit else 1000
    size = int(float(found[1]) * base ** ("KMGT".find(unit[:1]) + 1 if unit else 0))
    if not 2**30 <= size <= 2**43:
        raise ValueError(f"must be between 1GiB and 8TiB, not {text!r}")
    return size


def parse_time(text: str) -> float:
    """``90s``, ``10m``, ``1h`` or plain seconds, in seconds. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found or not float(found.group(1)):
        raise ValueError(f"expects a time such as 90s, 10m or 1h, not {text!r}")
    return float(found.group(1)) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[found.group(2)]


def _path_or_none(text: str) -> str:
    """Absolute, so that the run can be priced again from anywhere."""
    return text if _text(text) == "none" else os.path.abspath(text)


TABLE = (
    Option("--prism-emulate", "", _switch, "", "Emulate the job instead of running it."),
    Option(
        "--prism-world-size", "W", _integer(1, MAX_WORLD_SIZE), "required", "Ranks (GPUs) of the target job."
    ),
    Option(
        "--prism-cluster",
        "PRESET|FILE",
        _text,
        "dgx-h100",
        "The cluster to predict for: a preset (dgx-h100, dgx-h200, dgx-a100) or a TOML file.",
    ),
    Option(
        "--prism-calibration",
        "FILE|none",
        _path_or_none,
        "measured on an H200",
        "Price ops by a file that `prism calibrate` wrote. none: by formulas alone.",
    ),
    Option(
        "--prism-device",
        "auto|virtual|cuda|cpu",
        _choice(*DEVICES),
        "auto",
        "What slices run on. virtual: no GPU, shapes only. cuda: a real GPU, where kernels and memory are measured and "
        "ranks of interest replayed. cpu: really computed on the CPU (small models). auto: virtual.",
    ),
    Option(
        "--prism-ranks",
        "LIST|all",
        _text,
        "none",
        "Ranks of interest, e.g. 0,5-9: run as slices of their own instead of being inferred.",
    ),
    Option(
        "--prism-iterations",
        "N",
        _integer(1, 1000),
        "5",
        "Iterations a slice runs at most; it ends as soon as two in a row are equal (on cuda: 16, timed ones and traced ones).",
    ),
    Option(
        "--prism-audit",
        "N",
        _integer(0, MAX_WORLD_SIZE),
        "0",
        "Also run N ranks that no slice represents and compare them, op by op, with what was inferred.",
    ),
    Option(
        "--prism-gpu-memory",
        "SIZE",
        _size,
        "all",
        "With --prism-device cuda: memory a slice may take of its GPU, e.g. 80GiB, so that a larger GPU behaves as the "
        "target's.",
    ),
    Option(
        "--prism-replay",
        "LIST|auto|none",
        _text,
        "none",
        "Ranks to run again after the simulation (on cuda: auto); their own log then shows the target job's times. On a GPU virtual peers "
        "answer when the simulation says, without one the clocks of the script show simulated time. auto: those of "
        "--prism-ranks, else the rank that logs.",
    ),
    Option(
        "--prism-moe-load",
        "balanced|zipf:S|FILE",
        parse_moe_load,
        "balanced",
        "How many tokens each expert gets: the same; in proportion to 1/rank^S; or as in a JSON or CSV file of tokens "
        "per expert.",
    ),
    Option(
        "--prism-apex",
        "",
        _switch,
        "off",
        "The cluster has NVIDIA Apex: scripts that use its fused kernels where they can be imported do.",
    ),
    Option("--prism-strict", "", _switch, "off", "An op that no cost rule prices is an error."),
    Option(
        "--prism-out",
        "DIR",
        _text,
        "prism_out/<time>-<script>",
        "Run directory: programs, prediction.json, predicted.log, traces.",
    ),
    Option(
        "--prism-jobs",
        "N",
        _integer(1, 4096),
        "number of cores",
        "Slices at a time, in each launched process.",
    ),
    Option("--prism-no-cache", "", _switch, "off", "Neither reuse nor keep slices of earlier runs."),
    Option(
        "--prism-tune",
        "TIME",
        parse_time,
        "off",
        "Search for the fastest parallel layout that fits, for that long (90s, 10m, 1h), instead of emulating this one; as "
        "`prism tune`.",
    ),
    Option(
        "--prism-tune-knobs",
        "NAME=V[,V…][;…]",
        _text,
        "all",
        "Values that --prism-tune may choose, e.g. 'tp=4,8;micro_batch=1'.",
    ),
    Option("--prism-help", "", _switch, "", "Show this help."),
)
_BY_FLAG = {option.flag: option for option in TABLE}


def parse_command(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Job | None:
    """Parse ``[prism flags] SCRIPT|-m MODULE … [prism flags] …``; None when help was asked for.

    Raises:
        PrismError: one line for an unknown flag, a missing or bad value, or no script.
    """
    for word in words:
        if not _is_text(word):
            raise PrismError(f"{os.fsencode(word)!r} on the command line is not UTF-8; rename that file")
    given, rest = _split(words)
    if given.get("help") is not None or rest in (["-h"], ["--help"]):
        return None
    values: dict[str, Any] = {}
    for option in TABLE:
        text, source = given.get(option.name), option.flag
        if text is None:
            text, source = environ.get(option.env), option.env
        if text is not None:
            try:
                values[option.name] = option.parse(text)
            except ValueError as error:
                raise PrismError(f"{source} {error}") from None
    if environ.get(ARMED) and not values.get("emulate"):
        named = ", ".join(
            dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--prism-"))
        )
        raise PrismError(f"{named} without --prism-emulate; add it, or leave them all out to train for real")
    if rest and rest[0] == "-m":
        run_as, rest = "module", rest[1:]
    else:
        run_as = "script"
    if not rest:
        raise PrismError("no script given; use: python -m prism_plugins.run SCRIPT … or --prism-help")
    if rest[0].startswith("-"):
        raise PrismError(f"{rest[0]} stands where the script belongs: python -m prism_plugins.run SCRIPT …")
    return Job(options=_options(values, environ), run_as=run_as, argv=tuple(rest))


def parse_ranks(text: str, *, world_size: int) -> tuple[int, ...]:
    """``0,5-9`` or ``all`` as ascending ranks. Raises ValueError."""
    if text == "all":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"expects ranks such as 0,5-9 or all, not {text!r}")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"has the empty range {part.strip()}")
        if high >= world_size:
            raise ValueError(
                f"names rank {high}, but the world size is {world_size} (ranks 0-{world_size - 1})"
            )
        ranks.update(range(low, high + 1))
    return tuple(sorted(ranks))


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:  # Bytes that were not UTF-8.
        return False
    return True


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate prism's flags from the rest; values still text, "1" for a switch."""
    given: dict[str, str] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--prism-"):
            rest.append(word)
            continue
        flag, equals, value = word.partition("=")
        option = _BY_FLAG.get(flag)
        if option is None:
            raise PrismError(f"unknown flag {flag}{_did_you_mean(flag, _BY_FLAG)} (--prism-help lists all)")
        if not option.metavar:
            if equals:
                raise PrismError(f"{flag} takes no value")
            value = "1"
        elif not equals:
            if not queue or queue[0].startswith("--"):
                raise PrismError(f"{flag} needs a value ({option.metavar})")
            value = queue.pop(0)
        given[option.name] = value
    return given, rest


def _options(values: dict[str, Any], environ: Mapping[str, str]) -> Options:
    world_size = values.get("world_size")
    if world_size is None:
        raise PrismError("--prism-world-size is missing: how many GPUs has the job to be emulated?")
    device = values.get("device", "auto")
    if device != "cuda" and "gpu_memory" in values:
        raise PrismError("--prism-gpu-memory needs a real GPU: --prism-device cuda")
    if device == "cpu" and "replay" in values:
        raise PrismError(
            "--prism-replay runs on a GPU (--prism-device cuda) or the virtual device, not on cpu"
        )
    ranks = _ranks(values, "ranks", world_size)
    replay: tuple[int, ...] = ()
    which = values.get("replay", "auto" if device == "cuda" else "none")
    if which == "auto":
        replay = ranks or (LOGGING_RANK,)
    elif which != "none":
        replay = _ranks(values, "replay", world_size)
    audit = values.get("audit", 0)
    if audit >= world_size and audit > 0:
        raise PrismError(f"--prism-audit must be less than the world size {world_size}, not {audit}")
    return Options(
        world_size=world_size,
        cluster=values.get("cluster", "dgx-h100"),
        calibration=values.get("calibration", ""),
        device="virtual" if device == "auto" else device,
        ranks=ranks,
        iterations=values.get("iterations", DEFAULT_ITERATIONS if device == "cuda" else 5),
        gpu_memory=values.get("gpu_memory", 0),
        replay=replay,
        audit=audit,
        strict=values.get("strict", False),
        out=values.get("out", ""),
        # Slices that share a GPU would measure each other.
        jobs=1 if device == "cuda" else values.get("jobs") or _default_jobs(environ),
        cache=not values.get("no_cache", False),
        moe_load=values.get("moe_load", BALANCED),
        apex=values.get("apex", False),
        tune_s=values.get("tune", 0.0),
        tune_knobs=tuple(k for k in values.get("tune_knobs", "").split(";") if k),
    )


def _ranks(values: Mapping[str, Any], name: str, world_size: int) -> tuple[int, ...]:
    try:
        return parse_ranks(values[name], world_size=world_size) if name in values else ()
    except ValueError as error:
        raise PrismError(f"--prism-{name} {error}") from None


def _default_jobs(environ: Mapping[str, str]) -> int:
    """The cores there are, shared by the processes that the launcher started on this machine."""
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE", "1")  # torchrun's, deepspeed's
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(local) if local.isdecimal() else 1))


def _did_you_mean(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
