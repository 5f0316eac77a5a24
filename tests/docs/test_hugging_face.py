"""docs/hugging_face.md does what it says: its scripts run as they stand, and its tables are what the code does."""

import re

import pytest

from bmburst.integrations.transformers import SplitSequences
from bmburst.integrations.transformers_batch import BATCH_KEYS, READ
from tests.docs.blocks import text_of


@pytest.fixture
def printed(run_page) -> str:
    return run_page("hugging_face.md").printed


def test_the_scripts_train_and_check(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+) nats a token, \d+ tokens on 2 ranks", printed)]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5, losses
    assert "378 tokens; the first turn is what transformers generates" in printed
    assert "168 of 333 tokens a rank; the logits are the unsharded model's" in printed


def test_what_the_page_names_exists() -> None:
    text = text_of("hugging_face.md")
    arguments = {*SplitSequences.part.__annotations__} | {name for name, does in BATCH_KEYS.items() if does == READ}
    table = text[text.index("| argument |") :].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == arguments - {"input_ids", "others", "return"}
