"""Configuration: converts nested frozen dataclasses to and from dictionaries, files and command line options. No torch.

`fields` declares and checks one field, and `files` reads and writes JSON and YAML. This module converts configurations
to nested dictionaries and back, merges layers of values, and adds one option per field, grouped by object, with unit,
bounds and default in its help.
"""

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from bmburst.config.fields import (
    FieldSpec,
    choices_of,
    convert_value,
    describe_allowed,
    is_none,
    misfit,
    nearest_name,
    number_text,
    optional_part,
    shown,
    spec_of,
    type_hints,
    union_parts,
)
from bmburst.errors import UnknownKey, UserError, with_fix

Config = TypeVar("Config")
_COLUMNS = 80  # of a terminal, for which the short help is made
_NAMED = 12  # further unknown keys that a message names
_RARE = "rare_help"  # attribute of an option that help hides: its text
_COMMON = "common_place"  # attribute of an option that short help shows: its place, and a short default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One field with a value, or an optional object, which itself can only be set to None.

    Attributes:
        name: Dotted name, for example "optimizer.lr".
        annotation: Type of the field.
        spec: Declaration of the field.
        default: Value in the configuration that `leaves` walked; `dataclasses.MISSING` if it has none.
    """

    name: str
    annotation: Any
    spec: FieldSpec
    default: Any

    @property
    def section(self) -> str:
        """Name of the top-level object that holds the field; empty for fields of the top level."""
        head, dot, _ = self.name.partition(".")
        return head if dot or self.is_object else ""

    @property
    def is_object(self) -> bool:
        """Whether this is an optional object. Its fields follow as separate leaves."""
        return dataclasses.is_dataclass(optional_part(self.annotation)[0])


def leaves(config: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every field of a configuration, depth first in the order of declaration.

    Args:
        config: An instance, whose values are the defaults, or a dataclass type.
        prefix: Prefix of every name.
    """
    cls = config if isinstance(config, type) else type(config)
    hints = type_hints(cls)
    for declared in dataclasses.fields(cls):
        name, annotation = prefix + declared.name, hints[declared.name]
        value = _class_default(declared) if config is cls else getattr(config, declared.name)
        inner, none_allowed = optional_part(annotation)
        is_object = dataclasses.is_dataclass(inner)
        if not is_object or none_allowed:
            yield Leaf(name=name, annotation=annotation, spec=spec_of(declared), default=value)
        if is_object:
            yield from leaves(value if dataclasses.is_dataclass(value) else inner, f"{name}.")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of JSON types; `from_dict` is the inverse."""
    return {declared.name: _plain(getattr(config, declared.name)) for declared in dataclasses.fields(config)}


def read_layer(cls: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check and convert values for some of the fields, and return them as nested dictionaries.

    Args:
        cls: Configuration dataclass of the fields.
        values: Nested dictionaries; a key may also be a dotted name.
        source: Origin of the values, for messages: a file name, or "" for the command line.

    Raises:
        UnknownKey: A key is unknown; the message suggests the nearest.
        UserError: A value does not fit its field.
    """
    known = {leaf.name: leaf for leaf in leaves(cls)}
    layer: dict[str, Any] = {}
    try:
        for name, value in _fields_of(cls, values):
            if name not in known:
                others = (other for other, _ in _fields_of(cls, values) if other not in known and other != name)
                raise _unknown_key(name, known, others)
            leaf = known[name]
            # An object reaches this line only as None: its fields are separate leaves.
            _put(layer, name, None if leaf.is_object else convert_value(name, value, leaf.annotation, leaf.spec))
    except UserError as error:
        raise type(error)(f"{source}: {error}" if source else str(error)) from None
    return layer


