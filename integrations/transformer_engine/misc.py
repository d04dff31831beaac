"""Questions about versions and the machine."""

from __future__ import annotations

from prism_plugins.integrations.transformer_engine.calls import Call, implements

CUDNN_VERSION = 91501
"""cuDNN 9.15.1, of the default CUDA 13 wheels of torch 2.11 and newer. Decides which fused attention there is."""
CUBLASLT_VERSION = 130100
"""cuBLASLt 13.1, likewise."""


@implements("get_cudnn_version")
def _cudnn_version(call: Call) -> int:
    return CUDNN_VERSION


@implements("get_cublasLt_version")
def _cublaslt_version(call: Call) -> int:
    return CUBLASLT_VERSION


@implements("device_supports_multicast")
def _multicast(call: Call) -> bool:
    return True


@implements("get_stream_priority_range")
def _stream_priorities(call: Call) -> tuple[int, int]:
    return (0, -5)


@implements("ubuf_built_with_mpi")
def _built_with_mpi(call: Call) -> bool:
    return False
