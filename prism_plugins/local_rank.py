"""``--local_rank`` on a script's command line: launchers put the physical one there, a slice needs its own.

``deepspeed`` and ``torch.distributed.launch`` pass ``--local_rank=N`` (or ``--local-rank=N``) beside the environment
variable LOCAL_RANK; DeepSpeed refuses to start when the two differ. Negative values mean "not given" by convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prism_plugins.errors import PrismError

_FLAGS = ("--local_rank", "--local-rank")


def check_local_rank(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise :class:`PrismError` where a local rank on the command line contradicts another one or LOCAL_RANK."""
    given = [(argv[i].partition("=")[0], int(value)) for i, _, value in _local_ranks(argv)]
    given = [(flag, value) for flag, value in given if value >= 0]
    if not given:
        return
    launched = environ.get("LOCAL_RANK", "")
    flag, value = given[-1]
    if launched.isdecimal() and int(launched) != value:
        raise PrismError(
            f"{flag} {value} on the command line contradicts the launcher, which set LOCAL_RANK={launched}; leave it "
            "out: the launcher passes it where it is needed"
        )
    if len({number for _, number in given}) > 1:
        numbers = " and ".join(str(number) for _, number in given)
        raise PrismError(f"{flag} is given more than once, as {numbers}; leave it out or give it once")


def with_local_rank(argv: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """The command line for another local rank; unchanged where it names none."""
    words = list(argv)
    for index, prefix, value in _local_ranks(argv):
        if int(value) >= 0:
            words[index + (not prefix)] = f"{prefix}{local_rank}"
    return tuple(words)


def _local_ranks(argv: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(index of the flag, ``--local_rank=`` or empty where the value is a word of its own, value)."""
    for i, word in enumerate(argv[1:], start=1):
        flag, equals, value = word.partition("=")
        if flag not in _FLAGS:
            continue
        if not equals:
            value = argv[i + 1] if i + 1 < len(argv) else ""
        if value.removeprefix("-").isdecimal():
            yield i, f"{flag}=" if equals else "", value
