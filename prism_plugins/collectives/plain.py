"""Objects in a journal file: plain data as tagged JSON, so that reading a journal runs no code.

``encode`` takes None, bool, int, float, str, bytes, list, tuple, set, dict (any plain keys), torch.Size and torch.dtype,
of exactly these types; anything else has no plain form.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

_ITSELF = (type(None), bool, int, float, str)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}
_NAMES = {kind: name for name, kind in _SEQUENCES.items()}


def encode(obj: Any) -> bytes | None:
    """The object as JSON, or None when it holds something that is not plain data."""
    try:
        return json.dumps(_tagged(obj)).encode()
    except (TypeError, RecursionError):
        return None


def decode(payload: bytes) -> Any:
    """What :func:`encode` was given.

    Raises:
        ValueError: the payload is damaged.
    """
    try:
        return _untagged(json.loads(payload))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an object of a journal: {error}") from error


def _tagged(obj: Any) -> Any:
    kind = type(obj)
    if kind in _ITSELF:
        return obj
    if kind is bytes:
        return ["bytes", base64.b64encode(obj).decode()]
    if kind is torch.dtype:
        return ["dtype", str(obj).removeprefix("torch.")]
    if kind is dict:
        return ["dict", [[_tagged(k), _tagged(v)] for k, v in obj.items()]]
    if kind in _NAMES:
        return [_NAMES[kind], [_tagged(item) for item in obj]]
    raise TypeError(f"{kind} is not plain data")


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    tag, content = value
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch.{content} is no dtype")
        return dtype
    if tag == "dict":
        return {_untagged(k): _untagged(v) for k, v in content}
    return _SEQUENCES[tag](_untagged(item) for item in content)
