"""Numbers with their sources, and the file that holds them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bmburst.errors import UserError
from bmburst.outputs import replacing
from bmburst.schedule.hardware import NUMBERS, hardware_from


class Fact(NamedTuple):
    """A number of a hardware file."""

    value: float
    unit: str
    kind: str
    source: str


def measured(value: float, unit: str, source: str) -> Fact:
    """Return a number that was measured just now."""
    return Fact(value, unit, "measured", source)


def complete(found: Mapping[str, Fact], base: Mapping[str, Any], name: str) -> dict[str, Fact]:
    """Return every number of a hardware file: those found, and the others as they are on a known machine.

    Args:
        found: What was measured.
        base: The known machine's file, as `bmburst.schedule.hardware.read_facts` returns it.
        name: The known machine's name.
    """
    taken = {
        key: Fact(float(base[key]["value"]), base[key]["unit"], "assumed", f"not measured here: as on {name}")
        for key in NUMBERS
    }
    return taken | dict(found)


def render(name: str, facts: Mapping[str, Fact], head: str) -> str:
    """Return a hardware file.

    Args:
        name: Of the machine.
        facts: Every number.
        head: What stands at its top, in one line.
    """
    lines = [f"# {head}", f"name = {_text(name)}"]
    for key in NUMBERS:
        fact = facts[key]
        lines += ["", f"[{key}]", f"value = {float(fact.value)!r}", f"unit = {_text(fact.unit)}"]
        lines += [f"kind = {_text(fact.kind)}", f"source = {_text(fact.source)}"]
    text = "\n".join(lines) + "\n"
    hardware_from({"name": name} | {key: {"value": fact.value} for key, fact in facts.items()}, "what was measured")
    return text


def write(text: str, path: Path) -> None:
    """Write a hardware file, all of it or nothing.

    Raises:
        UserError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which a file must not take the place of
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror}") from None


def _text(value: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in value)
    return '"' + plain.replace("\\", "\\\\").replace('"', "'") + '"'
