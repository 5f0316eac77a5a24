"""The code blocks of a Markdown file."""

import re
from dataclasses import dataclass
from pathlib import Path

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
        """The commands of a shell block that is not run, continued lines joined and comments left out."""
        joined = self.text.replace("\\\n", " ")
        return [part.strip() for line in joined.splitlines() for part in line.split("#")[0].split("&&") if part.strip()]


def read_blocks(path: Path) -> list[Block]:
    """Return the file's blocks in order."""
    text = path.read_text()
    return [
        Block(found["language"], found["text"], found["needs"], text.count("\n", 0, found.start("text")))
        for found in _BLOCK.finditer(text)
    ]
