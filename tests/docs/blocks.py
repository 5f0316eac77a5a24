"""The documents of the repository, and the code blocks of a Markdown file."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# By name: the pages of docs/, and what the site shows of the rest of the repository.
PATHS = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
PATHS |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")}
# Sections that are read, run and tested as if each were a page, in a folder of its own.
ALONE = (
    *("hugging_face.md#accelerate-and-peft", "hugging_face.md#fsdp2", "hugging_face.md#grpo-and-rloo"),
    *("hugging_face.md#hybrids-with-trl", "hugging_face.md#trainer", "hugging_face.md#trl"),
    *("fine_tuning.md#preference-training", "inference.md#serving", "model_center.md#modelcenters-fine-tuning-script"),
)

_BLOCK = re.compile(r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))$", re.M)
_SECTION = re.compile(r"^## (?=\S)", re.M)


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


def text_of(name: str) -> str:
    """Return the text of a page without the sections in `ALONE`, or of a section: `page.md#title-in-lower-case`."""
    page, _, wanted = name.partition("#")
    parts = _SECTION.split(PATHS[page].read_text())
    sections = {f"{page}#{_anchor(part)}": f"## {part}" for part in parts[1:]}
    if wanted:
        return sections[name]
    return parts[0] + "".join(text for title, text in sections.items() if title not in ALONE)


def _anchor(section: str) -> str:
    title = section.partition("\n")[0].lower()
    return re.sub(r"[^\w -]", "", title).replace(" ", "-")


def read_blocks(name: str) -> list[Block]:
    """Return the blocks of what `text_of` returns, in order."""
    text = text_of(name)
    return [
        Block(found["language"], found["text"], found["needs"], text.count("\n", 0, found.start("text")))
        for found in _BLOCK.finditer(text)
    ]
