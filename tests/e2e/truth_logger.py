"""An independent witness of a training job: what each rank asks of torch.distributed, and in which step.

Copied as ``sitecustomize.py`` into a directory on ``PYTHONPATH``, beside truth_logger_deepspeed.py; with ``TRUTH_LOG``
naming a directory, every process that imports megatron-core or deepspeed writes ``rank<R>.jsonl`` there. Knows torch
and these two only, nothing of what implements the process groups underneath: the public functions are wrapped, sizes come from their tensors, members
of a group from the ``new_group`` call that made it.

One JSON list a line, in program order of the main thread and autograd's:

    ["iteration"]                                 a forward-backward function is called
    ["begin", kind, microbatch, chunk] / ["end"]  a step of the pipeline schedule, outermost only
    ["comm", call]                                call: see `_call`
    ["losses", [...]] ["grad_norm", x] ["parameters", x]
"""

import functools
import importlib.abc
import inspect
import json
import os
import sys

import truth_logger_deepspeed

P2P_METHODS = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)
SCHEDULERS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
P2P = "megatron.core.pipeline_parallel.p2p_communication"


class Log:
    """The file of this process, and which group handle stands for which ranks."""

    def __init__(self, folder):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # A line at a time: the process may end without flushing.
        self._file = open(os.path.join(folder, f"rank{self.rank}.jsonl"), "w", buffering=1)  # noqa: SIM115
        self._groups = []
        self._in_call = False
        self._in_step = False

    def write(self, *record):
        self._file.write(json.dumps(record) + "\n")

    def made_group(self, group, ranks):
        self._groups.append((group, sorted(range(self.world_size) if ranks is None else ranks)))

    def ranks_of(self, group):
        import torch.distributed as dist

        if group is None or group is dist.group.WORLD:
            return list(range(self.world_size))
        for known, ranks in reversed(self._groups):
            if known is group:
                return ranks
        # Made inside torch (a DeviceMesh): its own table tells.
        return sorted(dist.get_process_group_ranks(group))

    def logged(self, function, describe):
        """``function`` with its calls logged; calls it makes itself are not."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if self._in_call:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for call in describe(self, bound.arguments):
                self.write("comm", call)
            self._in_call = True
            try:
                return function(*args, **kwargs)
            finally:
                self._in_call = False

        return wrapper

    def step(self, kind, body, microbatch=-1, chunk=-1):
        """Run ``body`` between a begin and an end line, unless a step is open."""
        if self._in_step:
            return body()
        self.write("begin", kind, microbatch, chunk)
        self._in_step = True
        try:
            return body()
        finally:
            self._in_step = False
            self.write("end")


# --- torch.distributed ---


def _call(log, kind, group, sent, received, *, peer=-1, op="", splits=()):
    """What one call moves: ``sent`` and ``received`` are lists of tensors, ``peer`` a global rank."""
    tensors = [*sent, *received]
    return {
        "kind": kind,
        "ranks": log.ranks_of(group),
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "in_bytes": sum(t.numel() * t.element_size() for t in sent),
        "out_bytes": sum(t.numel() * t.element_size() for t in received),
        "peer": peer,
        "op": str(op).rpartition(".")[2],
        "splits": [list(s) if s is not None else [] for s in splits],
    }


def _global(log, a, name):
    """The root or partner as a global rank, given as one (``dst``) or within the group (``group_dst``)."""
    in_group = a.get(f"group_{name}")
    return a[name] if in_group is None else log.ranks_of(a["group"])[in_group]


def _not_a_member(group):
    import torch.distributed as dist

    return group is not None and group == dist.GroupMember.NON_GROUP_MEMBER


def _in_place(kind, tensors, root=None):
    def describe(log, a):
        if _not_a_member(a["group"]):
            return
        given = a[tensors]
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            peer = -1 if root is None else _global(log, a, root)
            received = [] if kind == "reduce" and peer != log.rank else [tensor]
            yield _call(log, kind, a["group"], [tensor], received, peer=peer, op=a.get("op", ""))

    return describe


def _moved(kind, sent, received, root=None):
    def describe(log, a):
        if _not_a_member(a["group"]):
            return
        inputs, outputs = (
            [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
            for value in (a[sent], a[received])
        )
        splits = ()
        if kind == "all_to_all":
            if "input_split_sizes" in a:
                rows = [t.numel() // max(t.shape[0], 1) for t in (a[sent], a[received])]
                sizes = [a["input_split_sizes"], a["output_split_sizes"]]
                splits = [
                    [int(n) * row for n in size] if size is not None else []
                    for size, row in zip(sizes, rows, strict=True)
                ]
            else:
                splits = [[t.numel() for t in inputs], [t.numel() for t in outputs]]
        peer = -1 if root is None else _global(log, a, root)
        yield _call(log, kind, a["group"], inputs, outputs, peer=peer, op=a.get("op", ""), splits=splits)

    return describe


def _sent(log, a):
    yield _call(log, "send", a["group"], [a["tensor"]], [], peer=_global(log, a, "dst"))


def _received(log, a):
    yield _call(log, "recv", a["group"], [], [a["tensor"]], peer=_global(log, a, "src"))


def _batch(log, a):
    for one in a["p2p_op_list"]:
        sends = one.op.__name__ == "isend"
        yield _call(
            log,
            "send" if sends else "recv",
            one.group,
            [one.tensor] if sends else [],
            [] if sends else [one.tensor],
            peer=one.peer,
        )


def _barrier(log, a):
    yield _call(log, "barrier", a["group"], [], [])


def _object(name):
    def describe(log, a):
        yield _call(log, name, a["group"], [], [])

    return describe


CALLS = {
    "all_reduce": _in_place("all_reduce", "tensor"),
    "all_reduce_coalesced": _in_place("all_reduce", "tensors"),
    "broadcast": _in_place("broadcast", "tensor", "src"),
    "reduce": _in_place("reduce", "tensor", "dst"),
    "all_gather": _moved("all_gather", "tensor", "tensor_list"),
    "all_gather_into_tensor": _moved("all_gather", "input_tensor", "output_tensor"),
    "_all_gather_base": _moved("all_gather", "input_tensor", "output_tensor"),
    "reduce_scatter": _moved("reduce_scatter", "input_list", "output"),
    "reduce_scatter_tensor": _moved("reduce_scatter", "input", "output"),
    "_reduce_scatter_base": _moved("reduce_scatter", "input", "output"),
    "gather": _moved("gather", "tensor", "gather_list", "dst"),
    "scatter": _moved("scatter", "scatter_list", "tensor", "src"),
    "all_to_all": _moved("all_to_all", "input_tensor_list", "output_tensor_list"),
    "all_to_all_single": _moved("all_to_all", "input", "output"),
    "send": _sent,
    "isend": _sent,
    "recv": _received,
    "irecv": _received,
    "batch_isend_irecv": _batch,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    **{
        name: _object(name)
        for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
    },
}


def watch_torch(log):
    """Wrap torch.distributed's functions, before Megatron takes references to them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def new_group(ranks=None, *args, **kwargs):
        group = original_new_group(ranks, *args, **kwargs)
        log.made_group(group, ranks)
        return group

    original_new_group = c10d.new_group
    wrapped = {name: log.logged(getattr(c10d, name), describe) for name, describe in CALLS.items()}
    wrapped["new_group"] = functools.wraps(original_new_group)(new_group)
    for name, function in wrapped.items():
        for module in (dist, c10d):
            setattr(module, name, function)


