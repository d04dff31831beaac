"""Stand-in for ``torch.distributed.ProcessGroupNCCL``, which CPU builds of torch lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import Backend


class ProcessGroupNCCL:
    """What scripts ask of the class: its options, and ``isinstance`` (no group of ours is one)."""

    class NCCLConfig(SimpleNamespace):
        """Fields of ``ncclConfig_t``; kept, not interpreted."""

        def __init__(self, **fields: Any) -> None:
            defaults = {
                "blocking": 1,
                "cga_cluster_size": 4,
                "min_ctas": 1,
                "max_ctas": 32,
                "net_name": None,
                "split_share": 0,
                "traffic_class": -1,
                "collnet_enable": -1,
                "cta_policy": -1,
                "nvls_ctas": -1,
            }
            super().__init__(**{**defaults, **fields})

    class Options(Backend.Options):
        """``pg_options`` for the nccl backend."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl")
            self.is_high_priority_stream = is_high_priority_stream
            self.config = ProcessGroupNCCL.NCCLConfig()
            self.split_from = None
            self.split_color = 0

        def __deepcopy__(self, memo: Any) -> ProcessGroupNCCL.Options:
            return ProcessGroupNCCL.Options(self.is_high_priority_stream)
