"""Dotted names of the packages that pages put into backticks exist: `bmburst.loss.global_mean` is a name of a file."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in FILES), *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
_NAME = re.compile(r"`((?:bmburst|bmburst_ops|model_center_ext)(?:\.\w+)+)[^`]*`")


def named(path: Path) -> set[str]:
    """Return the dotted names of a page, blocks left out: they are run or checked."""
    return set(_NAME.findall(_BLOCK.sub("", path.read_text())))


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what one defines or hands on; members of that are not looked at."""
    folder, parts = ROOT, name.split(".")
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    file = folder / f"{parts[0]}.py" if parts and (folder / f"{parts[0]}.py").is_file() else folder / "__init__.py"
    inside = parts if file.name == "__init__.py" else parts[1:]
    return not inside or inside[0] in _names(file)


@cache
def _names(file: Path) -> frozenset[str]:
    """Return what a file defines, imports or lists as text: public names are listed where they are imported late."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_the_text_exist(path: Path) -> None:
    assert sorted(name for name in named(path) if not exists(name)) == []


def test_a_name_that_is_nowhere_is_noticed() -> None:
    assert exists("bmburst.loss.global_mean") and exists("bmburst.Mesh") and exists("bmburst.blocks.model.Llama")
    for name in ("bmburst.gone", "bmburst.loss.gone", "bmburst.blocks.Llama", "bmburst.blocks.gone.Llama"):
        assert not exists(name), name
    assert sum(len(named(path)) for path in PAGES) > 40
