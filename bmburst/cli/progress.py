"""What `bmburst generate` and `bmburst eval` show on the terminal while ranks work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def note_length(length: int, most: int) -> None:
    """Print a note on standard error if a text of `length` tokens is longer than the model's limit `most`."""
    if length > most:
        print(
            f"note: up to {length:,} tokens, but the model was made for {most:,} (max_position_embeddings): "
            "answers beyond that may be useless",
            file=sys.stderr,
        )


@contextmanager
def progress_bar(title: str, total: int, unit: str, *, is_main: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on rank 0's terminal while the block runs, and yield the function that advances it."""
    from tqdm import tqdm

    with tqdm(
        desc=title, total=total, unit=unit, unit_scale=True, disable=None if is_main else True, leave=False
    ) as bar:
        yield bar.update
