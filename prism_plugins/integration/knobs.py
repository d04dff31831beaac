"""What the layout spaces of all frameworks need: judging command lines, narrowing knobs, editing command lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def narrowed_all(knobs: Iterable[Knob], chosen: Mapping[str, tuple[str, ...]]) -> tuple[Knob, ...]:
    """The knobs with the values that the user allows. Raises :class:`PrismError` for a knob or a value that there is not."""
    known = tuple(knobs)
    if unknown := set(chosen) - {knob.name for knob in known}:
        raise PrismError(
            f"there is no knob {', '.join(sorted(unknown))}; knobs: {', '.join(k.name for k in known)}"
        )
    return tuple(_narrowed(knob, chosen[knob.name]) if knob.name in chosen else knob for knob in known)


def _narrowed(knob: Knob, texts: tuple[str, ...]) -> Knob:
    by_text = {str(value).lower(): value for value in knob.values}
    values = []
    for text in texts:
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
