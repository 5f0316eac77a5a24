"""Pages that go through the planner's answers show what it prints: the same words, and numbers within a tenth."""

import re

from tests.docs.blocks import read_blocks

EXAMPLES = ("plan.md", "memory.md")
NEAR = 0.1  # relative; predictions change a little when a rate is measured again
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def chunks(text: str) -> list[list[str]]:
    """Return the words of what a block shows without a gap: `...` stands for lines that are left out."""
    return [part.replace("\\\n", " ").split() for part in re.split(r"^\.\.\.$", text, flags=re.M)]


def is_same(shown: str, printed: str) -> bool:
    """Whether two words are equal but for numbers, which may differ by a tenth."""
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    values = ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)
    return all(abs(a - b) <= NEAR * max(abs(a), abs(b)) for a, b in values)


def place_of(words: list[str], printed: list[str], start: int) -> int | None:
    """Return where the words end in what is printed from `start` on."""
    for at in range(start, len(printed) - len(words) + 1):
        if all(is_same(*pair) for pair in zip(words, printed[at:], strict=False)):
            return at + len(words)
    return None


def outputs(name: str) -> list[str]:
    """Return what a page shows of the commands above it."""
    blocks = read_blocks(name)
    return [
        block.text for block in blocks if block.language == "text" and not block.text.startswith("python -m benchmarks")
    ]
