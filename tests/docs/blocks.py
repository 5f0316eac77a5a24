"""The documents of the repository, and the code blocks of a Markdown file."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# By name: the pages of docs/, and what the site shows of the rest of the repository.
PATHS = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
PATHS |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")}

_BLOCK = re.compile(r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and what the comment above it says it needs."""

    language: str
    text: str
    needs: str | None
    line: int

    @property
    def file(self) -> str | None:
        """The file that the first line names, if it does."""
        found = _NAME.match(self.text)
        return found[1] if found else None

    def commands(self) -> list[str]:
        """The commands of a shell block, continued lines joined and comments left out."""
        joined = self.text.replace("\\\n", " ")
        return [part.strip() for line in joined.splitlines() for part in line.split("#")[0].split("&&") if part.strip()]

    @property
    def ranks(self) -> int | None:
        """On how many ranks the block must run; None: on any number."""
        found = re.fullmatch(r"(\d+) ranks", self.needs or "")
        return int(found[1]) if found else None


def read_blocks(path: Path) -> list[Block]:
    """Return the file's blocks in order."""
    text = path.read_text()
    return [
        Block(found["language"], found["text"], found["needs"], text.count("\n", 0, found.start("text")))
        for found in _BLOCK.finditer(text)
    ]
