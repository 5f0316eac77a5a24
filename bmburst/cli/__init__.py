"""The command line: `bmburst COMMAND`."""

from bmburst.cli.program import COMMANDS, CommandParser, find_command, main

__all__ = ["COMMANDS", "CommandParser", "find_command", "main"]
