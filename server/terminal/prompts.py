"""What `jaxpaged chat` is asked: one prompt, or what is typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from jaxpaged.errors import InvalidRequestError


def read_prompts(prompt: str | None) -> Iterator[str]:
    """The prompt given, or all of stdin, or what is typed until it ends. Read before the model is loaded."""
    if prompt is None and sys.stdin.isatty():
        return _typed()
    prompt = sys.stdin.read().strip() if prompt is None else prompt
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return iter([prompt])


def _typed() -> Iterator[str]:
    print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        if line:
            yield line
