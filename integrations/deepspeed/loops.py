"""ZeRO's loops over the ranks of a group, replaced by equivalents that cost the same at any world size.

DeepSpeed cuts every flat buffer into one view per rank, in Python, parameter by parameter. Views are no device work:
what remains of such a loop are the allocations, the concatenation of the pieces and the collective. These are issued
here as the loop would; the views are recorded as work of the host (``host::views``).

A concatenation of more than :data:`MAX_PIECES` pieces is recorded with the same output and the same bytes, but in two
pieces. The hooks do nothing on devices where values are computed.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from prism_plugins.integration.hook_table import Hook
from prism_plugins.integrations.deepspeed.session import Session
from prism_plugins.program.model import MemoryCategory

MAX_PIECES = 64
_BLOCK_BYTES = 512
"""Granularity of torch's caching allocator."""
_SMALL_BYTES = 1 << 20
"""Largest request that the caching allocator serves from its pool of small blocks."""


def _on_virtual_device(session: Session) -> bool:
    return session.context.spec.device == "virtual"


# --- partition_parameters: gathering parameters ---


def _convert_to_deepspeed_param(session: Session, original: Any, module: ModuleType) -> Any:
    """Parameters get an ``all_gather_coalesced`` without loops."""
    if not _on_virtual_device(session):
        return original

    @functools.wraps(original)
    def convert(self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, param, *args, **kwargs)
        session.context.assume(
            "ZeRO-3's loops over ranks take the host host.loop_us times host.slice_factor of the cluster per rank and tensor"
        )
        param.all_gather_coalesced = functools.partial(
            gather_coalesced, module, self, param.all_gather_coalesced
        )
        return result

    return convert


def gather_coalesced(
    module: ModuleType, init: Any, original: Any, params: Any, safe_mode: bool = False, quantize: bool = False
) -> Any:
    """``Init``'s ``all_gather_coalesced``: one handle for the gathering of several parameters.

    Args:
        module: ``deepspeed.runtime.zero.partition_parameters``.
        init: the ``Init`` object that partitioned the parameters.
        original: DeepSpeed's function, for the cases without loops (one parameter) and with quantization.
    """
    params = list(params)
    by_group: dict[int, list[Any]] = {}
    for param in params:
        by_group.setdefault(id(init.get_partition_dp_group(param)), []).append(param)
    if len(by_group) > 1:
        gather = functools.partial(gather_coalesced, module, init, original)
        return module.MultipleAllGatherHandles(
            [gather(members, safe_mode=safe_mode, quantize=quantize) for members in by_group.values()]
        )
    world_size = init._partition_world_size(params[0]) if params else 1
    if (
        len(params) < 2
        or quantize
        or world_size == 1
        or init.allgather_sequential
        or init.use_all_reduce_for_fetch_params
    ):
        return original(params, safe_mode=safe_mode, quantize=quantize)

    init._ensure_availability_of_partitioned_params(params)
    for param in params:
        if param.ds_status != module.ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(param.ds_summary())
        param.ds_status = module.ZeroParamStatus.INFLIGHT
    group = init.get_partition_dp_group(params[0])
    rank = init._partition_rank(params[0])
    secondary = params[0].ds_secondary_tensor is not None
    if init.zero_param_process_group and secondary:
        group, rank, world_size = (
            init.zero_param_process_group,
            init.rank_in_group,
            init.num_ranks_in_param_group,
        )
    params.sort(key=lambda param: param.ds_id)
    if safe_mode:
        module.assert_ints_same_as_other_ranks([param.ds_id for param in params])
        module.assert_ints_same_as_other_ranks([param.ds_tensor.ds_numel for param in params])
    by_dtype: dict[Any, list[Any]] = {}
    for param in params:
        by_dtype.setdefault(module.get_allgather_dtype(param, param.ds_tensor), []).append(param)
    return module.MultipleAllGatherHandles(
        [
            _gather(module, by_dtype[dtype], dtype, group, rank, world_size, secondary)
            for dtype in module.sort_dtypes(by_dtype)
        ]
    )


