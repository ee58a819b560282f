"""Models by name: those of `jaxpaged/models/configs.json`, and small ones that nobody published, a file each here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER.parents[1] / "jaxpaged" / "models" / "configs.json"


def names() -> list[str]:
    """What `load` knows."""
    return sorted([*json.loads(PUBLISHED.read_text()), *(file.stem for file in FOLDER.glob("*.json"))])


def load(name: str) -> dict[str, Any]:
    """The content of a config.json, by the model's name or the file's path; raises ValueError where there is none."""
    for path in (Path(name), FOLDER / f"{name}.json"):
        if path.is_file():
            return json.loads(path.read_text())
    published = json.loads(PUBLISHED.read_text())
    if name not in published:
        raise ValueError(f"{name!r} is no config.json, and not one of {', '.join(names())}")
    return published[name]