def overlay(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries. Later ones override earlier ones field by field."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            merged[key] = overlay(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
    return merged


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def build_config(cls: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    """Build a configuration from checked nested dictionaries (see `read_layer`).

    Raises:
        UserError: A field without a default is missing, or values contradict each other.
    """
    hints = type_hints(cls)
    arguments: dict[str, Any] = {}
    for declared in dataclasses.fields(typing.cast(Any, cls)):
        name = prefix + declared.name
        inner, _ = optional_part(hints[declared.name])
        if declared.name not in values:
            if _class_default(declared) is dataclasses.MISSING:
                raise UserError(
                    f"{name} is missing\nallowed: {describe_allowed(inner, spec_of(declared))}\nfix: add --{name}"
                )
            continue
        value = values[declared.name]
        arguments[declared.name] = build_config(inner, value, f"{name}.") if isinstance(value, Mapping) else value
    return cls(**arguments)


def from_dict(cls: type[Config], values: Mapping[str, Any], source: str = "") -> Config:
    """Build a configuration from nested dictionaries of any origin; `source` and errors as in `read_layer`."""
    return build_config(cls, read_layer(cls, values, source))


def _class_default(declared: "dataclasses.Field[Any]") -> Any:
    factory = declared.default_factory
    return declared.default if factory is dataclasses.MISSING else factory()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _fields_of(cls: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value). Dictionaries are entered only where the configuration has an object."""
    objects = {declared.name for declared in dataclasses.fields(cls)}
    hints = type_hints(cls)
    for key, value in values.items():
        head, dot, rest = str(key).partition(".")
        inner, none_allowed = optional_part(hints[head]) if head in objects else (None, False)
        if not dataclasses.is_dataclass(inner) or (dot and not rest):
            yield f"{prefix}{key}", value
        elif not rest and none_allowed and is_none(value):
            yield f"{prefix}{key}", None
        elif rest or isinstance(value, Mapping):
            yield from _fields_of(typing.cast(type, inner), {rest: value} if rest else value, f"{prefix}{head}.")
        else:
            own = inspect.get_annotations(typing.cast(type, inner))  # before inherited ones: of data, `source`
            names = sorted((declared.name for declared in dataclasses.fields(inner)), key=lambda name: name not in own)
            allowed = f"{'none, or ' if none_allowed else ''}its fields, {prefix}{key}.*: {', '.join(names)}"
            fix = f"{key}: {{{names[0]}: ...}}, or another of its fields"
            if isinstance(value, str) and (meant := nearest_name(head, objects - {head})):
                fix = f"{meant}: {shown(value)}, if that is meant; else {fix}"
            raise with_fix(misfit(f"{prefix}{key}", value, allowed), fix)


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        below = tree.get(part)
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    tree[last] = value


def _unknown_key(name: str, known: Mapping[str, Leaf], others: Iterator[str]) -> UnknownKey:
    """Return the error of an unknown key, which names others too: the file may be that of another program."""
    near = nearest_name(name, known)
    hint = f"; did you mean '{near}'?" if near else ""
    more: list[str] = []
    with contextlib.suppress(UserError):  # a value that does not fit, which is said once the keys are right
        more.extend(others)
    if more:
        named = (f"'{other}'" + (f" ('{near}'?)" if (near := nearest_name(other, known)) else "") for other in more)
        rest = f" and {len(more) - _NAMED:,} more" if len(more) > _NAMED else ""
        hint += f"; also unknown: {', '.join(itertools.islice(named, _NAMED))}{rest}"
    parent = name.rpartition(".")[0]
    while parent and not any(other.startswith(f"{parent}.") for other in known):
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    fields = dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix))
    return UnknownKey(
        f"unknown key '{name}'{hint}\nknown in {parent or 'the configuration'}: {', '.join(fields)}\n"
        "fix: correct the key, or leave it out"
    )


def add_options(
    parser: argparse.ArgumentParser,
    defaults: Any,
    *,
    short: Mapping[str, str],
    titles: Mapping[str, str],
    common: Mapping[str, str] = MappingProxyType({}),
    only: Mapping[str, str] | None = None,
) -> None:
    """Add an option `--dotted.name VALUE` for every field of a configuration.

    Hyphens and underscores in options are equivalent. Options that are not given are not in the namespace, so that
    `given_options` returns exactly the user's options. Values stay text until `read_layer` converts them.

    Args:
        parser: Parser that gets the options.
        defaults: Configuration whose values are shown as defaults.
        short: Map from dotted name to a shorter option, for example {"data.source": "--data"}.
        titles: Title of each object's group of options; "" is the top level.
        only: Names of the fields that get options, with the texts of their defaults; None for all fields.
        common: Names of the fields that `--help` shows, in this order, with short texts of their defaults where the
            fields' own are long, else "". The others are only in `--help all`. By default all are shown.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(defaults):
        if only is not None:
            if leaf.name not in only:
                continue
            leaf = dataclasses.replace(leaf, spec=dataclasses.replace(leaf.spec, default_text=only[leaf.name]))
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(titles.get(leaf.section, leaf.section))
        inner, _ = optional_part(leaf.annotation)
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in union_parts(inner) else {}
        if typing.get_origin(inner) is tuple or leaf.spec.several:
            flag["action"] = partial(_Once, several=leaf.spec.several)
        action = groups[leaf.section].add_argument(
            *_spellings(leaf, short.get(leaf.name)),
            dest=leaf.name,
            default=argparse.SUPPRESS,
            metavar=_metavar(inner, leaf.spec),
            help=_help(leaf).replace("%", "%%"),
            **flag,
        )
        if leaf.name in common:
            setattr(action, _COMMON, (list(common).index(leaf.name), common[leaf.name]))
        elif common:
            _hide(action)


class _Once(argparse.Action):
    """Stores a value, and refuses a second one: it would replace the first.

    Args:
        several: How to give several values; empty: as a list.
        options: Those of `argparse.Action`.
    """

    def __init__(self, *, several: str, **options: Any) -> None:
        super().__init__(**options)
        self._several = several

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        del parser
        if hasattr(namespace, self.dest):
            as_list = f"{option_string} {getattr(namespace, self.dest)},{values}"
            raise UserError(
                f"{option_string} is given more than once\n"
                f"allowed: one {'value' if self._several else 'list'}\nfix: {self._several or as_list}"
            )
        setattr(namespace, self.dest, values)


def hide_rare(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Let help show options, given by the names of their values, in `--help all` only."""
    for action in parser._actions:
        if action.dest in names:
            _hide(action)


def _hide(action: argparse.Action) -> None:
    setattr(action, _RARE, action.help)
    action.help = argparse.SUPPRESS


def show_rare(parser: argparse.ArgumentParser) -> bool:
    """Let help show the options that are hidden; return whether there are any."""
    rare = [action for action in parser._actions if hasattr(action, _RARE)]
    for action in rare:
        action.help = getattr(action, _RARE)
    return bool(rare)


def short_help(parser: argparse.ArgumentParser) -> str:
    """Return a line for each option that is not hidden; empty if none is hidden.

    A line has the option, what its help says up to the first comma, colon, period or parenthesis, and the default.
    Fields of a configuration are in the order of `common` of `add_options`.
    """
    if not any(hasattr(action, _RARE) for action in parser._actions):
        return ""
    actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    fields = iter(sorted((each for each in actions if hasattr(each, _COMMON)), key=lambda each: getattr(each, _COMMON)))
    shown = [next(fields) if hasattr(action, _COMMON) else action for action in actions]
    width = max(len(action.option_strings[0]) for action in shown)
    lines = [parser.format_usage().rstrip() + "  # every option, with all that it takes"]
    for action in shown:
        text = str(action.help).replace("%%", "%")
        said = re.split(r"[,:.;](?: |$)| [\[(]", text[:1].upper() + text[1:])[0]
        own = re.search(r"\[(?:[^]]*; )?default ([^];]+)]$|\(default: ([^)]+)\)", text)
        default = getattr(action, _COMMON, ("", ""))[1] or (own[1] or own[2] if own else "")
        lines.append(f"  {action.option_strings[0]:<{width}}  {said}{f' [{default}]' if default else ''}")
    return "\n".join(lines)


def given_options(args: argparse.Namespace, config: Any) -> dict[str, str]:
    """Return the options of `add_options` that were given, by dotted name."""
    return {leaf.name: getattr(args, leaf.name) for leaf in leaves(config) if hasattr(args, leaf.name)}


class FieldHelpFormatter(argparse.HelpFormatter):
    """Shows only the first spelling of an option with hyphens and underscores, and breaks no line at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        # A value such as `keep-attention` stays on one line, so that it can be copied.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

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
    # Below the top level, help shows the dotted name as in a file. At the top level it shows hyphens, as is usual.
    dotted = f"--{leaf.name}"
    hyphens = dotted.replace("_", "-")
    spellings = ([short] if short else []) + ([dotted, hyphens] if "." in leaf.name else [hyphens, dotted])
    return list(dict.fromkeys(spellings))


def _metavar(annotation: Any, spec: FieldSpec) -> str:
    if len(parts := union_parts(annotation)) > 1:
        return "|".join(_metavar(part, spec) for part in parts)
    if choices := choices_of(annotation, spec):
        return "|".join(map(str, choices))
    if typing.get_origin(annotation) is tuple:
        return "A=B,..." if spec.pairs else "A,B"
    if dataclasses.is_dataclass(annotation):
        return "none"
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}.get(annotation, "VALUE")


def _help(leaf: Leaf) -> str:
    number = optional_part(leaf.annotation)[0] in (int, float)
    unit = leaf.spec.unit or ("no unit" if number else "")
    notes = [unit, leaf.spec.suffixes, leaf.spec.bounds(), _default_text(leaf)]
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
        return f"default {','.join(map(str, value)) or 'none'}"
    if dataclasses.is_dataclass(value):
        return "default as below"
    return f"default {value}"
