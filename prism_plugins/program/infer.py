"""A program for every rank of the target world, from the programs of a few.

For each role (pipeline stage × first in its tensor-parallel group or not, sometimes × context-parallel position) the program
comes from a slice of that very role, or is derived from another stage's slice (:mod:`.derive`); within a role, data-parallel ranks with other
optimizer shards get variants (:mod:`.shards`), and any single rank's groups are filled in on demand
(:mod:`.instantiate`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
import numpy as np

from prism_plugins.errors import CannotDeriveError
from prism_plugins.program.calls import communication_digest
from prism_plugins.program.derive import CapturedStage
from prism_plugins.program.derived import DerivedStages
from prism_plugins.program.flat_partitions import (
    Form,
    PartitionedProgram,
    do_the_same,
    richness,
    weight,
)
from prism_plugins.program.headers import check_headers
from prism_plugins.program.instantiate import Instantiator
from prism_plugins.program.job import JobPrograms, RankClass
from prism_plugins.program.kinds import KindIndex, wanted_of_role
from prism_plugins.program.model import EventKind, Program
from prism_plugins.program.rebase import rebased
from prism_plugins.program.shards import (
    Pattern,
    RankShards,
    ShardedProgram,
    ShardIndex,
    is_readable,
    readability,
)
from prism_plugins.program.slices import JobFacts, SliceReport
from prism_plugins.world.classes import Role, plan_roles, ranks_of_role
from prism_plugins.world.layout import Layout


def infer_job(
    facts: JobFacts,
    reports: Mapping[int, SliceReport],
    programs: Mapping[int, Program],
    *,
    with_shards: bool = True,
    derived: DerivedStages | None = None,
) -> JobPrograms:
    """The programs of all ranks as classes.

    ``facts`` are the lead slice's; ``reports`` and ``programs`` are by sliced rank (audited ranks left out).
    ``derived``: programs that were derived before, and where new ones go.
    Without ``with_shards`` ranks whose optimizer shards differ all get the program of their class's exemplar.
    Raises :class:`CannotDeriveError` whose ``ranks`` lists what has to be sliced in addition.
    """
    if facts.independent_ranks:
        return _independent(facts, programs)
    check_headers(facts, reports)
    inference = _Inference(facts, reports, programs, with_shards=with_shards, derived=derived)
    classes: list[RankClass] = []
    missing: set[int] = set()
    reasons: list[str] = []
    for role in plan_roles(facts):
        for part in inference.parts(role):
            try:
                classes.append(inference.infer(*part))
            except CannotDeriveError as error:
                missing.update(error.ranks)
                reasons.append(str(error))
    if reasons:
        raise CannotDeriveError(
            "; ".join(dict.fromkeys(reasons)), ranks=tuple(sorted(missing - set(programs)))
        )
    return JobPrograms(layout=facts.layout, classes=tuple(classes))


def _independent(facts: JobFacts, programs: Mapping[int, Program]) -> JobPrograms:
    """Every rank is a class of its own."""
    world = range(facts.layout.world_size)
    if missing := tuple(rank for rank in world if rank not in programs):
        raise CannotDeriveError("nothing says which ranks run alike", ranks=missing)
    classes = (
        RankClass(name=f"rank {rank}", ranks=np.array([rank]), representative=rank, exemplar=programs[rank])
        for rank in world
    )
    return JobPrograms(layout=facts.layout, classes=tuple(classes))


def program_of(job: JobPrograms, rank: int) -> Program:
    """The program of any rank, with its own groups and peers. Costs microseconds after the first of a class,
    milliseconds for a rank with an optimizer shard of its own."""
    cls = job.classes[job.class_of(rank)]
    key = cls.variant_of.get(rank)
    own = cls.exemplar if key is None else cls.variants[key]
    if own.rank == rank:
        return own
    instantiator = _instantiator(cls.exemplar, job.layout)
    if key is None:
        return instantiator.program_of(rank)
    variant = own
    if not instantiator.fits(variant):  # a slice of its own, with its own tables
        instantiator = _instantiator(variant, job.layout)
    return instantiator.program_of(rank, like=variant)


_INSTANTIATORS: OrderedDict[tuple[int, Layout], tuple[Program, Instantiator]] = OrderedDict()
_MAX_INSTANTIATORS = 128


def _instantiator(program: Program, layout: Layout) -> Instantiator:
    """Instantiators are kept by identity; the entry holds the program, so its id is not reused meanwhile."""
    key = (id(program), layout)
    entry = _INSTANTIATORS.get(key)
    if entry is None:
        entry = _INSTANTIATORS[key] = (program, Instantiator(program, layout))
        while len(_INSTANTIATORS) > _MAX_INSTANTIATORS:
            _INSTANTIATORS.popitem(last=False)
    return entry[1]


_MOST_SLICES_FOR_LOOPS = 3
"""With as many slices of a role and loops that still cannot be issued for some ranks, all of those are sliced."""


class LazyVariants(Mapping[int, Program]):
    """The variants of a class by key, made when they are asked for: a large job has hundreds, each of megabytes."""

    _KEPT_EVENTS = 4_000_000

    def __init__(self, makers: dict[int, Callable[[], Program]]) -> None:
        self._makers = makers
        self._kept: dict[int, Program] = {}
        self._num_kept_events = 0

    def __getitem__(self, key: int) -> Program:
        program = self._kept.get(key)
        if program is None:
            program = self._makers[key]()
            if self._num_kept_events + len(program.events) <= self._KEPT_EVENTS:
                self._num_kept_events += len(program.events)
                self._kept[key] = program
        return program

    def maker(self, key: int) -> Callable[[], Program]:
        """What makes a variant."""
        return self._makers[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class _Inference:
    """What is shared between the roles of one job."""

    def __init__(
        self,
        facts: JobFacts,
        reports: Mapping[int, SliceReport],
        programs: Mapping[int, Program],
        *,
        with_shards: bool,
        derived: DerivedStages | None,
    ) -> None:
        self._facts = facts
        self._derived = derived
        self._with_shards = with_shards
        self._layout = facts.layout
        self._reports = reports
        self._programs = programs
        self._captured: dict[int, CapturedStage] = {}
        self._patterns: list[Pattern] | None = None
        self._asked_for_pattern: set[bool] = set()

    def parts(self, role: Role) -> Iterator[tuple[Role, np.ndarray, str]]:
        """The classes of a role, as arguments of :meth:`infer`: one, or one of each kind of rank where kinds differ throughout.
        Each is sliced in the stage that stands for the role's."""
        ranks, name = ranks_of_role(self._layout, role), _name(self._layout, role)
        if not self._facts.kinds_are_classes:
            yield role, ranks, name
            return
        index = KindIndex(self._layout, self._facts)
        captured = ranks_of_role(self._layout, msgspec.structs.replace(role, stage=role.captured_stage))
        kinds = np.array([index.kind(rank) for rank in ranks.tolist()])
        for kind in np.unique(kinds).tolist():
            candidates = [rank for rank in captured.tolist() if index.kind(rank) == kind]
            sliced = (rank for rank in candidates if rank in self._programs)
            chosen = role.representative if role.representative in candidates else next(sliced, candidates[0])
            yield (
                msgspec.structs.replace(role, representative=chosen),
                ranks[kinds == kind],
                f"{name} · ep {kind}",
            )

    def infer(self, role: Role, ranks: np.ndarray, name: str) -> RankClass:
        """The class of these ranks of a role. Raises :class:`CannotDeriveError`."""
        members = set(ranks.tolist())
        own = [rank for rank in (role.representative, *sorted(self._programs)) if rank in self._programs]
        own = [rank for rank in dict.fromkeys(own) if rank in members]
        special = [rank for rank in own if self._does_more(rank)]
        own = [rank for rank in own if rank not in special]
        if special and not own and len(members) > len(special):
            raise CannotDeriveError(
                f"rank {special[0]} does more between iterations than its peers of "
                f"{_name(self._layout, role)}",
                ranks=(next(rank for rank in ranks.tolist() if rank not in special),),
            )
        if not own:
            own, special = special[:1], special[1:]
        own, odd = self._agreeing(role, own, ranks)
        special += odd
        if own:
            source, program = own[0], self._programs[own[0]]
        else:
            source, program = role.representative, self._derive(role, instead=int(ranks[0]))
        shards = self._shard_index(source)
        exemplar = program
        if not own:
            # The derived stage keeps the captured rank's place along the other axes, and so its shard.
            exemplar = _instantiator(program, self._layout).program_of(
                self._peer_in_stage(source, role.stage)
            )
        variants, variant_of = self._variants(role, ranks, exemplar, shards, own)
        approximated: frozenset[int] = frozenset()
        heaviest: int | None = None
        if not shards and not self._facts.kinds_are_classes:
            variants, variant_of, approximated = self._kinds(role, ranks, exemplar, source, own, special)
            heaviest = self._heaviest(source, variant_of)
        if special:
            makers = {key: variants.maker(key) for key in variants} if variants else {}
            for rank in special:
                users = [user for user, key in variant_of.items() if key == rank != user]
                if users:  # a shard that others have as well keeps its variant under another name
                    makers[users[0]] = makers[rank]
                    variant_of |= dict.fromkeys(users, users[0])
                makers[rank] = self._moved(self._rebased(self._programs[rank], exemplar), rank)
                variant_of[rank] = rank
            variants = LazyVariants(makers)
        return RankClass(
            name=name,
            ranks=ranks,
            representative=source,
            exemplar=_instantiator(exemplar, self._layout).program_of(int(ranks[0])),
            variants=variants,
            variant_of=variant_of,
            heaviest=heaviest,
            approximated=approximated.difference(special),
        )

    def _does_more(self, rank: int) -> bool:
        """True for the first or last rank of the world, on which logs are printed, when it does more between
        iterations than a peer (reads the loss back). Of ranks of other stages only the waiting compares."""
        if rank not in (0, self._layout.world_size - 1):
            return False
        stage = self._layout.coords(rank)["pp"]
        others = [other for other in self._programs if other != rank]
        peers = [other for other in others if self._layout.coords(other)["pp"] == stage]
        kinds = (*_WAITS, EventKind.KERNEL, EventKind.COMM) if peers else _WAITS
        own = _num_outside(self._programs[rank], kinds)
        return any(own > _num_outside(self._programs[peer], kinds) for peer in peers or others)

    def _agreeing(self, role: Role, own: list[int], ranks: np.ndarray) -> tuple[list[int], list[int]]:
        """Sliced ranks of a role that communicate like most of them, and the others, which keep their own programs."""
        alike: dict[str, list[int]] = {}
        if len(own) > 1:
            for rank in own:
                alike.setdefault(communication_digest(self._programs[rank]), []).append(rank)
        if len(alike) < 2:
            return own, []
        first, second = sorted(alike.values(), key=len, reverse=True)[:2]
        fresh = [rank for rank in ranks.tolist() if rank not in self._programs]
        if len(first) == len(second) and fresh:
            raise CannotDeriveError(
                f"ranks {first[0]} and {second[0]} of {_name(self._layout, role)} communicate differently",
                ranks=(fresh[0],),
            )
        return first, [rank for rank in own if rank not in first]

    def _derive(self, role: Role, *, instead: int) -> Program:
        source = role.representative
        if source not in self._programs:
            raise CannotDeriveError(
                f"no slice of stage {role.captured_stage} to derive from", ranks=(source,)
            )
        return self._derive_from(source, role, instead=instead)

    def _derive_from(self, source: int, role: Role, *, instead: int) -> Program:
        stages = self._facts.stages
        program = self._programs[source]
        schedule, target = stages[role.captured_stage].schedule, stages[role.stage].schedule
        if self._derived is not None:
            known = self._derived.get(program, schedule, target)
            if known is not None:
                return known
        try:
            if source not in self._captured:
                self._captured[source] = CapturedStage(program, schedule)
            derived = self._captured[source].derive(target)
        except CannotDeriveError as error:
            raise CannotDeriveError(
                f"stage {role.stage} from stage {role.captured_stage}: {error}", ranks=(instead,)
            ) from error
        if self._derived is not None:
            self._derived.add(program, schedule, target, derived)
        return derived.program

    def _peer_in_stage(self, rank: int, stage: int) -> int:
        return self._layout.rank_of(self._layout.coords(rank) | {"pp": stage})

    def _shard_index(self, rank: int) -> ShardIndex:
        facts = self._reports[rank].facts
        return ShardIndex(self._layout, facts.shards if facts is not None else ())

    def _variants(
        self, role: Role, ranks: np.ndarray, program: Program, shards: ShardIndex, own: list[int]
    ) -> tuple[LazyVariants | dict[int, Program], dict[int, int]]:
        """Programs of the ranks whose optimizer shards differ from the program's, by the first such rank."""
        if not shards or not self._with_shards:
            return {}, {}
        by_work: dict[int, list[int]] = {}
        for rank in ranks.tolist():
            by_work.setdefault(shards.work(rank), []).append(rank)
        by_work.pop(shards.work(program.rank), None)
        makers: dict[int, Callable[[], Program]] = {}
        variant_of: dict[int, int] = {}
        open_keys: list[int] = []
        for members in by_work.values():
            key = members[0]
            variant_of.update(dict.fromkeys(members, key))
            sliced = next((rank for rank in own if rank in members), None)
            if sliced is None:
                open_keys.append(key)
            else:
                makers[key] = self._moved(self._programs[sliced], key)
        if open_keys:
            makers.update(self._sharded_makers(role, program, shards, open_keys, own))
        return LazyVariants({key: makers[key] for key in sorted(makers)}), variant_of

    def _kinds(
        self,
        role: Role,
        ranks: np.ndarray,
        exemplar: Program,
        source: int,
        own: list[int],
        special: list[int],
    ) -> tuple[Mapping[int, Program], dict[int, int], frozenset[int]]:
        """Programs by kind of rank: of the sliced kinds, for others derived ones where that can be done, else those of
        the most similar sliced kind; variants, who has which, and the ranks that are approximated."""
        facts = self._reports[source].facts
        buckets = self._reports[source].gradient_buckets
        index = KindIndex(self._layout, facts, buckets) if facts is not None else None
        if not index:
            return {}, {}, frozenset()
        sources = {index.kind(source): source}
        for rank in own or self._sliced_like(source, role):
            sources.setdefault(index.kind(rank), rank)
        if own:
            self._want(role, index, sources, special)
        needed = {index.kind(rank) for rank in ranks.tolist() if rank not in special}
        programs = {rank: self._of_role(role, rank, exemplar) for rank in sources.values()}
        partitioned = self._partitioned(index, sources, programs, needed)
        underived = {index.form(kind) for kind in needed - set(sources) - set(partitioned)} - {None}
        if own and underived:
            self._want(role, index, sources, special, underived)
        stand_in: dict[int, int] = {}
        key_of: dict[object, int] = {}
        makers: dict[int, Callable[[], Program]] = {}
        variant_of: dict[int, int] = {}
        approximated: list[int] = []
        for rank in ranks.tolist():
            kind = index.kind(rank)
            if kind not in sources and kind in partitioned:
                work = index.work(kind)
                if work not in key_of:
                    key_of[work] = rank
                    makers[rank] = self._partitioned_maker(partitioned[kind], kind, rank)
                variant_of[rank] = key_of[work]
                continue
            taken = stand_in.get(kind)
            if taken is None:
                taken = stand_in[kind] = kind if kind in sources else index.nearest(kind, sources)
            if taken != kind:
                approximated.append(rank)
            if sources[taken] == source:
                continue
            if taken not in key_of:
                key_of[taken] = rank
                makers[rank] = self._moved(programs[sources[taken]], rank)
            variant_of[rank] = key_of[taken]
        return LazyVariants(makers), variant_of, frozenset(approximated)

    def _heaviest(self, source: int, variant_of: Mapping[int, int]) -> int | None:
        facts = self._reports[source].facts
        if facts is None or facts.partitions is None or not variant_of:
            return None
        index = KindIndex(self._layout, facts)
        rank = max(variant_of, key=lambda rank: weight(facts.partitions, index.kind(rank)))
        return variant_of[rank]

    def _want(
        self,
        role: Role,
        index: KindIndex,
        sources: Mapping[int, int],
        special: list[int],
        underived: Collection[Form] = (),
    ) -> None:
        """Raise :class:`CannotDeriveError` unless the kinds that have to be sliced are."""
        wanted = wanted_of_role(index, self._layout, role, without=special, underived=underived)
        if missing := [rank for kind, rank in wanted.items() if kind not in sources]:
            raise CannotDeriveError(
                f"{_name(self._layout, role)}: no slice of a rank that owns such parameter fragments",
                ranks=tuple(missing),
            )

    def _partitioned(
        self,
        index: KindIndex,
        sources: Mapping[int, int],
        programs: Mapping[int, Program],
        needed: Collection[int],
    ) -> dict[int, PartitionedProgram]:
        """For each kind whose program can be derived, what it is derived from."""
        partitions = index.partitions
        if partitions is None:
            return {}
        prepared: dict[Form, list[PartitionedProgram]] = {}
        wrong: set[Form] = set()
        for kind, rank in sorted(
            sources.items(), key=lambda item: richness(partitions, item[0]), reverse=True
        ):
            form = index.form(kind)
            # What is derived from another slice must be what this one did.
            if any(_contradicts(other, kind, programs[rank]) for other in prepared.get(form, ())):
                wrong.add(form)
            buckets = self._reports[rank].gradient_buckets
            try:
                partitioned = PartitionedProgram(programs[rank], partitions, kind, buckets)
            except CannotDeriveError:
                continue
            prepared.setdefault(form, []).append(partitioned)
        served: dict[int, PartitionedProgram] = {}
        for kind in needed:
            for partitioned in prepared.get(index.form(kind), ()) if index.form(kind) not in wrong else ():
                try:
                    partitioned.check(kind)
                except CannotDeriveError:
                    continue
                served[kind] = partitioned
                break
        return served

    def _partitioned_maker(self, source: PartitionedProgram, kind: int, rank: int) -> Callable[[], Program]:
        return lambda: _instantiator(source.program, self._layout).program_of(
            rank, like=source.program_for(kind)
        )

    def _sliced_like(self, source: int, role: Role) -> list[int]:
        """Sliced ranks of the stage a role is derived from, on its side of tensor parallelism."""
        stage = self._layout.coords(source)["pp"]
        return [
            rank
            for rank in sorted(self._programs)
            if (coords := self._layout.coords(rank))["pp"] == stage and (coords["tp"] == 0) == role.tp_first
        ]

    def _of_role(self, role: Role, source: int, exemplar: Program) -> Program:
        """The program of a sliced rank, or of its peer in the role's stage, in the numbers of the exemplar."""
        program = self._programs[source]
        if self._layout.coords(source)["pp"] != role.stage:
            peer = self._peer_in_stage(source, role.stage)
            derived = self._derive_from(source, role, instead=peer)
            program = _instantiator(derived, self._layout).program_of(peer)
        return self._rebased(program, exemplar)

    def _rebased(self, program: Program, exemplar: Program) -> Program:
        if program.rank == exemplar.rank:
            return exemplar if program is exemplar else program
        return rebased(program, _instantiator(exemplar, self._layout).program_of(program.rank))

    def _moved(self, program: Program, rank: int) -> Callable[[], Program]:
        if program.rank == rank:
            return lambda: program
        return lambda: _instantiator(program, self._layout).program_of(rank)

    def _sharded_makers(
        self, role: Role, program: Program, shards: ShardIndex, keys: list[int], own: list[int]
    ) -> dict[int, Callable[[], Program]]:
        """Makers of variants whose optimizer phase is issued again; each is tried once."""
        sources: list[tuple[Program, ShardedProgram]] = []
        reasons: list[str] = []
        # Another slice of the role, with longer lists, may serve where the one at hand does not.
        for source in (program, *(self._programs[rank] for rank in own if rank != program.rank)):
            for pattern in (*self._all_patterns(), None):
                owned = shards.of(source.rank)
                if pattern is None and not is_readable(owned, role.tp_first):
                    continue
                try:
                    sharded = ShardedProgram(source, owned, tp_first=role.tp_first, pattern=pattern)
                except CannotDeriveError as error:
                    reasons.append(str(error))
                else:
                    sources.append((source, sharded))
        if not sources and not reasons:
            reasons.append(
                "no slice owns two fragments of each kind, so that the optimizer's loops could be seen"
            )
        makers: dict[int, Callable[[], Program]] = {}
        for key in keys:
            for source, sharded in sources:
                try:
                    sharded.check(shards.of(key), tp_first=role.tp_first)
                except CannotDeriveError as error:
                    reasons.append(str(error))
                    continue
                makers[key] = self._sharded_maker(source, sharded, shards.of(key), role, key)
                break
        missing = [key for key in keys if key not in makers]
        if missing:
            if not makers or len(own) < _MOST_SLICES_FOR_LOOPS:
                # One slice with long lists shows the loops for all, and which of the lists each runs over (first tensor-parallel
                # ranks count all fragments in the norm and cannot tell); of the roles on one side only the first asks for one.
                fresh = [key for key in missing if key not in self._programs] or missing
                longest = max(fresh, key=lambda key: (readability(shards.of(key), role.tp_first), -key))
                missing = [] if role.tp_first in self._asked_for_pattern else [longest]
                self._asked_for_pattern.add(role.tp_first)
            raise CannotDeriveError(
                f"optimizer shards of {_name(self._layout, role)}: {reasons[0]}", ranks=tuple(missing)
            )
        return makers

    def _sharded_maker(
        self, source: Program, sharded: ShardedProgram, target: RankShards, role: Role, rank: int
    ) -> Callable[[], Program]:
        def make() -> Program:
            variant = sharded.program_for(target, tp_first=role.tp_first)
            return _instantiator(source, self._layout).program_of(rank, like=variant)

        return make

    def _all_patterns(self) -> list[Pattern]:
        """Loops of the sliced programs in which all can be seen: merged where they agree, first the best seen."""
        if self._patterns is None:
            found: list[tuple[tuple[int, int], Pattern]] = []
            for rank, program in sorted(self._programs.items()):
                tp_first = self._layout.coords(rank)["tp"] == 0
                index = self._shard_index(rank)
                if index and is_readable(index.of(rank), tp_first):
                    try:
                        sharded = ShardedProgram(program, index.of(rank), tp_first=tp_first)
                    except CannotDeriveError:
                        continue
                    found.append((readability(index.of(rank), tp_first), sharded.pattern))
            merged: list[Pattern] = []
            for _, pattern in sorted(found, key=lambda item: item[0], reverse=True):
                for i, other in enumerate(merged):
                    both = other.merged(pattern)
                    if both is not None:
                        merged[i] = both
                        break
                else:
                    merged.append(pattern)
            self._patterns = merged
        return self._patterns


def _contradicts(partitioned: PartitionedProgram, kind: int, program: Program) -> bool:
    try:
        return not do_the_same(partitioned.program_for(kind), program)
    except CannotDeriveError:
        return False


_WAITS = (EventKind.STREAM_SYNC, EventKind.EVENT_SYNC, EventKind.DEVICE_SYNC)


def _num_outside(program: Program, kinds: tuple[EventKind, ...]) -> int:
    """Number of events of some kinds before the first phase and after the last one."""
    of_kind = np.isin(program.events["kind"], kinds)
    phases = [(begin, end) for _, begin, end in program.iter_phases()]
    if not phases:
        return 0
    return int(of_kind[: phases[0][0]].sum() + of_kind[phases[-1][1] :].sum())


def _name(layout: Layout, role: Role) -> str:
    name = f"stage {role.stage}"
    if layout.tp > 1:
        others = "1" + (f"-{layout.tp - 1}" if layout.tp > 2 else "")
        name += f" · tp {0 if role.tp_first else others}"
    return name if role.cp is None else f"{name} · cp {role.cp}"
