"""The NCCL and CUDA variables of a launch that change what a collective does.

Grammar of ``NCCL_ALGO`` and ``NCCL_PROTO``: NCCL's ``parseList`` (src/graph/tuning.cc), for example
``ring;allreduce:tree,nvls`` or ``^LL128``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from prism_plugins.costs.nccl.tables import ALGORITHMS, PROTOCOLS
from prism_plugins.errors import PrismError

VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Those that are read; :func:`relevant` keeps them with a run."""

_FUNCTIONS = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
}
_UNMODELLED = ("CollNetDirect", "CollNetChain")
_MOST_CHANNELS = 64


class NcclSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment asks of NCCL."""

    algorithms: dict[str, tuple[str, ...]] = {}
    """Collective → algorithms allowed; absent: all."""
    protocols: dict[str, tuple[str, ...]] = {}
    nvls: bool = True
    min_channels: int = 0
    """0: not limited."""
    max_channels: int = 0
    variables: dict[str, str] = {}
    """The variables that were set, as they were."""

    def clamp_channels(self, channels: int) -> int:
        """Channels after the user's limits."""
        if self.max_channels:
            channels = min(channels, self.max_channels)
        return max(channels, self.min_channels, 1)


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of :data:`VARIABLES` that are set."""
    return {name: environ[name] for name in VARIABLES if environ.get(name, "").strip()}


def parse_settings(environ: Mapping[str, str]) -> NcclSettings:
    """Settings from an environment.

    Raises:
        PrismError: NCCL would refuse a value, or it selects nothing that this model knows. Names the variable.
    """
    variables = relevant(environ)
    return NcclSettings(
        algorithms=_allowed("NCCL_ALGO", variables, (*ALGORITHMS, *_UNMODELLED), modelled=ALGORITHMS),
        protocols=_allowed("NCCL_PROTO", variables, PROTOCOLS, modelled=PROTOCOLS),
        nvls=_integer("NCCL_NVLS_ENABLE", variables, default=2, most=2) != 0,
        min_channels=_channels(("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"), variables),
        max_channels=_channels(("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"), variables),
        variables=variables,
    )


def _channels(names: tuple[str, ...], variables: Mapping[str, str]) -> int:
    return max(_integer(name, variables, default=0, most=_MOST_CHANNELS) for name in names)


def _integer(name: str, variables: Mapping[str, str], *, default: int, most: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise PrismError(f"{name}={text}: an integer is needed") from None
    if not 0 <= value <= most:
        raise PrismError(f"{name}={text}: must lie between 0 and {most}")
    return value


def _allowed(
    name: str, variables: Mapping[str, str], known: tuple[str, ...], *, modelled: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    text = variables.get(name)
    if text is None:
        return {}
    by_lower = {element.lower(): element for element in known}
    allowed: dict[str, tuple[str, ...]] = {}
    for position, entry in enumerate(part for part in text.split(";") if part):
        prefix, colon, elements = entry.partition(":")
        if not colon:
            if position:
                raise PrismError(f"{name}={text}: all entries except the first need a collective before ':'")
            prefix, elements = "", entry
        if prefix and prefix.strip().lower() not in _FUNCTIONS:
            raise PrismError(
                f"{name}={text}: unknown collective '{prefix}'; known are {', '.join(_FUNCTIONS)}"
            )
        unset = elements.startswith("^")
        listed = set()
        for element in elements.removeprefix("^").split(","):
            if element.strip().lower() not in by_lower:
                raise PrismError(f"{name}={text}: unknown '{element}'; known are {', '.join(known)}")
            listed.add(by_lower[element.strip().lower()])
        chosen = tuple(e for e in modelled if (e in listed) != unset)
        if not chosen:
            raise PrismError(f"{name}={text}: {elements} is not modelled; choose from {', '.join(modelled)}")
        for function in [_FUNCTIONS[prefix.strip().lower()]] if prefix else _FUNCTIONS.values():
            allowed[function] = chosen
    return allowed
