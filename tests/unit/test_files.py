"""A file is written whole or not at all."""

import os
import stat

import pytest

from vllm_eesd.files import write_whole


def test_a_new_file_in_a_new_directory(tmp_path):
    write_whole(tmp_path / "a" / "b.txt", "é")
    assert (tmp_path / "a" / "b.txt").read_bytes() == "é".encode()
    assert stat.S_IMODE((tmp_path / "a" / "b.txt").stat().st_mode) == 0o644


def test_a_crash_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")

    def crash(handle):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_a_link_stays_and_what_is_no_file_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "text"
    write_whole(os.devnull, "text")
    assert not os.path.isfile(os.devnull)