# --- Megatron ---


def watch_schedules(log, module):
    """Steps, iterations, losses."""
    forward_step, backward_step = module.forward_step, module.backward_step
    signature = inspect.signature(forward_step)

    @functools.wraps(forward_step)
    def forward(*args, **kwargs):
        a = signature.bind(*args, **kwargs).arguments
        named = [-1 if a.get(name) is None else a[name] for name in ("current_microbatch", "vp_stage")]
        result = log.step("forward", lambda: forward_step(*args, **kwargs), *named)
        output = result[0]
        (output[0] if isinstance(output, list) else output)._truth_step = named
        return result

    @functools.wraps(backward_step)
    def backward(input_tensor, output_tensor, *args, **kwargs):
        output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
        body = functools.partial(backward_step, input_tensor, output_tensor, *args, **kwargs)
        return log.step("backward", body, *output._truth_step)

    module.forward_step, module.backward_step = forward, backward
    for name in SCHEDULERS:
        setattr(module, name, _iteration(log, getattr(module, name)))


def _iteration(log, scheduler):
    @functools.wraps(scheduler)
    def forward_backward(*args, **kwargs):
        log.write("iteration")
        losses = scheduler(*args, **kwargs)
        log.write("losses", [float(loss["lm loss"]) for loss in losses])
        model = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
        # Experts are sharded over other ranks than the rest of the model.
        dense = [p for chunk in model for p in chunk.parameters() if getattr(p, "allreduce", True)]
        log.write("parameters", sum(float(p.detach().double().abs().sum()) for p in dense))
        return losses

    return forward_backward


def watch_p2p(log, module):
    """Calls of the pipeline's communicator."""
    for name in P2P_METHODS:
        method = getattr(module.P2PCommunicator, name)
        setattr(module.P2PCommunicator, name, _step(log, name, method))


def watch_grad_sync(log, module):
    """The function that scripts give the scheduler to finish gradients with."""
    module.finalize_model_grads = _step(log, "grad_sync", module.finalize_model_grads)


def watch_optimizer(log, module):
    """``step`` of the optimizer that the script gets."""
    make = module.get_megatron_optimizer

    @functools.wraps(make)
    def get_megatron_optimizer(*args, **kwargs):
        optimizer = make(*args, **kwargs)
        step = _step(log, "optimizer", optimizer.step)

        def logged():
            result = step()
            log.write("grad_norm", float(result[1]))
            return result

        optimizer.step = logged
        return optimizer

    module.get_megatron_optimizer = get_megatron_optimizer


def _step(log, kind, function):
    @functools.wraps(function)
    def stepped(*args, **kwargs):
        return log.step(kind, lambda: function(*args, **kwargs))

    return stepped


FRAMEWORKS = ("megatron.core", "deepspeed")
AFTER_IMPORT = {
    SCHEDULES: watch_schedules,
    P2P: watch_p2p,
    "megatron.core.distributed": watch_grad_sync,
    "megatron.core.optimizer": watch_optimizer,
    **truth_logger_deepspeed.AFTER_IMPORT,
}


class Watcher(importlib.abc.MetaPathFinder):
    """Watches torch when a framework is about to be imported, and the framework's modules after they were."""

    def __init__(self, folder):
        self._folder = folder
        self._log = None

    def find_spec(self, name, path, target=None):
        if name in FRAMEWORKS and self._log is None:
            self._log = Log(self._folder)
            watch_torch(self._log)
        if name not in AFTER_IMPORT:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = self._then(AFTER_IMPORT[name], spec.loader.exec_module)
                return spec
        return None

    def _then(self, watch, execute):
        def exec_module(module):
            execute(module)
            watch(self._log, module)

        return exec_module


if os.environ.get("TRUTH_LOG"):
    sys.meta_path.insert(0, Watcher(os.environ["TRUTH_LOG"]))
