"""What the text of an option means: numbers as people write them, JSON, yes and no."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# As in vLLM: small letters count in thousands, capitals in powers of two.
_MULTIPLES = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def integer(text: str) -> int:
    """`32768`, `32k` (32,000), `32K` (32,768), `1.5m`.

    Raises:
      ValueError: it is no whole number.
    """
    match = re.fullmatch(r"([+-]?\d{1,20}(?:\.\d{1,20})?)([kmgtKMGT]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no whole number, such as 4096, 32k (32,000) or 32K (32,768)")
    digits, letter = match.groups()
    whole, _, fraction = digits.partition(".")
    value, rest = divmod(int(whole + fraction) * _MULTIPLES[letter], 10 ** len(fraction))
    if rest:
        raise ValueError(f"{text!r} is no whole number")
    return value


def number(text: str) -> float:
    """A finite number.

    Raises:
      ValueError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    return value


def boolean(text: str) -> bool:
    """`true` or `false`, as YAML spells them.

    Raises:
      ValueError: it is neither.
    """
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()]


def json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{text!r:.80} is no JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f'{text!r:.80} is no JSON object, such as {{"temperature": 0.7}}')
    return value


def strings(text: str) -> list[str]:
    """One string, or all of a JSON list of strings.

    Raises:
      ValueError: it begins as a list and is none.
    """
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{text!r:.80} is no JSON list: {e}") from e
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f'{text!r:.80} is no JSON list of strings, such as ["a", "b"]')
    return values
