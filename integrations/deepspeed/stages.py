"""What each stage of a ``PipelineModule`` holds, told without building the layers of other stages.

A layer is known by its class (or function) and its *fields*: the arguments of a ``LayerSpec``; structure, parameter
shapes and plain attributes of a module that the script built itself. Layers of equal fields are taken to do the same.
A field that only counts the layers (0, 1, 2, … in the order of the layers) is left out and reported: no two layers
would be alike otherwise.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import msgspec

_PLAIN = (bool, int, float, str, bytes, type(None))


class StageContents(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages of a module hold."""

    fingerprints: tuple[str, ...]
    """By pipeline rank, e.g. ``12x Block-3f2a91``: equal for stages that hold the same."""
    layer_numbers: tuple[str, ...]
    """Fields that were left out because they count the layers: ``Block.layer_number``."""


class _Layer(NamedTuple):
    kind: str
    fields: dict[str, Any]
    tie: str
    """Key of a tied layer; empty for others."""


def stage_contents(module: Any) -> StageContents:
    """What every pipeline rank of a ``PipelineModule`` holds; where ranks hold two parts (DualPipeV), both."""
    names = _Names()
    layers = [names.layer(spec) for spec in module._layer_specs]
    numbers = _layer_numbers(layers)
    texts = [_text(layer, numbers) for layer in layers]
    parts, ranks = module.parts, module.topology().get_dim("pipe")
    stages = len(parts) - 1
    held = [[rank] if stages == ranks else [rank, stages - 1 - rank] for rank in range(ranks)]
    fingerprints = []
    for rank, mine in enumerate(held):
        pieces = [", ".join(_runs(texts[parts[stage] : parts[stage + 1]])) or "nothing" for stage in mine]
        if stages - 1 in mine:
            pieces[-1] += f", loss {names.value(module.loss_fn)}"
        ties = {layers[i].tie for stage in mine for i in range(parts[stage], parts[stage + 1])} - {""}
        if ties:
            # Its gradients are reduced in a group of these very stages.
            pieces.append(f"ties of stage {rank}: {', '.join(sorted(ties))}")
        fingerprints.append(" | ".join(pieces))
    return StageContents(
        fingerprints=tuple(fingerprints),
        layer_numbers=tuple(sorted(f"{kind.rpartition('.')[2]}.{field}" for kind, field in numbers)),
    )


class _Names:
    """Texts for values; an object without a text of its own is known by its identity."""

    def __init__(self) -> None:
        self._objects: dict[int, tuple[int, Any]] = {}

    def layer(self, spec: Any) -> _Layer:
        """Class and fields of a ``LayerSpec``, a module or a function."""
        import torch

        if hasattr(spec, "typename"):
            fields = {str(i): value for i, value in enumerate(spec.module_args)} | spec.module_kwargs
            tie = ""
            if hasattr(spec, "key"):
                tie = str(spec.key)
                fields |= {"tied": spec.key, "forward_fn": spec.forward_fn, "weights": spec.tied_weight_attr}
            return _Layer(_path(spec.typename), self._shown(fields), tie)
        if isinstance(spec, torch.nn.Module):
            return _Layer(_path(type(spec)), self._shown(_module_fields(spec)), "")
        return _Layer(self.value(spec), {}, "")

    def value(self, value: Any) -> str:
        """A text that is equal only for values that are the same for a layer."""
        import torch

        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({', '.join(map(self.value, value))})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{self.value(k)}: {self.value(v)}' for k, v in value.items())})"
        if isinstance(value, functools.partial):
            return (
                f"partial({self.value(value.func)}, {self.value(value.args)}, {self.value(value.keywords)})"
            )
        if isinstance(value, (torch.dtype, torch.Size, torch.device)):
            return str(value)
        if isinstance(value, type):
            return _path(value)
        code = getattr(value, "__code__", None)
        if code is not None:
            held = (value.__defaults__, [_cell(cell) for cell in value.__closure__ or ()])
            return f"{_path(value)}:{code.co_firstlineno}{self.value(held)}"
        number, _ = self._objects.setdefault(id(value), (len(self._objects), value))
        return f"{_path(type(value))} no. {number}"

    def _shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {k: v if type(v) is int else self.value(v) for k, v in fields.items()}


def _module_fields(module: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"structure": repr(module)}
    for name, param in module.named_parameters():
        fields[f"parameter {name}"] = (tuple(param.shape), str(param.dtype), param.requires_grad)
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        fields |= {
            prefix + key: value
            for key, value in vars(child).items()
            if isinstance(value, _PLAIN) and not key.startswith("_")
        }
    return fields


def _layer_numbers(layers: list[_Layer]) -> set[tuple[str, str]]:
    """(kind, field) of the fields that count the layers of a kind, or all layers, from 0 or 1."""
    by_kind: dict[str, list[tuple[int, _Layer]]] = {}
    for index, layer in enumerate(layers):
        by_kind.setdefault(layer.kind, []).append((index, layer))
    numbers = set()
    for kind, members in by_kind.items():
        if len(members) < 2:
            continue
        for field in members[0][1].fields:
            values = [layer.fields.get(field) for _, layer in members]
            if all(type(value) is int for value in values):
                for counted in (range(len(members)), [index for index, _ in members]):
                    offsets = {value - number for value, number in zip(values, counted, strict=True)}
                    if offsets <= {0} or offsets <= {1}:
                        numbers.add((kind, field))
    return numbers


def _text(layer: _Layer, numbers: set[tuple[str, str]]) -> str:
    fields = [(k, v) for k, v in layer.fields.items() if (layer.kind, k) not in numbers]
    name = layer.kind.rpartition(".")[2]
    if not fields:
        return name
    return f"{name}-{hashlib.blake2b(repr((layer.kind, fields)).encode(), digest_size=3).hexdigest()}"


def _runs(texts: list[str]) -> list[str]:
    runs: list[list[Any]] = []
    for text in texts:
        if runs and runs[-1][0] == text:
            runs[-1][1] += 1
        else:
            runs.append([text, 1])
    return [text if count == 1 else f"{count}x {text}" for text, count in runs]


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"
