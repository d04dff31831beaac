"""What an integration tells the layout search: the space of layouts, what is legal, and how a layout is written.

Optional: an integration that offers it has a method ``tuner()``. Everything but :meth:`Tuner.judge` runs in the
process of the search, which never imports the framework; ``judge`` runs where the script was stopped as it read its
command line, with the framework imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prism_plugins.program.slices import JobFacts
from prism_plugins.world.layout import Layout

Value = int | str | bool
FULL = "full"
"""The kind of a layer of which only the input is kept for backward; it needs no probe of its own."""
Arguments = Mapping[str, Any]
"""The script's own parsed arguments, those with JSON values."""


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may be chosen."""

    name: str
    values: tuple[Value, ...]
    """In the order of the search; the one the launch has now is among them."""
    own: Value
    """What the user's launch has."""
    help: str = ""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A choice for every knob, in the order of the space's knobs."""

    values: tuple[Value, ...]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the framework takes a command line."""

    legal: bool
    reason: str = ""
    arguments: dict[str, Any] = {}
    """Parsed and validated; given for the first command line only. ``prism_flags``: the flags that the parser knows."""
    framework: str = ""
    """Name of the integration that judged."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched around."""

    argv: tuple[str, ...]
    """Script first."""
    arguments: Arguments
    """As its script parsed and the framework completed them (:attr:`Verdict.arguments`)."""
    world_size: int
    gpus_per_node: int
    chosen: Mapping[str, tuple[str, ...]] = {}
    """By knob, the values (as text) that the user allows."""
    directory: Path = Path()
    """For files that the command lines of points name."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What a model chunk of a pipeline stage holds."""

    layers: tuple[tuple[str, int], ...]
    """(kind of layer, how many): kinds are those of :attr:`Probe.kind`."""
    embedding: bool = False
    loss: bool = False
    bucketed: bool = True
    """Its gradients and parameters are communicated in buckets where that is overlapped, not all at once."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A layout as the composition of probes needs it; framework-neutral."""

    layout: Layout
    chunks: tuple[tuple[Chunk, ...], ...]
    """[stage][chunk]."""
    transfer_elements: int
    """Of the activation that a stage sends to the next one, per micro-batch and rank."""
    transfer_dtype: str
    sharded_optimizer: bool
    """Optimizer states are spread over the data-parallel ranks."""
    world_groups: tuple[str, ...] = ()
    """Communicators of all ranks that the point has and its probes have not."""
    overlap_grad: bool | None
    """Gradients are reduced during backward. None: as the probes do."""
    overlap_param: bool | None
    """Sharded parameters are gathered during forward. None: where gradients are overlapped."""
    expert_share: float = 0.0
    """Share of the parameters of a layer on a rank that are experts': they have a data-parallel group of their own."""
    bucket_elements: int
    """Where they are overlapped, gradients and parameters are communicated in buckets of about that many elements."""
    param_dtype: str
    tied_embedding: bool
    """The last stage holds a copy of the embedding; without a pipeline there is one."""
    async_p2p: bool
    """Transfers between stages go on beside compute."""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A point whose probes are the whole job with few micro-batches: its iteration is linear in their number."""

    num_microbatches: int


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A reduced job. For a :class:`Shape`: a slice that tells what one kind of layer costs, with the same tensor, context and
    expert parallelism, micro-batch and recomputation, few layers, no pipeline and two micro-batches. For a :class:`Whole`: the
    point itself with few micro-batches."""

    kind: str
    """Kind of layer; of no meaning for a :class:`Whole`."""
    command: tuple[str, ...]
    size: int
    """Layers; for a :class:`Whole` micro-batches."""
    key: tuple[str, ...]
    """Probes of one key are measured together."""
    whole: bool = False
    """For a :class:`Whole`."""
    tokens: int = 0
    """Of an iteration of the job as it should be; 0: unknown."""
    sharded: bool = False
    """Its optimizer states are spread over its data-parallel ranks."""
    emulated: bool = False
    """It takes more than a slice of rank 0: an ordinary emulation."""


class Scouted(msgspec.Struct, frozen=True, kw_only=True):
    """What the slice of :attr:`Space.scout` told."""

    facts: JobFacts
    flops: float
    """Of the matrix products and the attention of one micro-batch on rank 0, forward and backward."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What no emulation of a point can be below."""

    memory_bytes: float
    """States and the activations that backward needs, on the stage with most."""
    flops: float
    """Matrix products that follow each other: those of one stage's rank for all micro-batches, and of the first chunks
    before it for one, at the stage where that is most."""
    link_bytes: float
    """What collectives have to bring to a rank through its link to the GPUs of its node, on the same way and with nothing to
    hide behind."""
    nic_bytes: float = 0.0
    """The same through a GPU's share of its node's NICs; counted where a node is all that NVLink reaches."""
    hbm_bytes: float = 0.0
    """What ops that do nothing else move to and from the GPU's memory, likewise; tensors that a cache may hold left out."""
    dtype: str
    """Of the matrix products."""


class Space(Protocol):
    """The layouts of one launch."""

    knobs: tuple[Knob, ...]
    own: Point
    probe_world: int
    """World size in which every probe can run."""
    tokens_per_iteration: int
    assumptions: tuple[str, ...]
    """What the space leaves out or takes for granted, one line each."""
    scout: Probe | None
    """A slice that the space has to see before it can give bounds."""

    def learn(self, scouted: Scouted) -> None:
        """Take what the scout told. Raises :class:`PrismError` for a job whose layouts cannot be tried."""
        ...

    def points(self) -> Iterator[tuple[Point, str]]:
        """Every point, with the reason why it cannot be ("" where nothing is known against it)."""
        ...

    def command(self, point: Point) -> tuple[str, ...]:
        """The launch's argv with the point written into it."""
        ...

    def changes(self, point: Point) -> tuple[str, ...]:
        """The arguments to paste: those of the point that the own launch lacks, and those to take out (``-X``)."""
        ...

    def with_sequence(self, length: int) -> tuple[str, ...]:
        """The launch's argv with another sequence length."""
        ...

    def shape(self, point: Point) -> Shape | Whole:
        """The point for the composition."""
        ...

    def probes(self, point: Point) -> tuple[Probe, ...]:
        """What has to be run to compose it: one and two layers of the plain kind, then two layers of other kinds (none of
        :data:`FULL`); for a :class:`Whole` one or two numbers of micro-batches. Probes of different points that are alike are
        equal."""
        ...

    def limits(self, point: Point) -> Limits:
        """Lower bounds, by formula."""
        ...


class Tuner(Protocol):
    """The layout search's view of a framework."""

    def judge(self, parser: Any, commands: Sequence[Sequence[str]]) -> Iterator[Verdict]:
        """What the framework's own validation says of command lines; nothing where the script does not use it. ``parser``: the
        argparse parser that the script was about to use."""
        ...

    def space(self, launch: Launch) -> Space:
        """The space around a launch.

        Raises :class:`~prism_plugins.errors.PrismError` for a script whose layout cannot be changed by arguments, and
        for fixed choices that contradict each other.
        """
        ...
