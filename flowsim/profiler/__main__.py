"""The command `python -m flowsim.profiler`: traces in, profiles out. Each sub-command is a module of its own.

Such a module has `configure(parser)`, which adds its arguments, and `run(options)`, which answers the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys

__all__ = ["main"]

COMMANDS = {
    "import": ("flowsim.profiler.importers.command", "turn published measurements into an operator trace"),
    "collect": ("flowsim.profiler.collect", "measure a model's operators on this machine's GPU or CPU (needs torch)"),
    "fit": ("flowsim.profiler.fitting", "fit traces and write a profile and its report"),
    "list": ("flowsim.profiler.listing", "list the shipped profiles with their sources and errors"),
    "show": ("flowsim.profiler.showing", "print one profile"),
    "pause": ("flowsim.profiler.pause", "show a cooperative pause on this machine's GPU (needs torch)"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one sub-command; answers 0, 1 or 2 (a mistake in what was asked), or 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m flowsim.profiler", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((one for one in arguments if not one.startswith("-")), "")
    run = None
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == asked:  # the others' modules are not needed, nor what they import
            loaded = importlib.import_module(module)
            loaded.configure(command)
            run = loaded.run
    options = parser.parse_args(arguments)
    try:
        return int(run(options)) if run else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"flowsim.profiler: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
