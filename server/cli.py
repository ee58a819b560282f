"""The `jaxpaged` command. `jaxpaged COMMAND --help` lists every flag.

Exit status: 0; 1 for what went wrong, in one line; 2 for a command line that makes no sense; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpaged import __version__
from jaxpaged.errors import JaxPagedError

# What takes its time to import, the functions below import: then `main` is there to catch Ctrl-C.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status. Mistakes of the user's are one line on stderr."""
    arguments = argparse.Namespace()
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return arguments.run(arguments)
    except JaxPagedError as e:
        from server.options.flags import in_flags

        print(f"jaxpaged: error: {in_flags(str(e), arguments)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line's arguments; `run` is the command's function.

    Raises:
      SystemExit: it makes no sense, which was said, or asked for help.
      ConfigError: the file of options is wrong.
    """
    from server.options.flags import nearest

    words = list(argv)
    flags = words[: words.index("--")] if "--" in words else words
    words[: len(flags)] = [_with_dashes(word) for word in flags]
    arguments, extra = build_parser().parse_known_args(words)
    command: argparse.ArgumentParser = arguments.parser
    wrong: list[str] = list(getattr(arguments, "vllm_refused", ()))
    for word in extra if "--" not in extra else extra[: extra.index("--")]:
        if word.startswith("-") and word != "-":  # a value that follows may be a secret: it is not shown
            name = word.partition("=")[0]
            wrong.append(f"unknown option {name}{nearest(name, command._option_string_actions)}")
    if wrong:
        command.error("\n  ".join(wrong))
    extra = [word for word in extra if word != "--"]
    if extra and getattr(arguments, "prompt", "") is None:  # argparse takes none after a flag
        arguments.prompt = extra.pop(0)
    if extra:
        command.error(f"unexpected argument {extra[0]!r}")
    if "finish" in arguments:
        arguments.finish(arguments)
    for message in getattr(arguments, "vllm_ignored", ()):
        print(f"jaxpaged: warning: {message}", file=sys.stderr)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    from server.commands import add_chat_command, add_serve_command

    parser = argparse.ArgumentParser(prog="jaxpaged", description="LLM serving in pure JAX.", allow_abbrev=False)
    parser.add_argument("--version", "-v", action="version", version=f"jaxpaged {__version__}")
    parser.set_defaults(parser=parser, run=_print_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_serve_command(commands)
    add_chat_command(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_print_version)
    return parser


def _print_help(arguments: argparse.Namespace) -> int:
    arguments.parser.print_help()
    return 0


def _print_version(_: argparse.Namespace) -> int:
    print(f"jaxpaged {__version__}")
    return 0


def _with_dashes(word: str) -> str:
    """`--max-model-len=4` for `--max_model_len=4`, as vLLM has it."""
    if not word.startswith("--"):
        return word
    from server.options.vllm import undotted

    name, equals, value = word.partition("=")
    return undotted(name.replace("_", "-") + equals + value)


if __name__ == "__main__":
    sys.exit(main())
