"""The `valuspec` command. A subcommand's module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: name -> (module with `add_arguments(parser)` and `run(args) -> exit code`, one line of help)
COMMANDS = {
    "serve": (
        "deployments.commands.serve",
        "serve a model on this machine, with everything it needs",
    ),
    "chat": ("deployments.commands.chat", "ask a running server one question"),
    "thresholds": ("deployments.commands.thresholds", "show, choose and roll back threshold sets"),
    "replay": ("jobs.commands.replay", "predict the gain from answers already given; no model"),
    "eagle3": ("jobs.commands.eagle3", "train a draft head for a model"),
    "cost": ("jobs.commands.cost", "measure what a target forward costs on this machine"),
    "ingest": ("jobs.commands.ingest", "store answers that were given before"),
    "tenants": ("jobs.commands.tenants", "list tenants, and drop one completely"),
    "forget": ("jobs.commands.forget", "delete what is stored of one tenant"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="valuspec",
        description="Faster LLM answers without changing a token.",
        epilog=f"commands:\n{listing}\n\nexample:\n  valuspec serve --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    # Only the name is parsed here: the options belong to a module that is not loaded yet.
    name = parser.parse_args(arguments[:1]).command
    module = importlib.import_module(COMMANDS[name][0])
    command = argparse.ArgumentParser(
        prog=f"valuspec {name}",
        description=module.__doc__,
        epilog=module.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(command)
    exit_code: int = module.run(command.parse_args(arguments[1:]))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
