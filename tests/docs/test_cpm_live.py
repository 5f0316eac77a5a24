"""docs/cpm_live.md does what it says: its script trains, alike on one and two ranks, and its changed lines are code."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import pytest

from bmburst.integrations.cpm_live_batch import AntPart, BeePart, SplitSequences
from tests.docs.blocks import read_blocks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def printed(run_page):
    return run_page("cpm_live.md").printed


def test_the_script_prints_the_same_on_one_and_two_ranks(printed):
    one, two = (
        [
            (float(loss), float(norm))
            for loss, norm in re.findall(rf"^{n} ranks, step \d: (\S+) norm (\S+)$", printed, re.M)
        ]
        for n in (1, 2)
    )
    assert len(one) == 6 and one[-1][0] < one[0][0] - 0.1, printed
    assert two == [pytest.approx(numbers, abs=2e-4) for numbers in one]


DIFFS = [block for block in read_blocks("cpm_live.md") if block.language == "diff"]


@pytest.mark.parametrize("block", DIFFS, ids=lambda block: block.text.splitlines()[0][2:])
def test_lines_that_are_added_are_code_of_ours(block):
    """CPM-Live itself is not installed here: that its own lines are these was looked up."""
    added = [line[1:] for line in block.text.splitlines() if line.startswith("+")]
    assert added and all(line[:1] in "+- #" for line in block.text.splitlines())
    names = {field.name for field in fields(AntPart if "ant" in block.text.splitlines()[0] else BeePart)}
    text = "\n".join(added)
    assert set(re.findall(r"\bpart\.(\w+)", text)) <= names
    assert set(re.findall(r"\bsplit\.(\w+)", text)) <= set(vars(SplitSequences)) | {"mesh"}
    for line in added:
        source = dedent(line)
        found = re.match(r"from (bmburst\S*) import (\w+)", source)
        if found is not None:
            module = ast.parse((ROOT / f"{found[1].replace('.', '/')}.py").read_text())
            assigned = {node.targets[0].id: node.value for node in module.body if isinstance(node, ast.Assign)}
            assert found[2] in ast.literal_eval(assigned["__all__"])
        if not re.match(r"def |max_depth|mesh=|mesh\.|tokens,|args\.|DistributedDataset", source):
            ast.parse(source)
