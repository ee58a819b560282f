"""`--config FILE.yaml`: options from a file, whose keys are the flags' names. The command line goes before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxpaged.errors import ConfigError
from server.options.flags import Flag, nearest
from server.options.vllm import ALONE, VLLM_FLAGS, contradiction, refusal, warning
from server.options.vllm_table import CONTRADICTS

MAX_BYTES = 64 * 1024
_MOST_FAULTS = 20  # are told at once


def read_options(path: str, flags: Iterable[Flag]) -> dict[str, Any]:
    """What a file says: argument (a flag's `dest`, or "model") -> value; and "vllm_ignored" -> warnings, if any.

    Raises:
      ConfigError: naming the file, the line and the key; of all that is wrong with them, a line each, up to a bound.
    """
    by_name = {name: flag for flag in flags for name in flag.names}
    found: dict[str, Any] = {}
    seen: dict[str, int] = {}
    faults: list[str] = []
    for key, value in _entries(path):
        if len(faults) >= _MOST_FAULTS:
            faults.append("... and maybe more")
            break
        line = key.start_mark.line + 1
        name = "--" + key.value.replace("_", "-").removeprefix("--")
        where = f"{path}:{line}: {key.value}"
        try:
            dest, option = _option(name, value, by_name)
        except ValueError as e:
            faults.append(f"{where}: {e}")
            continue
        if not dest and option is None and name in CONTRADICTS and str(value.value).lower() == "true":
            found["vllm_so_anyway"] = (*found.get("vllm_so_anyway", ()), name)
        if not dest:
            if option is not None:
                found["vllm_ignored"] = (*found.get("vllm_ignored", ()), f"{where}: {option}")
            continue
        if dest in seen:
            faults.append(f"{where}: is given in line {seen[dest]} already")
        seen[dest], found[dest] = line, option
    message = contradiction(found)
    if message is not None:
        faults.append(f"{path}: {message}")
    if faults:
        raise ConfigError("\n  ".join(faults))
    return found


def _entries(path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The keys and values of the file's mapping, as nodes: they know their lines, and how they were written."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes")
        root = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {e.problem}") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(e).split())}") from e
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must be a mapping of flag names to values, such as `max-model-len: 4096`")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be the name of a flag")
    return root.value


def _option(name: str, node: yaml.Node, by_name: Mapping[str, Flag]) -> tuple[str, Any]:
    """An argument and its value; no argument ("") where nothing is asked for, or a warning is all."""
    if name == "--model":
        return "model", _text(node)
    flag, positive = by_name.get(name), by_name.get("--" + name.removeprefix("--no-"))
    if flag is not None:
        return flag.dest, _value(flag, node)
    if positive is not None and positive.kind is bool:
        return positive.dest, not _value(positive, node)
    if name not in VLLM_FLAGS:
        raise ValueError("is no option" + nearest(name, ["--model", *by_name]))
    text = node.value if isinstance(node, yaml.ScalarNode) else "several"
    if text.lower() != "false":
        message = refusal(name, ALONE if text.lower() == "true" else text)
        if message is not None:
            raise ValueError(message)
        return "", warning(name)
    return "", None


def _value(flag: Flag, node: yaml.Node) -> Any:
    if flag.many:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return [flag.value(_text(item)) for item in items]
    if flag.kind is dict and isinstance(node, yaml.MappingNode):
        return {_text(key): _constructed(_scalar(value)) for key, value in node.value}
    return flag.value(_text(node))


def _constructed(node: yaml.ScalarNode) -> Any:
    """A scalar as the type that it looks like, or that its tag says."""
    try:
        return yaml.SafeLoader("").construct_object(node)
    except yaml.MarkedYAMLError as e:  # there is no such type
        raise ValueError(e.problem) from e
    except Exception as e:  # each type has its own for what is none of it
        raise ValueError(f"{node.value!r} is no {node.tag.rpartition(':')[2]}") from e


def _text(node: yaml.Node) -> str:
    """A scalar as it is written: `0123` stays a key of four digits."""
    return _scalar(node).value


def _scalar(node: yaml.Node) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must be a single value, not a list or a mapping")
    if node.tag == "tag:yaml.org,2002:null":
        raise ValueError("has no value")
    return node
