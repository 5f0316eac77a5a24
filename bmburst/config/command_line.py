"""A configuration on the command line: one option for every field, grouped by object, with unit and default."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bmburst.amounts import TOKENS_TOO
from bmburst.config.fields import number_text, optional_part
from bmburst.config.tree import Leaf, leaves


def add_options(
    parser: argparse.ArgumentParser,
    defaults: Any,
    *,
    short: Mapping[str, str],
    titles: Mapping[str, str],
) -> None:
    """Add an option `--dotted.name VALUE` for every field of a configuration.

    An option takes hyphens and underscores alike. Options that are not given leave no trace in the namespace, so that
    `given_options` returns exactly what the user wrote; values stay text until `read_layer` converts them.

    Args:
        parser: Where the options go.
        defaults: A configuration whose values are shown as the defaults.
        short: Dotted name to a shorter option, for example {"data.source": "--data"}.
        titles: Title of the group of options of each object; "" is the top level.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(defaults):
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(titles.get(leaf.section, leaf.section))
        inner, _ = optional_part(leaf.annotation)
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if inner is bool else {}
        groups[leaf.section].add_argument(
            *_spellings(leaf, short.get(leaf.name)),
            dest=leaf.name,
            default=argparse.SUPPRESS,
            metavar=_metavar(inner),
            help=_help(leaf).replace("%", "%%"),
            **flag,
        )


def given_options(args: argparse.Namespace, config: Any) -> dict[str, str]:
    """Return the options of `add_options` that were given, by dotted name."""
    return {leaf.name: getattr(args, leaf.name) for leaf in leaves(config) if hasattr(args, leaf.name)}


class FieldHelpFormatter(argparse.HelpFormatter):
    """Shows an option once, in its first spelling, where hyphen and underscore both serve."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown: dict[str, str] = {}
        for option in action.option_strings:
            shown.setdefault(option.replace("_", "-"), option)
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown.values()) + value


def option_name(name: str, short: Mapping[str, str]) -> str:
    """Return the option that sets a field, as a user would write it."""
    return short.get(name) or "--" + (name if "." in name else name.replace("_", "-"))


def _spellings(leaf: Leaf, short: str | None) -> list[str]:
    # Below the top level the dotted name is shown as it stands in a file; at the top level hyphens are usual.
    dotted = f"--{leaf.name}"
    hyphens = dotted.replace("_", "-")
    spellings = ([short] if short else []) + ([dotted, hyphens] if "." in leaf.name else [hyphens, dotted])
    return list(dict.fromkeys(spellings))


def _metavar(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "A,B"
    if dataclasses.is_dataclass(annotation):
        return "none"
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}.get(annotation, "VALUE")


def _help(leaf: Leaf) -> str:
    number = optional_part(leaf.annotation)[0] in (int, float)
    unit = leaf.spec.unit or ("no unit" if number else "")
    too = TOKENS_TOO if leaf.spec.counts_tokens else ""
    notes = [unit, too, leaf.spec.bounds(), _default_text(leaf)]
    return f"{leaf.spec.help} [{'; '.join(note for note in notes if note)}]"


def _default_text(leaf: Leaf) -> str:
    if leaf.spec.default_text:
        return f"default {leaf.spec.default_text}"
    value = leaf.default
    if value is dataclasses.MISSING:
        return "no default"
    if value is None:
        return "default none"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    if isinstance(value, float):
        return f"default {number_text(value)}"
    if isinstance(value, tuple):
        return f"default {','.join(map(str, value))}"
    if dataclasses.is_dataclass(value):
        return "default as below"
    return f"default {value}"
