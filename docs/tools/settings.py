"""The table of every setting of a training run, from the declarations that the command line reads too."""

import dataclasses
from html import escape
from itertools import groupby
from typing import Any

from bmburst.config import Leaf, leaves
from bmburst.config.fields import describe_allowed, number_text
from bmburst.train.config import TrainConfig

MARK = "<!-- settings -->"


def tables() -> str:
    """Return Markdown: a heading and a table for each part of the configuration."""
    found = list(leaves(TrainConfig))
    order = list(dict.fromkeys(leaf.section for leaf in found))
    parts = []
    for section, group in groupby(sorted(found, key=lambda leaf: order.index(leaf.section)), lambda leaf: leaf.section):
        rows = "\n".join(_row(leaf) for leaf in group)
        parts.append(
            f"### {section or 'Run'}\n\n| setting | default | what it decides |\n| --- | --- | --- |\n{rows}\n"
        )
    return "\n".join(parts)


def _row(leaf: Leaf) -> str:
    unit = f", in {leaf.spec.unit}" if leaf.spec.unit else ""
    takes = f"({describe_allowed(leaf.annotation, leaf.spec)}{unit})"
    cells = (f"`{leaf.name}`", _default(leaf), f"{_plain(leaf.spec.help)} {_plain(takes)}")
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return text of which no letter means anything in Markdown."""
    return escape(text, quote=False).replace("*", "&#42;").replace("|", "&#124;").replace("_", "&#95;")


def _default(leaf: Leaf) -> str:
    if leaf.spec.default_text:
        return _plain(leaf.spec.default_text)
    return f"`{_text(leaf.default)}`" if leaf.default is not dataclasses.MISSING else "must be given"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number_text(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