def _gather(
    module: ModuleType,
    params: list[Any],
    dtype: Any,
    group: Any,
    rank: int,
    world_size: int,
    secondary: bool,
) -> Any:
    import torch

    accelerator = module.get_accelerator()
    device = accelerator.current_device_name()
    sizes = [_shard_numel(param, secondary) for param in params]
    flat = torch.empty(sum(sizes) * world_size, dtype=dtype, device=device, requires_grad=False)
    own = flat.narrow(0, sum(sizes) * rank, sum(sizes))
    shards = [param.ds_secondary_tensor if secondary else param.ds_tensor for param in params]
    torch.cat([shard.to(device).to(dtype) for shard in shards], out=own)
    _host_pieces(world_size)
    handle = module._dist_allgather_fn(own, flat, group)
    return GatherHandle(module, handle, params, flat, sizes, world_size)


def _shard_numel(param: Any, secondary: bool) -> int:
    numel = param.ds_tensor.ds_numel
    return numel * param.ds_secondary_tensor_num_of_groups if secondary else numel


class GatherHandle:
    """``AllGatherCoalescedHandle`` of one flat buffer instead of a view of it per rank."""

    def __init__(
        self, module: ModuleType, handle: Any, params: list[Any], flat: Any, sizes: list[int], world_size: int
    ) -> None:
        self._module = module
        self._handle = handle
        self._params = params
        self._flat = flat
        self._sizes = sizes
        self._world_size = world_size
        self.complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for the collective and make each parameter of its pieces."""
        if self.complete:
            return
        from prism_plugins.capture.recorder import get_recorder

        recorder = get_recorder()
        self._handle.wait()
        recorder.tag(self._flat, MemoryCategory.COMMUNICATION)
        accelerator = self._module.get_accelerator()
        asynchronous = not accelerator.is_synchronized_device()
        offset = 0
        for param, size in zip(self._params, self._sizes, strict=True):
            whole = join_pieces(
                self._flat, numel=param.ds_numel, size=size, step=sum(self._sizes), offset=offset
            )
            param.data = whole.view(param.ds_shape).to(param.ds_tensor.dtype)
            recorder.tag(param.data, MemoryCategory.PARAMETERS)
            param.ds_status = self._module.ZeroParamStatus.AVAILABLE
            offset += size
        if asynchronous and handle_dependency:
            self._flat.record_stream(accelerator.current_stream())
        self.complete = True
        if asynchronous and not handle_dependency:
            self._module.AllGatherCoalescedHandle.data_buffer.append([self._flat])


def join_pieces(flat: Any, *, numel: int, size: int, step: int, offset: int) -> Any:
    """``torch.cat`` of pieces of ``size`` elements that begin ``step`` elements apart, cut to ``numel`` in all."""
    import torch

    count = -(-numel // size)
    _host_pieces(count)
    if count <= MAX_PIECES:
        return torch.cat(
            [flat.narrow(0, i * step + offset, min(size, numel - i * size)) for i in range(count)]
        )
    whole = torch.empty(numel, dtype=flat.dtype, device=flat.device)
    _record_cat(whole, size)
    if not _is_shape_only(whole) and not _is_shape_only(flat):
        _copy_values(flat, whole, size, step, offset)
    return whole


def _copy_values(flat: Any, whole: Any, size: int, step: int, offset: int) -> None:
    """What the concatenation computes, where there are values."""
    from prism_plugins.device.tensors import host_view, is_synthesized, mark_synthesized

    source, target = host_view(flat), host_view(whole)
    rows, rest = divmod(target.numel(), size)
    target[: rows * size].view(rows, size).copy_(source.as_strided((rows, size), (step, 1), offset))
    if rest:
        target[rows * size :].copy_(source.narrow(0, rows * step + offset, rest))
    if is_synthesized(flat):
        mark_synthesized(whole)


# --- coalesced_collectives: reducing gradients ---


def _reduce_scatter_coalesced(session: Session, original: Any, module: ModuleType) -> Any:
    if not _on_virtual_device(session):
        return original
    import torch

    @functools.wraps(original)
    def reduce_scatter(tensors: list[Any], group: Any = None) -> list[Any]:
        return reduce_scatter_coalesced(module, tensors, group)

    return torch.no_grad()(reduce_scatter)


def reduce_scatter_coalesced(module: ModuleType, tensors: list[Any], group: Any) -> list[Any]:
    """Averages several tensors over a group and returns this rank's part of each, in one collective.

    Args:
        module: ``deepspeed.runtime.comm.coalesced_collectives``.
    """
    rank, world_size = module.dist.get_rank(group), module.dist.get_world_size(group)
    sizes = [-(-tensor.numel() // world_size) for tensor in tensors]
    _host_pieces(world_size * (len(tensors) + 1))
    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        buffer = tensors[0].view(-1)
    else:
        buffer, _padding = _interleave(tensors, sizes, world_size)  # The loop keeps its padding to its end.
    buffer.div_(world_size)
    total = sum(sizes)
    own = buffer.narrow(0, rank * total, total)
    module._torch_reduce_scatter_fn(buffer, own, group=group)
    outputs, offset = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        real = min(max(tensor.numel() - rank * size, 0), size)
        outputs.append(own.narrow(0, offset, real))
        offset += size
    return outputs


def _interleave(tensors: list[Any], sizes: list[int], world_size: int) -> tuple[Any, list[Any]]:
    """Rank after rank its piece of every tensor, padded to equal size; and the padding."""
    import torch

    if world_size * len(tensors) <= MAX_PIECES:
        pieces = []
        for rank in range(world_size):
            for tensor, size in zip(tensors, sizes, strict=True):
                piece = tensor.view(-1)[rank * size : rank * size + size]
                pieces.append(piece)
                if piece.numel() < size:
                    pieces.append(torch.empty(size - piece.numel(), dtype=tensor.dtype, device=tensor.device))
        return torch.cat(pieces), pieces
    first = tensors[0]
    padding = [
        block
        for tensor, size in zip(tensors, sizes, strict=True)
        for block in _padding_of(tensor, size, world_size)
    ]
    buffer = torch.empty(sum(sizes) * world_size, dtype=first.dtype, device=first.device)
    _record_cat(buffer, sizes[0])
    if not _is_shape_only(buffer):
        from prism_plugins.device.tensors import host_view, mark_synthesized

        host_view(buffer).zero_()
        mark_synthesized(buffer)
    return buffer, padding


def _padding_of(tensor: Any, size: int, world_size: int) -> list[Any]:
    """The padding of the last ranks' pieces: as many blocks of the caching allocator as that takes."""
    import torch

    full, rest = divmod(tensor.numel(), size)
    lacking = [size - rest] if rest else []
    blocks = [torch.empty(lacking[0], dtype=tensor.dtype, device=tensor.device)] if lacking else []
    empty = world_size - full - len(lacking)
    if empty:
        _host_pieces(empty)
        each = -(-size * tensor.element_size() // _BLOCK_BYTES) * _BLOCK_BYTES
        at_once = max(_SMALL_BYTES // each, 1)
        while empty:
            now = min(empty, at_once)
            blocks.append(torch.empty(now * each, dtype=torch.uint8, device=tensor.device))
            empty -= now
    return blocks


# --- stage_1_and_2: tables of partitions ---


def _partition_tables(session: Session, original: Any, module: ModuleType) -> Any:
    """DeepSpeed asks for every partition which of all parameters lie in it; partitions are consecutive."""
    if not _on_virtual_device(session):
        return original

    @functools.wraps(original)
    def initialize(self: Any) -> None:
        for i, params in enumerate(self.round_robin_bit16_groups):
            count = module.dist.get_world_size(group=self.real_dp_process_group[i])
            make_partition_tables(self, i, params, count)

    return initialize


def make_partition_tables(optimizer: Any, i: int, params: list[Any], count: int) -> None:
    """The tables of ``initialize_gradient_partitioning_data_structures`` for parameter group ``i``, cut into ``count``
    partitions."""
    size = optimizer.partition_size[i]
    partitions = range(count)
    of_param: dict[Any, list[int]] = {}
    totals = dict.fromkeys(partitions, 0)
    computed, insertion, starts = ({p: {} for p in partitions} for _ in range(3))
    first: dict[int, int | None] = dict.fromkeys(partitions)
    offset = 0
    for index, (param, padding) in enumerate(
        zip(params, optimizer.round_robin_bit16_padding[i], strict=True)
    ):
        numel, key = param.numel(), optimizer.get_param_id(param)
        end = offset + max(numel, 1)  # an empty parameter begins somewhere too
        for partition in range(offset // size, min(-(-end // size), count)):
            begin = max(partition * size - offset, 0)
            of_param.setdefault(key, []).append(partition)
            totals[partition] += 1
            computed[partition][key] = False
            insertion[partition][key] = offset + begin - partition * size
            starts[partition][key] = begin
            if first[partition] is None:
                first[partition] = index
        offset += numel + padding
    optimizer.param_to_partition_ids[i] = of_param
    optimizer.is_partition_reduced[i] = dict.fromkeys(partitions, False)
    optimizer.total_grads_in_partition[i] = totals
    optimizer.remaining_grads_in_partition[i] = {}
    optimizer.is_grad_computed[i] = computed
    optimizer.grad_partition_insertion_offset[i] = insertion
    optimizer.grad_start_offset[i] = starts
    optimizer.first_param_index_in_partition[i] = first


# --- utils: lists that ranks compare ---


def _get_lst_from_rank0(session: Session, original: Any, module: ModuleType) -> Any:
    """Rank 0's list comes from its journal, unless it is too long to have values on the virtual device."""
    if not _on_virtual_device(session):
        return original

    @functools.wraps(original)
    def get_lst_from_rank0(lst: list[int]) -> list[int]:
        from prism_plugins.collectives.journal import MAX_INTEGER_BYTES

        of_rank_0 = original(lst)
        if 8 * len(lst) <= MAX_INTEGER_BYTES:
            return of_rank_0
        session.context.assume(
            f"rank 0 holds the same lists of more than {MAX_INTEGER_BYTES // 8} integers (ZeRO-3's consistency checks)"
        )
        return list(lst)

    return get_lst_from_rank0


# --- what the equivalents record ---


def _record_cat(whole: Any, first: int) -> None:
    """A concatenation into ``whole``, of a first piece of ``first`` elements and the rest."""
    from prism_plugins.capture.recorder import get_recorder
    from prism_plugins.program.model import OpSignature, TensorSpec

    dtype = str(whole.dtype).removeprefix("torch.")
    numel = whole.numel()
    recorder = get_recorder()
    recorder.launch(
        recorder.intern(
            OpSignature(
                op="aten::cat",
                inputs=(TensorSpec(dtype, (first,)), TensorSpec(dtype, (numel - first,))),
                outputs=(TensorSpec(dtype, (numel,)),),
                scalars=(("dim", 0),),
            )
        )
    )


def _host_pieces(count: int) -> None:
    from prism_plugins.capture.recorder import get_recorder

    get_recorder().host_views(count)


def _is_shape_only(tensor: Any) -> bool:
    from prism_plugins.device.tensors import is_shape_only

    return is_shape_only(tensor)


HOOKS = (
    Hook(
        "deepspeed.runtime.zero.utils",
        "get_lst_from_rank0",
        _get_lst_from_rank0,
        "consistency checks of long lists",
    ),
    Hook(
        "deepspeed.runtime.zero.partition_parameters",
        "Init._convert_to_deepspeed_param",
        _convert_to_deepspeed_param,
        "gathering parameters without a loop over ranks",
    ),
    Hook(
        "deepspeed.runtime.comm.coalesced_collectives",
        "reduce_scatter_coalesced",
        _reduce_scatter_coalesced,
        "reducing gradients without a loop over ranks",
    ),
    Hook(
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures",
        _partition_tables,
        "tables of partitions without asking every partition about every parameter",
    ),
)
