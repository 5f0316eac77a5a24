"""Amounts as they are written, read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmburst.amounts import short, tokens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("65536", 65536), ("64K", 65536), ("64k", 65536), ("1M", 1048576), ("2m", 2097152)),
        *(("1000K", 1024000), ("3K", 3072), (" 64K", 65536), ("-1K", -1024)),
    ],
)
def test_tokens_are_read_as_tables_write_them(text, number):
    assert tokens(text) == number


@given(st.integers(0, 1 << 29))
def test_what_is_written_short_is_read_again(number):
    assert tokens(short(number)) == number
    assert tokens(f"{number}K") == tokens(str(number << 10))
    assert tokens(f"{number}M") == tokens(f"{number << 10}K")


@pytest.mark.parametrize(
    "text", ["", "K", "M", "64KB", "64KK", "64 MK", "1.5K", "1e6", "64G", "K64", "0x10", "9" * 5000]
)
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(ValueError, match="int"):
        tokens(text)
