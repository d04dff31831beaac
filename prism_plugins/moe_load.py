"""How many tokens each expert of a mixture-of-experts layer gets: ``--prism-moe-load``.

Which expert a token goes to is decided by values that a virtual device does not have. The policy says it instead:

* ``balanced``: every expert gets the same number of tokens, to one (the default);
* ``zipf:S``: expert ``i`` gets tokens in proportion to ``1 / (i + 1) ** S``;
* ``FILE``: in proportion to a recorded histogram, one count for each expert: a JSON array (or an object with the
  array under ``tokens_per_expert``), or CSV: one count a line, or ``expert,tokens`` rows.

Every rank, layer and micro-batch routes its tokens so. Inside a run the policy travels as text
(``SliceSpec.moe_load``), a file by its contents: ``tokens:30,10,…``.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
from pathlib import Path

import numpy as np

from prism_plugins.errors import FileFormatError, PrismError
from prism_plugins.files import read_text

BALANCED = "balanced"
MAX_EXPERTS = 65_536
_MAX_BYTES = 1 << 20
"""More is no histogram (``/dev/zero``, a data set given by mistake)."""
_MAX_EXPONENT = 20.0
_FORMS = "balanced, zipf:S (S ≥ 0, e.g. zipf:1.2) or a JSON or CSV file of tokens per expert"


def parse_moe_load(text: str) -> str:
    """A value of ``--prism-moe-load`` in the form slices are told it.

    Raises:
        ValueError: not a policy, or a file that is not a histogram; the message is the end of a sentence that begins
            with the flag.
    """
    if text == BALANCED:
        return text
    if text.startswith("zipf:"):
        return f"zipf:{_exponent(text.removeprefix('zipf:')):g}"
    path = Path(text)
    if not (path.exists() or path.suffix or os.sep in text):
        raise ValueError(f"must be {_FORMS}, not {text!r}")
    counts = _counts_of_file(path)
    return "tokens:" + ",".join(f"{count:g}" for count in counts)


def describe_moe_load(load: str, num_experts: int) -> str:
    """The policy in one line, for the assumptions."""
    if load == BALANCED:
        return "experts are equally loaded (--prism-moe-load says otherwise)"
    shares = _shares(load, num_experts)
    kind = (
        f"by Zipf's law, exponent {load[5:]}" if load.startswith("zipf:") else "as the given histogram says"
    )
    return (
        f"experts are loaded {kind}: the busiest of {num_experts} gets {shares.max() * num_experts:.3g} times the "
        "mean, on every rank, in every layer and micro-batch (a token goes to an expert once at most)"
    )


@functools.lru_cache(maxsize=64)
def expert_counts(load: str, num_tokens: int, num_experts: int, topk: int) -> np.ndarray:
    """Tokens each expert gets of ``num_tokens`` that go to ``topk`` different experts each.

    Returns int64, shape (num_experts,), read-only; sums to ``num_tokens * topk``; no entry exceeds ``num_tokens``.
    Fractions are rounded by largest remainder, earlier experts first; what an expert cannot take (every token goes to
    it already) is spread over the others in proportion.

    Raises:
        PrismError: more experts per token than experts, or a histogram of another number of experts.
    """
    if not 0 < topk <= num_experts:
        raise PrismError(f"{topk} experts for each token, but there are {num_experts}")
    shares = _shares(load, num_experts)
    counts = _round(_capped(shares * num_tokens * topk, float(num_tokens)), num_tokens)
    counts.flags.writeable = False
    return counts


@functools.lru_cache(maxsize=16)
def expert_choice(load: str, num_tokens: int, num_experts: int, topk: int) -> np.ndarray:
    """The experts of every token, int64, shape (num_tokens, topk), read-only: counts as :func:`expert_counts`.

    Balanced: token ``t`` goes to experts ``(t * topk + j) % num_experts``. Otherwise each expert takes the next
    tokens in a round (McNaughton's wrap-around rule), so that no token meets an expert twice.
    """
    counts = expert_counts(load, num_tokens, num_experts, topk)
    if load == BALANCED:
        choice = (np.arange(num_tokens * topk) % num_experts).reshape(num_tokens, topk)
    else:
        choice = np.ascontiguousarray(
            np.repeat(np.arange(num_experts), counts).reshape(topk, num_tokens).transpose()
        )
    choice.flags.writeable = False
    return choice


def _shares(load: str, num_experts: int) -> np.ndarray:
    """Each expert's share of the assignments; sums to 1."""
    if load == BALANCED:
        weights = np.ones(num_experts)
    elif load.startswith("zipf:"):
        weights = np.arange(1, num_experts + 1) ** -float(load.removeprefix("zipf:"))
    else:
        weights = np.array([float(count) for count in load.removeprefix("tokens:").split(",")])
        if len(weights) != num_experts:
            raise PrismError(
                f"--prism-moe-load: the histogram has {len(weights)} experts, a layer of the model has {num_experts}"
            )
    return weights / weights.sum()


def _capped(wanted: np.ndarray, most: float) -> np.ndarray:
    """``wanted`` with what exceeds ``most`` spread over the other entries in proportion, or evenly among zeros."""
    given = wanted.copy()
    while True:
        full = given >= most
        excess = float((given[full] - most).sum())
        if excess <= most * 1e-9:
            return np.minimum(given, most)
        given[full] = most
        room = ~full
        base = given[room]
        total = float(base.sum())
        given[room] = base * (1 + excess / total) if total > 0 else excess / room.sum()


def _round(fractions: np.ndarray, most: int) -> np.ndarray:
    """Largest-remainder rounding to whole numbers of the same sum, none above ``most``."""
    total = round(float(fractions.sum()))
    # Sums that are whole but for the last bits of a float.
    near = np.rint(fractions)
    exact = np.where(np.abs(fractions - near) < 1e-6, near, fractions)
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    order = np.argsort(-(exact - counts), kind="stable")
    for expert in [*order, *order]:
        if missing == 0:
            break
        if counts[expert] < most:
            counts[expert] += 1
            missing -= 1
    return counts


def _exponent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX_EXPONENT:
        raise ValueError(f"zipf:S needs a number between 0 and {_MAX_EXPONENT:g}, not {text!r}")
    return value


def _counts_of_file(path: Path) -> list[float]:
    try:
        text = read_text(path, max_bytes=_MAX_BYTES)
    except FileFormatError as error:
        raise ValueError(f"file {error}") from None
    values = _from_json(text, path) if text.lstrip()[:1] in ("[", "{") else _from_csv(text, path)
    if not 0 < len(values) <= MAX_EXPERTS:
        raise ValueError(
            f"file {path} holds {len(values)} counts; expected 1 to {MAX_EXPERTS}, one an expert"
        )
    for expert, value in enumerate(values):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1e18:
            raise ValueError(
                f"file {path}: the tokens of expert {expert} must be a number ≥ 0, not {value!r:.40}"
            )
    if not any(values):
        raise ValueError(f"file {path}: no expert gets a token")
    return [float(value) for value in values]


def _from_json(text: str, path: Path) -> list:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"file {path} is not valid JSON") from None
    if isinstance(data, dict):
        data = data.get("tokens_per_expert")
    if not isinstance(data, list):
        raise ValueError(
            f"file {path} must be an array of tokens per expert, or have one as tokens_per_expert"
        )
    return data


