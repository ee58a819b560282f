"""Flags of vLLM that are known here and not had: what to do instead, or why they make no difference."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from server.options.vllm_table import CONTRADICTS, IGNORED, NEUTRAL, REFUSED, SO_ANYWAY

ALONE = ""  # the flag without a value


class VllmFlag(NamedTuple):
    """Attributes:
    advice: why it is not here and what to do; "" if it always asks for what is so anyway.
    neutral: values with which it asks for nothing, and is accepted.
    ignored: it would make no difference to the answers: it is accepted with a warning.
    nargs: how many values follow it, as for argparse.
    """

    advice: str
    neutral: tuple[str, ...] = ()
    ignored: bool = False
    nargs: int | str = 0


def _table() -> dict[str, VllmFlag]:
    made = {}
    for ignored, rows in ((False, (("", SO_ANYWAY), *REFUSED)), (True, IGNORED)):
        for advice, names in rows:
            for word in names.split():
                name, _, many = word.partition("=")
                neutral = NEUTRAL.get(name, ()) if advice else (ALONE,)
                made[name] = VllmFlag(advice, neutral, ignored, many or int(name != word))
    # A switch that is off asks for nothing.
    switches = [name for name, flag in made.items() if not flag.nargs and name.startswith("--")]
    return {_off(name): VllmFlag("", (ALONE,)) for name in switches} | made


def _off(switch: str) -> str:
    return "--" + switch.removeprefix("--no-") if switch.startswith("--no-") else "--no-" + switch.removeprefix("--")


VLLM_FLAGS = _table()


def add_vllm_flags(parser: argparse.ArgumentParser, own: Collection[str]) -> None:
    """Adds the flags, unseen in the help, but for those that the parser has itself.

    What is wrong with them is collected in `vllm_refused` and `vllm_ignored` of what is parsed, and in `vllm_so_anyway`
    those that may contradict ours.
    """
    parser.set_defaults(vllm_refused=(), vllm_ignored=(), vllm_so_anyway=())
    for name, flag in VLLM_FLAGS.items():
        if name not in own:
            parser.add_argument(
                name, action=_Known, nargs=flag.nargs, dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip


def undotted(word: str) -> str:
    """`--compilation-config=3` for `--compilation-config.mode=3`, as vLLM lets parts of a value be given."""
    name, equals, value = word.partition("=")
    whole = name.partition(".")[0]
    return whole + equals + value if whole in VLLM_FLAGS else word


def refusal(name: str, value: str = ALONE) -> str | None:
    """Why `--name value` cannot be had and what to do; None: it asks for nothing, or makes no difference."""
    flag = VLLM_FLAGS[name]
    refused = not flag.ignored and value not in flag.neutral
    return f"{name} is vLLM's and not built here: {flag.advice}" if refused else None


def warning(name: str) -> str | None:
    """What is said where the flag is given and makes no difference; None: nothing."""
    flag = VLLM_FLAGS[name]
    return f"{name} makes no difference here: {flag.advice}" if flag.ignored else None


def contradiction(given: Mapping[str, Any]) -> str | None:
    """Which two flags do not go together, of a command line or a file: arguments, and `vllm_so_anyway`."""
    for name in given.get("vllm_so_anyway", ()):
        dest, value, flag = CONTRADICTS[name]
        if given.get(dest) is value:
            return f"{name} contradicts {flag}"
    return None


class _Known(argparse.Action):
    def __call__(
        self, _: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        name = option_string or ""
        if message := refusal(name, " ".join(values or [])):
            namespace.vllm_refused = (*namespace.vllm_refused, message)
        elif message := warning(name):
            namespace.vllm_ignored = (*namespace.vllm_ignored, message)
        elif name in CONTRADICTS:
            namespace.vllm_so_anyway = (*namespace.vllm_so_anyway, name)
