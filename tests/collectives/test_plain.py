from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from prism_plugins.collectives.plain import decode, encode

PLAIN = [
    None, True, 3, -2.5, "ü\n", b"\x00\xff", [1, [2, ("a", None)]], {"shape": (2, 3), 4: {1, 2}}, (), [], {},
    torch.Size([2, 3]), torch.bfloat16, {"dtype": torch.float32, (1, 2): [["dict", []]]},
]  # fmt: skip


@pytest.mark.parametrize("obj", PLAIN, ids=repr)
def test_plain_objects_come_back_as_they_were(obj: Any) -> None:
    payload = encode(obj)
    assert payload is not None
    back = decode(payload)
    assert back == obj
    assert type(back) is type(obj)
    assert pickle.dumps(back) == pickle.dumps(obj)


class Exploit:
    def __reduce__(self) -> Any:
        return print, ("never",)


@pytest.mark.parametrize("obj", [Exploit(), [Exploit()], {"a": object()}, torch.zeros(2), print])
def test_other_objects_have_no_plain_form(obj: Any) -> None:
    assert encode(obj) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[", b'["eval", "1"]', b'["dtype", "nn"]', b'["dtype", "nosuch"]', b'["bytes", "%"]', b"[1, 2, 3]",
        pickle.dumps({"a": 1}),
    ],
)  # fmt: skip
def test_damaged_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decode(payload)
