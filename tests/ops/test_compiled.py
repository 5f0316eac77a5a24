"""C functions compiled at their first use, where a machine's folders are not as they should be."""

import errno
import os

from bmburst_ops import fused


def _answer(tmp_path, temporary):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    return fused.compiled(source, (), temporary)


def test_without_a_folder_for_temporary_files_there_is_none(tmp_path):
    """On a disk that is only read, or full."""
    assert _answer(tmp_path, tmp_path / "not there") is None


def test_a_folder_that_cannot_be_removed_does_not_lose_the_library(tmp_path, monkeypatch):
    """NFS keeps a file that is open, which a loaded library is, in its folder under another name."""

    def rmdir(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert _answer(tmp_path, tmp_path).answer() == 42