def _from_csv(text: str, path: Path) -> list:
    """One count a line, or ``expert,tokens`` rows in any order; a first line of words is a header."""
    try:
        rows = [(reader.line_num, row) for reader in [csv.reader(io.StringIO(text))] for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"file {path} is not CSV: {error}") from None
    if rows and not any(_is_number(cell) for cell in rows[0][1]):
        rows = rows[1:]
    by_expert: dict[int, float] = {}
    for position, (line, row) in enumerate(rows):
        cells = [cell.strip() for cell in row]
        if len(cells) not in (1, 2) or not all(_is_number(cell) for cell in cells):
            raise ValueError(
                f"file {path}, line {line}: expected tokens, or expert,tokens; not {','.join(row)!r:.40}"
            )
        if len(cells) == 2 and not cells[0].isdecimal():
            raise ValueError(f"file {path}, line {line}: {cells[0]!r:.40} is no number of an expert")
        expert = int(cells[0]) if len(cells) == 2 else position
        if expert in by_expert:
            raise ValueError(f"file {path}, line {line}: expert {expert} is there twice")
        by_expert[expert] = float(cells[-1])
    if sorted(by_expert) != list(range(len(by_expert))):
        raise ValueError(f"file {path} must name each of the experts 0 to {len(by_expert) - 1} once")
    return [by_expert[expert] for expert in sorted(by_expert)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
