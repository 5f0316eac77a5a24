"""docs/troubleshooting.md quotes messages as the code prints them: each is looked for among the code's own texts."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import read_blocks

ROOT = Path(__file__).parents[2]
PAGE = "troubleshooting.md"
PACKAGES = ("bmburst", "bmburst_ops", "model_center_ext")
LEAST, FEW = 16, 8  # letters that a text must have of its own: with fewer it would be found in anything
GAP = "\0"
_PREFIX = re.compile(r"^bmburst( [a-z]+)?: ")


def quoted() -> list[str]:
    """Return the lines of the page's blocks of messages, without the program's name."""
    blocks = [block for block in read_blocks(PAGE) if block.language == "text"]
    return [_PREFIX.sub("", line).strip() for block in blocks for line in block.text.splitlines()]


@cache
def code() -> tuple[tuple[str, tuple[ast.AST, ...]], ...]:
    """Return the path and the nodes of every file of the packages and of the benchmarks."""
    paths = [path for package in (*PACKAGES, "benchmarks") for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple((path.relative_to(ROOT).as_posix(), tuple(ast.walk(ast.parse(path.read_text())))) for path in paths)


@cache
def texts() -> tuple[tuple[int, str], ...]:
    """Return the lines of the packages' texts: how many letters are their own, and the text, with gaps for values."""
    found = set()
    for name, nodes in code():
        if name.split("/")[0] in PACKAGES:
            for node in nodes:
                if isinstance(node, ast.Constant | ast.JoinedStr):
                    found |= set(_lines(node))
    return tuple(sorted(found))


def _values(text: str, line: str) -> tuple[str, ...] | None:
    """Return what stands in the line where the text has gaps, or None where the line is not such a text."""
    if not all(part in line for part in text.split(GAP)):
        return None
    found = re.fullmatch(re.escape(text).replace(re.escape(GAP), "(.+)"), line)
    return None if found is None else found.groups()


def _lines(node: ast.Constant | ast.JoinedStr) -> Iterator[tuple[int, str]]:
    """Yield each line of a text, and how many letters are its own."""
    parts = [node] if isinstance(node, ast.Constant) else node.values
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts)
    for line in text.split("\n"):
        own = _PREFIX.sub("", line).strip()
        if len(own.replace(GAP, "")) >= FEW:
            yield len(own.replace(GAP, "")), own


def is_said(line: str) -> bool:
    """Whether the code has a text like it, or a short one around a value that it has a text for."""
    for own, text in texts():
        values = _values(text, line)
        if values is not None and (own >= LEAST or any(map(_is_text, values))):
            return True
    return False


def _is_text(value: str) -> bool:
    return any(own >= LEAST and _values(text, value) is not None for own, text in texts())


@pytest.mark.parametrize("line", quoted())
def test_a_quoted_message_is_one_of_the_code(line: str) -> None:
    assert is_said(line)


def test_a_message_that_nobody_prints_is_noticed() -> None:
    assert not is_said("kernel 'fa4' wants the package flash-attn-4")
    assert not is_said("the ranks of this group disagree")
    assert not is_said("rank 3 was slow")


def refusals() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each refusal that is written where it is raised, with a gap for each value."""
    for name, nodes in code():
        for node in nodes:
            if isinstance(node, ast.Call) and _name_of(node) in ("UserError", "KernelError") and node.args:
                text = node.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                words = (str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts)
                yield f"{name}:{node.lineno}", "".join(words)


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_what_is_allowed_is_followed_by_a_fix() -> None:
    found = [(place, text) for place, text in refusals() if re.search(r"^(allowed|known)", text, re.MULTILINE)]
    assert len(found) > 100
    lacking = [place for place, text in found if not re.search(r"(^|; )fix: |\0\Z", text, re.MULTILINE)]
    assert lacking == []
