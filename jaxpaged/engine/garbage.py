"""When a serving process looks for garbage that reference counts do not find: seldom, since every stream waits."""

from __future__ import annotations

import gc

# Objects that may come before the young ones are looked at. A step of a thousand streams makes up to 10,000, none
# of which outlives it; by default 700 are enough, so that each step would be looked at many times, for nothing.
_YOUNG_OBJECTS = 50_000


def collect_seldom() -> None:
    """Call it once everything is loaded: what is there now stays, and no collection will look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
