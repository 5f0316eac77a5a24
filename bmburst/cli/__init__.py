"""The command line: `bmburst COMMAND`."""

from bmburst.cli.program import (
    COMMANDS,
    INTERRUPTED,
    Command,
    CommandParser,
    any_text,
    find_command,
    leaves_errors_to_rank_0,
    main,
    ranks_to_start,
)

__all__ = [
    "COMMANDS",
    "INTERRUPTED",
    "Command",
    "CommandParser",
    "any_text",
    "find_command",
    "leaves_errors_to_rank_0",
    "main",
    "ranks_to_start",
]
