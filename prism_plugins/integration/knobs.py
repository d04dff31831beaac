"""What the layout spaces of all frameworks need: judging command lines, narrowing knobs, editing command lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prism_plugins.errors import PrismError
from prism_plugins.integration.tuning import Knob, Verdict


def verdicts(
    parser: Any,
    commands: Sequence[Sequence[str]],
    validate: Callable[[Any, Sequence[str]], None],
    *,
    refusals: tuple[type[Exception], ...],
    where: str = "",
) -> Iterator[Verdict]:
    """What the script's parser and a framework's validation say of command lines.

    Args:
        parser: The script's argparse parser; what it refuses is a verdict, not the end of the process.
        validate: Is given the parsed arguments, which it may change, and the command line.
        refusals: What ``validate`` raises, beside :class:`PrismError`, for what the framework refuses.
        where: Follows the name of an error that has no text.
    """

    def refuse(message: str) -> None:
        raise PrismError(message)

    parser.error = refuse
    for i, command in enumerate(commands):
        try:
            arguments = parser.parse_args(list(command[1:]))
            validate(arguments, command)
        except (PrismError, *refusals) as error:
            reason = " ".join(str(error).split()) or f"{type(error).__name__}{where}"
            yield Verdict(legal=False, reason=reason)
            continue
        found = {}
        if i == 0:
            found = {**scalars(arguments), "prism_flags": sorted(parser._option_string_actions)}
        yield Verdict(legal=True, arguments=found)


def scalars(arguments: Any) -> dict[str, Any]:
    """Those of parsed arguments that are numbers, texts or None."""
    return {k: v for k, v in vars(arguments).items() if isinstance(v, int | float | str | None)}


def narrowed(knob: Knob, chosen: Mapping[str, tuple[str, ...]]) -> Knob:
    """The knob with the values that the user allows."""
    if knob.name not in chosen:
        return knob
    by_text = {str(value).lower(): value for value in knob.values}
    values = []
    for text in chosen[knob.name]:
        if text.lower() not in by_text:
            raise PrismError(
                f"{knob.name} cannot be {text}; values: {', '.join(str(v).lower() for v in knob.values)}"
            )
        values.append(by_text[text.lower()])
    return Knob(name=knob.name, values=tuple(dict.fromkeys(values)), own=knob.own, help=knob.help)


def without(argv: Sequence[str], with_value: Sequence[str], switches: Sequence[str]) -> tuple[str, ...]:
    """argv without some flags: those that take a value (``--flag V``, ``--flag=V``) and those that do not."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in with_value:
            skip = not equals
        elif word not in switches:
            kept.append(word)
    return tuple(kept)


def pairs(argv: Sequence[str], with_value: Sequence[str], switches: Sequence[str]) -> dict[str, str]:
    """Those flags of argv, with their values."""
    found: dict[str, str] = {}
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in with_value:
            found[name] = value if equals else argv[i + 1] if i + 1 < len(argv) else ""
        elif word in switches:
            found[word] = ""
    return found


def powers_of_2(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [1 << i for i in range(max(1, most).bit_length())]


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
