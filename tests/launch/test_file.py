import os
import stat

import pytest

from shardwise.cli.output import check_writable, write
from shardwise.launch.file import replace, replacing


def test_readers_see_the_old_content_until_the_new_is_whole(tmp_path):
    path = tmp_path / "f"
    replace(path, "old")
    with replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_bytes() == b"new"
    replace(path, "größer")
    assert path.read_text("utf-8") == "größer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_what_raises_leaves_the_old_content_and_nothing_else(tmp_path):
    replace(tmp_path / "f", b"old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "f") as file:
        raise ZeroDivisionError(file.write(b"new"))
    assert (tmp_path / "f").read_bytes() == b"old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path / "folder", "text")
    with pytest.raises(NotADirectoryError):
        replace(tmp_path / "f" / "g", "text")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["f", "folder"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    replace(tmp_path / "f", "text")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_only_a_durable_file_is_brought_to_the_disk_with_all_of_its_content(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    replace(tmp_path / "f", "text")
    assert synced == []
    replace(tmp_path / "f", "text", is_durable=True)
    assert synced == [4]


def test_a_result_is_written_to_a_pipe_or_through_a_link_and_does_not_replace_it(tmp_path):
    reader, writer = os.pipe()
    path = tmp_path / "link"
    path.symlink_to(f"/dev/fd/{writer}")
    check_writable(path)
    write(path, "text")
    assert path.is_symlink()
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    os.close(writer)


def test_what_is_found_writable_is_as_it_was(tmp_path):
    (tmp_path / "there").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("there", "not there", "dangling"):
        check_writable(tmp_path / name)
    assert (tmp_path / "there").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "there"]
