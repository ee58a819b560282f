"""The `jaxpaged` command. `jaxpaged COMMAND --help` lists every flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpaged import __version__
from jaxpaged.errors import JaxPagedError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status. Mistakes of the user's are one line on stderr."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except JaxPagedError as e:
        print(f"jaxpaged: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    # Imported late: the commands bring JAX and the server in.
    from server.chat import add_chat_command
    from server.serve import add_serve_command

    parser = argparse.ArgumentParser(prog="jaxpaged", description="LLM serving in pure JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxpaged {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_serve_command(commands)
    add_chat_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
