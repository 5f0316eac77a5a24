"""The rows of axolotl's and LLaMA-Factory's data formats in docs/data.md are read, or refused, as it says."""

import json
import re
import shlex
from pathlib import Path

import pytest

from bmburst.config import from_dict
from bmburst.data import load_tokenizer
from bmburst.data.chat import RecordEncoder
from bmburst.data.records import hold_records, read_records
from bmburst.data.sources import find_sources
from bmburst.errors import UserError
from bmburst.record_format import RecordFormat
from tests import chat

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| (axolotl|LLaMA-Factory|TRL)", line)
]


def test_the_table_has_the_formats_of_all():
    assert len(ROWS) > 35
    assert all(len(row) == 4 for row in ROWS), [row for row in ROWS if len(row) != 4]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_read_or_refused_as_the_table_says(tmp_path, row):
    _, line, options, wanted = row
    path = tmp_path / "x.jsonl"
    path.write_text(line.strip("`") + "\n")
    json.loads(line.strip("`"))
    words = shlex.split(options.strip("`"))
    names = {word.removeprefix("--data."): value for word, value in zip(words[::2], words[1::2], strict=True)}
    form = from_dict(RecordFormat, names)
    encoder = RecordEncoder(load_tokenizer(str(chat.directory(tmp_path / "t"))), None, form.learned_roles)
    found = find_sources([path])
    if wanted.startswith("refused"):
        with pytest.raises(UserError) as error:
            list(read_records(found, form=form, check=encoder.encode))
        for word in re.findall(r"`([^`]+)`", wanted.split(";")[0]):
            assert word in str(error.value)
        return
    records = list(read_records(found, form=form))
    made = encoder.encode(records[0])
    assert made.answers.any()
    kind = "text" if not hold_records(found, form) else "pair" if records[0].is_pair else "record"
    assert wanted.split()[0].rstrip(",:") == kind
    tokenizer = encoder.tokenizer
    first = slice(made.documents[0][0] if made.documents else None)
    ids, answers = made.ids[first], made.answers[first]
    if learned := re.search(r"`([^`]+)`", wanted):
        assert learned[1] in tokenizer.decode_all(ids[answers])
