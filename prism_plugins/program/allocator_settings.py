"""What ``PYTORCH_ALLOC_CONF`` asks of torch's caching allocator.

Keys and formats of ``c10/core/AllocatorConfig.cpp`` and ``c10/cuda/CUDAAllocatorConfig.cpp`` (torch 2.11 to 2.13):
``key:value`` pairs with commas between them; the divisions of ``roundup_power2_divisions`` are one number for all sizes or a
list ``[MiB:divisions,…,>:divisions]`` by the power of two, in MiB, that a size lies above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from prism_plugins.errors import PrismError

MIB = 2**20
ROUNDUP_INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB; what is smaller or larger counts to the first and last."""
UNLIMITED = 2**64 - 1
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WITHOUT_EFFECT = (
    "backend", "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse",
)  # fmt: skip
"""Keys that leave device memory as it is; of ``backend`` only ``native``."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the allocator, torch's defaults."""

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    """Bytes; larger blocks are not split."""
    max_non_split_rounding: int = 20 * MIB
    """Bytes by which such a block may be larger than a request."""
    garbage_collection_threshold: float = 0.0
    """Share of the memory that ``set_per_process_memory_fraction`` allows, 0 for none."""
    roundup_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    unknown: tuple[str, ...] = ()
    """Keys that this does not follow, in the order of the variable."""


def conf_of(environment: Mapping[str, str]) -> str:
    """What a launch sets, as text."""
    return next((environment[v] for v in _VARIABLES if environment.get(v)), "")


def settings_from_environment(environment: Mapping[str, str]) -> AllocatorSettings:
    """The settings of a launch. Raises :class:`PrismError` as :func:`parse_settings` does."""
    return parse_settings(conf_of(environment))


def parse_settings(text: str) -> AllocatorSettings:
    """Read the value of the variable.

    Raises:
        PrismError: torch would refuse it.
    """
    found: dict[str, object] = {}
    unknown = []
    for key, value in _pairs(text):
        match key:
            case "expandable_segments":
                if value not in ("True", "False"):
                    raise _refused(text, f"{key} is True or False")
                found["expandable_segments"] = value == "True"
            case "max_split_size_mb" | "max_non_split_rounding_mb":
                size = _number(text, key, value)
                if size <= 20:
                    raise _refused(text, f"{key} has to be above 20")
                found[key.removesuffix("_mb")] = min(size * MIB, UNLIMITED)
            case "garbage_collection_threshold":
                found[key] = _share(text, key, value)
            case "roundup_power2_divisions":
                found["roundup_divisions"] = _divisions(text, value)
            case "backend" if value != "native":
                unknown.append(f"{key}:{value}")
            case _ if key not in _WITHOUT_EFFECT:
                unknown.append(key)
    return AllocatorSettings(**found, unknown=tuple(unknown))


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in re.split(r",(?![^\[]*\])", text.replace(" ", "")):
        if not part:
            continue
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise _refused(text, f"{part} is not key:value")
        pairs.append((key, value))
    return pairs


def _refused(text: str, why: str) -> PrismError:
    return PrismError(f"PYTORCH_ALLOC_CONF={text}: {why}; torch would not start with it")


def _number(text: str, key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise _refused(text, f"{key} is a whole number, not {value}")
    return int(value)


def _share(text: str, key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise _refused(text, f"{key} lies between 0 and 1")
    return share


def _divisions(text: str, value: str) -> tuple[int, ...]:
    """Divisions of each interval of sizes."""
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(text, key, value),) * ROUNDUP_INTERVALS
    divisions = [0] * ROUNDUP_INTERVALS
    last = -1
    for entry in value.strip("[]").split(","):
        above, colon, count = entry.partition(":")
        if not colon:
            raise _refused(text, f"{entry} in {key} is not MiB:divisions")
        number = 0 if count == "0" else _power_of_two(text, key, count)
        if above == ">":
            begin = max(last, 0) + 1
            divisions[begin:] = [number] * (ROUNDUP_INTERVALS - begin)
            continue
        size = _power_of_two(text, key, above)
        index = min(size.bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if last < 0:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions)


def _power_of_two(text: str, key: str, value: str) -> int:
    number = _number(text, key, value)
    if number < 1 or number & (number - 1):
        raise _refused(text, f"{key} takes powers of two, not {value}")
    return number
