"""A small model of a pipeline stage that really runs a schedule, with tensors whose lifetimes are Python's own.

``run_1f1b`` and ``run_interleaved`` keep their variables the way a framework's scheduler does (lists of inputs and
outputs, a gradient variable that is overwritten, outputs shrunk to one element after they were sent), so that
releases fall where they really fall. Every stage's program can be generated, and a derived one compared with it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prism_plugins.program.model import (
    EVENT_DTYPE,
    Allocation,
    CommSignature,
    EventFlag,
    EventKind,
    GroupInfo,
    OpSignature,
    Phase,
    Program,
    TensorSpec,
)


class Recorder:
    """Collects events; ids count up over the whole life, as in a slice."""

    def __init__(self, *, stage: int, num_stages: int, first_id: int = 0, overlap: bool = False) -> None:
        self.stage, self.num_stages, self.overlap = stage, num_stages, overlap
        self.rows: list[tuple] = []
        self.ops: dict[tuple[str, int], int] = {}
        self.comms: dict[CommSignature, int] = {}
        self.phases: dict[Phase, int] = {}
        self.counts: Counter[str] = Counter()
        self.next_id = first_id
        self.next_work = first_id * 3

    def kernel(self, name: str, size: int = 1) -> None:
        index = self.ops.setdefault((name, size), len(self.ops))
        self.rows.append((EventKind.KERNEL, 0, 0, index, 0))

    def comm(self, kind: str, delta: int, work: int, *, is_async: bool) -> None:
        signature = CommSignature(
            kind=kind,
            group=0,
            dtype="float32",
            in_numel=64,
            out_numel=64,
            peer=(self.stage + delta) % self.num_stages,
        )
        flags = EventFlag.ASYNC if is_async else 0
        self.rows.append((EventKind.COMM, flags, 0, self.comms.setdefault(signature, len(self.comms)), work))

    def new_work(self) -> int:
        self.next_work += 1
        return self.next_work

    def begin(self, kind: str, *names: str, microbatch: int = -1, chunk: int = -1) -> Phase:
        parts = []
        for name in names:
            parts.append((name, self.counts[name]))
            self.counts[name] += 1
        return self.open(Phase(kind=kind, microbatch=microbatch, chunk=chunk, parts=tuple(parts)))

    def open(self, phase: Phase) -> Phase:
        self.rows.append((EventKind.PHASE_BEGIN, 0, 0, self.phases.setdefault(phase, len(self.phases)), 0))
        self.current = phase
        return phase

    def end(self) -> None:
        self.rows.append((EventKind.PHASE_END, 0, 0, self.phases[self.current], 0))


class Tensor:
    """Memory that is released when the last reference goes."""

    def __init__(self, recorder: Recorder, nbytes: int) -> None:
        self.recorder = recorder
        self.id = recorder.next_id
        recorder.next_id += 1
        self.saved: list[Tensor] = []
        self.label = (0, 0)
        recorder.rows.append((EventKind.ALLOC, 0, 0, self.id, nbytes))

    def shrink(self) -> None:
        """``out.data = torch.empty(1)``: the new memory is allocated before the old one goes."""
        old, self.id = self.id, self.recorder.next_id
        self.recorder.next_id += 1
        self.recorder.rows.append((EventKind.ALLOC, 0, 0, self.id, 4))
        self.recorder.rows.append((EventKind.FREE, 0, 0, old, 0))

    def __del__(self) -> None:
        self.recorder.rows.append((EventKind.FREE, 0, 0, self.id, 0))


class Work:
    def __init__(self, recorder: Recorder, part: tuple[str, int], work: int) -> None:
        self.recorder, self.part, self.work = recorder, part, work

    def wait(self) -> None:
        kind = f"wait_{self.part[0]}"
        self.recorder.open(Phase(kind=kind, parts=((kind, self.part[1]),)))
        self.recorder.rows.append((EventKind.WORK_WAIT, 0, 0, self.work, 0))
        self.recorder.end()


class Stage:
    """What a stage computes and how it communicates."""

    def __init__(self, recorder: Recorder, *, num_microbatches: int, num_chunks: int = 1) -> None:
        self.r = recorder
        self.num_microbatches, self.num_chunks = num_microbatches, num_chunks
        self.first = recorder.stage == 0
        self.last = recorder.stage == recorder.num_stages - 1

    def forward(self, x: Tensor | None, *, microbatch: int, chunk: int = 0) -> Tensor:
        self.r.begin("forward", "forward", microbatch=microbatch, chunk=chunk)
        if x is None:
            x = Tensor(self.r, 512)
            self.r.kernel("embedding", 64)
        saved = [x]
        for layer in range(2):
            temporary = Tensor(self.r, 4096)
            self.r.kernel("mm", 100 + chunk)
            saved.append(Tensor(self.r, 2048 + layer))
            self.r.kernel("relu", 100)
            del temporary
        y = Tensor(self.r, 1024)
        if self.last and chunk == self.num_chunks - 1:
            self.r.kernel("loss")
        y.saved = saved
        y.label = (microbatch, chunk)
        self.r.end()
        return y

    def backward(self, y: Tensor, dy: Tensor | None) -> Tensor:
        microbatch, chunk = y.label
        self.r.begin("backward", "backward", microbatch=microbatch, chunk=chunk)
        if dy is None:
            dy = Tensor(self.r, 1024)
        for _ in range(2):
            gradient = Tensor(self.r, 1024)
            self.r.kernel("mm_backward", 100 + chunk)
            y.saved.pop()
        if microbatch == self.num_microbatches - 1:
            self.r.kernel("start_gradient_reduction", 1000 + chunk)
        dx = Tensor(self.r, 1024)
        y.saved.clear()
        del gradient, dy
        self.r.end()
        return dx

    def communicate(self, kind: str, **tensors) -> tuple[Tensor | None, Tensor | None, dict[str, Work]]:
        """One p2p call: what is sent, and what is received of what asked for."""
        order = ("send_forward", "send_backward", "recv_forward", "recv_backward")
        names = [n for n in order if tensors.get(n)]
        phase = self.r.begin(kind, *names)
        ordinal = dict(phase.parts)
        received = {n: Tensor(self.r, 256) for n in ("recv_forward", "recv_backward") if n in names}
        works: dict[str, Work] = {}
        delta = {"send_forward": 1, "recv_backward": 1, "send_backward": -1, "recv_forward": -1}
        shared = self.r.new_work() if names else 0
        for name in names:
            work = self.r.new_work() if self.r.overlap else shared
            self.r.comm(name.split("_")[0], delta[name], work, is_async=True)
            works[name] = Work(self.r, (name, ordinal[name]), work)
        if not self.r.overlap and names:
            self.r.rows.append((EventKind.WORK_WAIT, 0, 0, shared, 0))
        self.r.end()
        return received.get("recv_forward"), received.get("recv_backward"), works


def finish(recorder: Recorder) -> None:
    recorder.begin("grad_sync", "grad_sync")
    buffer = Tensor(recorder, 64)
    recorder.kernel("scale", 7)
    del buffer
    recorder.end()
    recorder.kernel("zero", 1)
    recorder.begin("optimizer", "optimizer")
    recorder.kernel("adam", 9)
    recorder.end()


def run_1f1b(s: Stage) -> None:
    r, count = s.r, s.num_microbatches
    warmup = min(r.num_stages - r.stage - 1, count)
    tokens = Tensor(r, 4)
    inputs, outputs = [], []
    for i in range(warmup):
        x, _, _ = s.communicate("recv_forward", recv_forward=not s.first)
        y = s.forward(x, microbatch=i)
        s.communicate("send_forward", send_forward=not s.last)
        r.kernel("count_tokens")
        inputs.append(x)
        outputs.append(y)
        y.shrink()
    if count > warmup:
        x, _, _ = s.communicate("recv_forward", recv_forward=not s.first)
    for i in range(count - warmup):
        last_iteration = i == count - warmup - 1
        y = s.forward(x, microbatch=warmup + i)
        r.kernel("count_tokens")
        _, dy, _ = s.communicate(
            "send_forward_recv_backward", send_forward=not s.last, recv_backward=not s.last
        )
        inputs.append(x)
        outputs.append(y)
        y.shrink()
        x, y = inputs.pop(0), outputs.pop(0)
        dx = s.backward(y, dy)
        if last_iteration:
            x = None
            s.communicate("send_backward", send_backward=not s.first)
        else:
            x, _, _ = s.communicate(
                "send_backward_recv_forward", send_backward=not s.first, recv_forward=not s.first
            )
    for _ in range(warmup):
        x, y = inputs.pop(0), outputs.pop(0)
        _, dy, _ = s.communicate("recv_backward", recv_backward=not s.last)
        dx = s.backward(y, dy)
        s.communicate("send_backward", send_backward=not s.first)
    finish(r)
    del x, y, dx, dy, tokens


def run_interleaved(s: Stage) -> None:
    """With ``recorder.overlap`` receives are prefetched and waited for one step later."""
    r, count, chunks = s.r, s.num_microbatches, s.num_chunks
    group = r.num_stages
    table = [(g + i, c) for g in range(0, count, group) for c in range(chunks) for i in range(group)]
    total = len(table)
    warmup = min((r.num_stages - r.stage - 1) * 2 + (chunks - 1) * group, total)
    tokens = Tensor(r, 4)
    inputs = [[] for _ in range(chunks)]
    outputs = [[] for _ in range(chunks)]
    gradients = [[] for _ in range(chunks)]
    pending: dict[str, Work | None] = {}

    def forward(k: int) -> Tensor:
        microbatch, chunk = table[k]
        if s.first and chunk == 0 and len(inputs[0]) == len(outputs[0]):
            inputs[0].append(None)
        y = s.forward(inputs[chunk][len(outputs[chunk])], microbatch=microbatch, chunk=chunk)
        outputs[chunk].append(y)
        r.kernel("count_tokens")
        return y

    def backward(k: int) -> Tensor:
        chunk = chunks - 1 - table[k][1]
        if s.last and chunk == chunks - 1 and not gradients[chunk]:
            gradients[chunk].append(None)
        _, y, dy = inputs[chunk].pop(0), outputs[chunk].pop(0), gradients[chunk].pop(0)
        return s.backward(y, dy)

    def next_of(k: int, leading: bool, is_forward: bool) -> tuple[bool, int]:
        def chunk_of(j: int) -> int:
            c = table[j % total][1]
            return c if is_forward else chunks - 1 - c

        receives = True
        if leading:
            if k < r.num_stages - 1:
                receives, chunk = False, chunk_of(k + 1)
            else:
                chunk = chunk_of(k - (r.num_stages - 1))
                receives = chunk != (chunks - 1 if is_forward else 0)
                chunk += 1 if is_forward else -1
        else:
            chunk = chunk_of(k + 1)
        return receives, chunk

    def wait(name: str) -> None:
        work = pending.pop(name, None)
        if work is not None:
            work.wait()

    def exchange(kind: str, **tensors) -> tuple[Tensor | None, Tensor | None]:
        received_forward, received_backward, works = s.communicate(kind, **tensors)
        if r.overlap:
            for name, work in works.items():
                if name.startswith("send"):
                    wait(name)
                pending[name] = work
        return received_forward, received_backward

    x, _, works = s.communicate("recv_forward", recv_forward=not s.first)
    if r.overlap and works:
        works["recv_forward"].wait()
    inputs[0].append(x)
    for k in range(warmup):
        receives, chunk = next_of(k, s.first, True)
        receives = receives and k != total - 1
        wait("recv_forward")
        y = forward(k)
        sends = not (s.last and table[k][1] == chunks - 1)
        if k == warmup - 1 and not r.overlap:
            x, dy = exchange(
                "send_forward_backward_recv_forward_backward",
                send_forward=sends,
                recv_forward=receives,
                recv_backward=not s.last,
            )
            gradients[-1].append(dy)
        else:
            x, _ = exchange("send_forward_recv_forward", send_forward=sends, recv_forward=receives)
        if receives:
            inputs[chunk].append(x)
        y.shrink()
        if k == warmup - 1 and r.overlap:
            _, dy = exchange("send_backward_recv_backward", recv_backward=not s.last)
            gradients[-1].append(dy)
    for k in range(total - warmup):
        forward_k = k + warmup
        receives, chunk = next_of(forward_k, s.first, True)
        receives = receives and k != total - warmup - 1
        receives_b, chunk_b = next_of(k, s.last, False)
        sends = not (s.last and table[forward_k][1] == chunks - 1)
        sends_b = not (s.first and table[k][1] == chunks - 1)
        if r.overlap:
            wait("recv_forward")
            y.shrink()
            y = forward(forward_k)
            x, _ = exchange("send_forward_recv_forward", send_forward=sends, recv_forward=receives)
            if receives:
                inputs[chunk].append(x)
            wait("recv_backward")
            dx = backward(k)
            _, dy = exchange("send_backward_recv_backward", send_backward=sends_b, recv_backward=receives_b)
        else:
            y = forward(forward_k)
            dx = backward(k)
            x, dy = exchange(
                "send_forward_backward_recv_forward_backward",
                send_forward=sends,
                send_backward=sends_b,
                recv_forward=receives,
                recv_backward=receives_b,
            )
            y.shrink()
            if receives:
                inputs[chunk].append(x)
        if receives_b:
            gradients[chunk_b].append(dy)
    if warmup < total:
        y.shrink()
    for k in range(total - warmup, total):
        wait("recv_backward")
        receives_b, chunk_b = next_of(k, s.last, False)
        receives_b = receives_b and k != total - 1
        dx = backward(k)
        _, dy = exchange(
            "send_backward_recv_backward",
            send_backward=not (s.first and table[k][1] == chunks - 1),
            recv_backward=receives_b,
        )
        if receives_b:
            gradients[chunk_b].append(dy)
    wait("send_backward")
    wait("send_forward")
    finish(r)
    del x, y, dx, dy, tokens


def make_program(
    *,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    overlap: bool = False,
    first_id: int = 100,
) -> Program:
    """The program of one stage; rank = stage."""
    recorder = Recorder(stage=stage, num_stages=num_stages, first_id=first_id, overlap=overlap)
    s = Stage(recorder, num_microbatches=num_microbatches, num_chunks=num_chunks)
    if num_chunks > 1:
        run_interleaved(s)
    else:
        run_1f1b(s)
    return Program(
        rank=stage,
        events=np.array(recorder.rows, dtype=EVENT_DTYPE),
        signatures=[_signature(name, size) for name, size in recorder.ops],
        comms=list(recorder.comms),
        groups=[GroupInfo(ranks=tuple(range(num_stages)), name="pp", desc="PIPELINE")],
        phases=list(recorder.phases),
        initial=[Allocation(1, 1 << 20, "parameters")],
    )


def schedule_of(program: Program) -> tuple[Phase, ...]:
    """The scheduler's stretch of a generated program."""
    return tuple(p for p, _, _ in program.iter_phases() if p.kind != "optimizer")


def _signature(name: str, size: int) -> OpSignature:
    tensor = TensorSpec("float32", (size,))
    return OpSignature(op=f"aten::{name}", inputs=(tensor,), outputs=(tensor,))
