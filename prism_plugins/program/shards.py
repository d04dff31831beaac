"""The distributed optimizer's part of a program for another data-parallel rank's shard of the parameters.

Data-parallel ranks of one role run the same program but for the optimizer phase, whose loops run over the
fragments of parameters a rank owns, and for the optimizer state that is live all the time. Both are parsed into
loops over the rank's fragment lists (:mod:`.shard_loops`) and issued again for another rank's lists. Ranks with
equal fragments share one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.model import EVENT_DTYPE, Allocation, EventKind, Program
from prism_plugins.program.parse_loops import SMALLEST_FRAGMENT, parse
from prism_plugins.program.shard_loops import (
    Item,
    Lists,
    Literal,
    Row,
    Tables,
    issue,
    merge,
)
from prism_plugins.program.slices import OptimizerShard
from prism_plugins.world.layout import Layout

RankShards = tuple[OptimizerShard, ...]
"""What one rank owns in each optimizer of the chain, in step order."""


class ShardIndex:
    """Which shards each rank owns, one per optimizer of the chain. False when optimizer state is replicated.

    The sharding axis is dp × cp (dense) or the experts' dp. An optimizer that shards over blocks of this axis
    only (several optimizer instances) repeats its shards block after block.
    """

    def __init__(self, layout: Layout, shards: Sequence[OptimizerShard]) -> None:
        self._layout = layout
        self._by_optimizer: dict[int, dict[int, OptimizerShard]] = {}
        for shard in shards:
            self._by_optimizer.setdefault(shard.optimizer, {})[shard.index] = shard
        self._works: dict[tuple[int, ...], int] = {}
        self._numbers: dict[RankShards, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_optimizer)

    def of(self, rank: int) -> RankShards:
        """The shards a rank owns, in step order."""
        indices = self._indices(rank)
        return tuple(
            by_index[i] for i, (_, by_index) in zip(indices, sorted(self._by_optimizer.items()), strict=True)
        )

    def work(self, rank: int) -> int:
        """A number that is equal for ranks with equal fragments, whatever their index."""
        indices = self._indices(rank)
        work = self._works.get(indices)
        if work is None:
            key = tuple(msgspec.structs.replace(s, index=0) for s in self.of(rank))
            work = self._works[indices] = self._numbers.setdefault(key, len(self._numbers))
        return work

    def _indices(self, rank: int) -> tuple[int, ...]:
        indices = []
        for _, by_index in sorted(self._by_optimizer.items()):
            expert = next(iter(by_index.values())).expert
            indices.append(sharding_position(self._layout, rank, expert=expert) % len(by_index))
        return tuple(indices)


def sharding_position(layout: Layout, rank: int, *, expert: bool) -> int:
    """Position of a rank in the group its optimizer shards over (members ascending)."""
    sizes = layout.sizes(expert=expert)
    coords = layout.coords(rank, expert=expert)
    position = 0
    for axis in reversed(sizes):
        if axis in ("dp", "cp"):
            position = position * sizes[axis] + coords[axis]
    return position


def fragment_lists(shards: RankShards, *, tp_first: bool) -> dict[tuple, tuple[int, ...]]:
    """The lists an optimizer's loops may run over, in elements, by name.

    ``all``; ``counted`` in the gradient norm (on tp rank != 0 only parameters that tensor parallelism splits);
    ``half`` and ``full`` precision model parameters; each parameter ``group``; for several optimizers also
    what all of them own and count.
    """
    lists: dict[tuple, tuple[int, ...]] = {}
    for shard in shards:
        o = shard.optimizer
        full = set(shard.full_precision)
        lists["all", o] = _pick(shard, lambda i, _: True)
        lists["counted", o] = _pick(
            shard, lambda i, split, s=shard: (split or tp_first) and i not in s.uncounted
        )
        lists["half", o] = _pick(shard, lambda i, _, f=full: i not in f)
        lists["full", o] = _pick(shard, lambda i, _, f=full: i in f)
        begin = 0
        for g, size in enumerate(shard.group_sizes):
            lists["group", o, g] = tuple(n for n, _ in shard.fragments[begin : begin + size])
            begin += size
    if len(shards) > 1:
        for name in ("all", "counted"):
            lists[name, -1] = tuple(n for s in shards for n in lists[name, s.optimizer])
    return lists


def _pick(shard: OptimizerShard, keep) -> tuple[int, ...]:
    return tuple(n for i, (n, split) in enumerate(shard.fragments) if keep(i, split))


def readability(shards: RankShards, tp_first: bool) -> tuple[int, int]:
    """How well loops over a rank's lists can be seen: how many parameter groups it owns something of, and the
    length of the shortest list that loops of several events run over."""
    lists = fragment_lists(shards, tp_first=tp_first)
    groups = sum(bool(sizes) for name, sizes in lists.items() if name[0] == "group")
    shortest = min(len(sizes) for name, sizes in lists.items() if name[0] in ("all", "counted", "half"))
    return groups, shortest


def is_readable(shards: RankShards, tp_first: bool) -> bool:
    """True when all loops can be seen: two turns of each, and something of every parameter group."""
    groups, shortest = readability(shards, tp_first)
    return groups == sum(len(s.group_sizes) for s in shards) and shortest > 1


class Pattern(NamedTuple):
    """The loops of an optimizer, by phase, and those of its state."""

    phases: list[list[Item]]
    state: list[Item]

    def merged(self, other: Pattern) -> Pattern | None:
        """What both ranks allow; None when they run other loops."""
        if len(self.phases) != len(other.phases):
            return None
        phases = [merge(a, b) for a, b in zip(self.phases, other.phases, strict=True)]
        state = merge(self.state, other.state)
        if state is None or any(phase is None for phase in phases):
            return None
        return Pattern([phase for phase in phases if phase is not None], state)


class ShardedProgram:
    """A sliced (or derived) program prepared for the shards of other data-parallel ranks.

    Args:
        program: The program.
        shards: What its rank owns.
        tp_first: Whether it is first in its tensor-parallel group.
        pattern: From ranks in which all loops can be seen; see :func:`is_readable`.
    """

    def __init__(
        self, program: Program, shards: RankShards, *, tp_first: bool, pattern: Pattern | None = None
    ) -> None:
        self._program = program
        self._lists = fragment_lists(shards, tp_first=tp_first)
        for name, sizes in self._lists.items():
            if len(sizes) == 1 and sizes[0] < SMALLEST_FRAGMENT:
                raise CannotDeriveError(
                    f"the list {name} is one fragment of {sizes[0]} elements, too small to be told"
                )
        self._spans = [
            (begin + 1, end) for phase, begin, end in program.iter_phases() if phase.kind == "optimizer"
        ]
        if not self._spans:
            raise CannotDeriveError("the program has no optimizer phase")
        self._phases: list[list[Item]] = []
        for i, (begin, end) in enumerate(self._spans):
            rows = program.events[begin:end].tolist()
            known = pattern.phases[i] if pattern is not None and i < len(pattern.phases) else ()
            self._phases.append(parse(rows, program.signatures, self._lists, known))
        self._state = parse(
            _state_rows(program.initial),
            program.signatures,
            self._lists,
            pattern.state if pattern is not None else (),
        )
        self._check()

    @property
    def pattern(self) -> Pattern:
        """The loops, for reading other ranks' programs."""
        return Pattern(self._phases, self._state)

    def check(self, shards: RankShards, *, tp_first: bool) -> None:
        """Raise :class:`CannotDeriveError` unless :meth:`program_for` can serve these shards."""
        lists = fragment_lists(shards, tp_first=tp_first)
        self._check_lists(lists)
        tables = Tables(self._program.signatures)
        for items in (*self._phases, self._state):
            issue(items, lists, tables, 0)

    def program_for(self, shards: RankShards, *, tp_first: bool) -> Program:
        """The program with the optimizer phase and state of other shards. Raises :class:`CannotDeriveError`."""
        lists = fragment_lists(shards, tp_first=tp_first)
        self._check_lists(lists)
        source = self._program
        tables = Tables(source.signatures)
        pieces, at = [], 0
        next_id = _next_id(source)
        for (begin, end), items in zip(self._spans, self._phases, strict=True):
            rows = issue(items, lists, tables, next_id)
            next_id += len(rows)
            pieces += [source.events[at:begin], np.array(rows, dtype=EVENT_DTYPE)]
            at = end
        pieces.append(source.events[at:])
        return Program(
            rank=source.rank,
            events=np.concatenate(pieces),
            signatures=tables.signatures,
            comms=source.comms,
            groups=source.groups,
            phases=source.phases,
            initial=self._initial(lists, tables, next_id),
            source="derived",
        )

    def _initial(self, lists: Lists, tables: Tables, next_id: int) -> list[Allocation]:
        others = {a.id: a for a in self._program.initial}
        state = next((a.category for a in self._program.initial if a.category == "optimizer_state"), "other")
        return [
            others.get(ref, Allocation(ref, value, state))
            for _, _, _, ref, value in issue(self._state, lists, tables, next_id)
        ]

    def _check(self) -> None:
        """What was parsed must give the program back."""
        again = self._reissued(self._lists)
        for (begin, end), rows in zip(self._spans, again, strict=True):
            mine = self._program.events[begin:end]
            if len(mine) != len(rows) or np.any(mine["kind"] != np.array(rows, dtype=EVENT_DTYPE)["kind"]):
                raise CannotDeriveError("the loops found in the optimizer phase do not give it back")

    def _reissued(self, lists: Lists) -> list[list[Row]]:
        tables = Tables(self._program.signatures)
        return [issue(items, lists, tables, _next_id(self._program)) for items in self._phases]

    def _check_lists(self, lists: Lists) -> None:
        if not set(lists) <= set(self._lists):
            raise CannotDeriveError("another rank has other parameter groups")
        used = {
            name
            for items in (*self._phases, self._state)
            for item in items
            if not isinstance(item, Literal)
            for name in item.names
        }
        for name, sizes in lists.items():
            if not sizes and name[0] in ("all", "counted"):
                raise CannotDeriveError("another rank owns nothing the optimizer loops over")
            if sizes and name not in used and name[0] in ("group", "full"):
                raise CannotDeriveError(f"no loop over the list {name} was seen")


def _state_rows(initial: Sequence[Allocation]) -> list[Row]:
    """What is live at the start as allocation events; only optimizer state may be part of a loop."""
    return [
        (EventKind.ALLOC if a.category == "optimizer_state" else EventKind.HOST, 0, 0, a.id, a.nbytes)
        for a in initial
    ]


def _next_id(program: Program) -> int:
    kinds = program.events["kind"]
    ids = program.events["ref"][(kinds == EventKind.ALLOC) | (kinds == EventKind.FREE)]
    return max([int(ids.max(initial=0)), *(a.id for a in program.initial)]) + 1
