import errno
import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from titans_lm.checks import is_mistake
from titans_lm.train.checkpoint import save_checkpoint
from titans_lm.train.files import (
    JsonLines,
    claimed,
    new_folder,
    read_json,
    remove_folder,
    remove_unfinished,
    write_atomically,
    write_json,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, "old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "deep").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "deep" / "file")
    for text in ("old", "new"):  # of which the first has nothing there
        write_atomically(link, text)
        assert (tmp_path / "deep" / "file").read_text() == text
    assert link.is_symlink()
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    write_atomically(device, "gone")
    assert device.is_symlink()
    assert Path("/dev/null").is_char_device()


def test_the_file_that_standard_output_is_sent_to_keeps_what_others_write(tmp_path):
    kept = os.dup(1)
    with (tmp_path / "shown").open("wb") as shown:
        os.dup2(shown.fileno(), 1)
        try:
            os.write(1, b"before\n")
            write_atomically(Path("/dev/stdout"), "json\n")
            os.write(1, b"after\n")
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert (tmp_path / "shown").read_text() == "before\njson\nafter\n"


def test_a_file_may_come_in_pieces(tmp_path):
    path = tmp_path / "lines"
    write_atomically(path, (f"{i} é\n" for i in range(3)))
    assert path.read_text() == "0 é\n1 é\n2 é\n"

    def broken():
        yield "new\n"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_atomically(path, broken())
    assert path.read_text() == "0 é\n1 é\n2 é\n"
    assert names(tmp_path) == ["lines"]


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch, titans):
    """Python names none where writing fails, and the command line takes an error without a name for a bug."""

    def no_space(_):
        raise OSError(28, "No space left on device")

    def fill_folder():
        with new_folder(tmp_path / "folder"):
            no_space(0)

    def damaged(*_):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", damaged)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="No space left") as one:
            write_atomically(tmp_path / "file", "new")
    with pytest.raises(OSError, match="No space left") as other:
        fill_folder()
    with pytest.raises(OSError, match="No space left") as third:
        JsonLines(Path("/dev/full")).append({"step": 1})
    with pytest.raises(OSError, match="No space left") as device:
        write_json(Path("/dev/full"), {})
    with pytest.raises(OSError, match="unexpected pos") as last:
        save_checkpoint(tmp_path / "step-1", titans(), {})
    found = [error.value.filename for error in (one, other, third, device)]
    assert found == [str(tmp_path / "file"), str(tmp_path / "folder"), "/dev/full", "/dev/full"]
    assert all(is_mistake(error.value) for error in (one, other, third, device, last))
    assert names(tmp_path) == []


def test_json_has_no_number_that_json_lacks(tmp_path):
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5], "ü": "é"})
    assert (tmp_path / "x.json").read_text() == ('{\n  "a": null,\n  "b": [\n    null,\n    1.5\n  ],\n  "ü": "é"\n}\n')


def test_a_folder_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "folder"
    with new_folder(path) as unfinished:
        (unfinished / "a").write_text("1")
        assert not path.exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~current_umask()
    with new_folder(path) as unfinished:
        (unfinished / "b").write_text("2")
        assert names(path) == ["a"]
    assert names(path) == ["b"]
    assert names(tmp_path) == ["folder"]


def test_a_link_to_a_folder_stays_one(tmp_path):
    (tmp_path / "disk" / "folder").mkdir(parents=True)
    (tmp_path / "disk" / "folder" / "a").touch()
    (tmp_path / "folder").symlink_to(tmp_path / "disk" / "folder")
    with new_folder(tmp_path / "folder") as unfinished:
        (unfinished / "b").write_text("2")
    assert (tmp_path / "folder").is_symlink()
    assert names(tmp_path / "folder") == ["b"]
    assert names(tmp_path) == ["disk", "folder"]
    assert names(tmp_path / "disk") == ["folder"]


def test_a_folder_that_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "folder"
    with new_folder(path) as unfinished:
        (unfinished / "a").write_text("1")

    def fill(folder):
        (folder / "b").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_folder(path) as unfinished:
        fill(unfinished)
    assert names(path) == ["a"]
    assert names(tmp_path) == ["folder"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".unfinished-folder-x").mkdir()
    (tmp_path / ".unfinished-y").write_text("half")
    (tmp_path / "kept").write_text("whole")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["kept"]


def test_what_another_process_is_at_is_left(tmp_path):
    for name in (f"{os.getppid()}-y", f"{os.getpid()}-before", f"{2**22 + 1}-gone", f"{2**70}-gone"):
        (tmp_path / f".unfinished-{name}").write_text("half")
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [f".unfinished-{os.getppid()}-y"]
    with new_folder(tmp_path / "folder") as unfinished:
        assert unfinished.name.startswith(f".unfinished-{os.getpid()}-folder-")


def test_what_another_thread_is_at_is_left(tmp_path):
    """A thread has the same number of a process as one that died before it."""
    with new_folder(tmp_path / "folder") as unfinished:
        remove_unfinished(tmp_path)
        assert unfinished.is_dir()

    def parts():
        yield "whole"
        remove_unfinished(tmp_path)

    write_atomically(tmp_path / "file", parts())
    assert names(tmp_path) == ["file", "folder"]


def test_a_folder_belongs_to_one_process(tmp_path, other_owner):
    path = tmp_path / "in-use"
    with claimed(path), claimed(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert names(tmp_path) == []
    with other_owner(path), pytest.raises(ValueError, match=r"which process 7 on the moon has in use"), claimed(path):
        pass
    with claimed(path):
        pass


def test_a_lock_that_its_owner_took_away_meanwhile_is_made_again(tmp_path, monkeypatch):
    path, lock, opened = tmp_path / "in-use", fcntl.lockf, []

    def late(file, how):
        if not opened:
            path.unlink()
        opened.append(file)
        lock(file, how)

    monkeypatch.setattr("titans_lm.train.files.fcntl.lockf", late)
    with claimed(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert len(opened) == 2


def test_a_file_that_was_cut_off_is_named(tmp_path):
    (tmp_path / "settings.json").write_text('{"steps": ')
    with pytest.raises(ValueError, match=r"settings\.json, which is not JSON: .*bring it back from a copy") as caught:
        read_json(tmp_path / "settings.json")
    assert is_mistake(caught.value)


def test_a_folder_is_removed_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("1")
    remove_folder(tmp_path / "folder")
    remove_folder(tmp_path / "was never there")
    assert names(tmp_path) == []


def test_names_of_files_that_are_no_utf8_go_into_json_and_out(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    write_json(tmp_path / "a.json", {"name": name, "é": 1})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"name": name, "é": 1}
    write_atomically(tmp_path / "page.html", f"<p>{name}</p>")
    assert (tmp_path / "page.html").read_text() == "<p>caf?.txt</p>"


@pytest.mark.parametrize("told", [Exception("File too large (os error 27)"), SafetensorError("No space left")])
def test_a_full_disk_is_one_however_a_library_tells_it(tmp_path, told):
    def fill():
        with new_folder(tmp_path / "model"):
            raise told

    with pytest.raises(OSError, match=str(told).partition(" (")[0]) as caught:
        fill()
    assert caught.value.filename == str(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path, monkeypatch):
    """Lustre without `-o flock`, NFS without lockd."""

    said = [errno.ENOSYS, errno.ENOLCK, errno.EIO]

    def lockf(*_):
        number = said.pop(0)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    for _ in range(2):
        with claimed(tmp_path / "in-use"):
            assert (tmp_path / "in-use").is_file()
        assert names(tmp_path) == []
    with pytest.raises(OSError, match="Input/output error"), claimed(tmp_path / "in-use"):
        pass


def test_a_new_folder_has_its_name_before_the_old_one_goes(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    for text in ("old", "new"):
        with new_folder(tmp_path / "model") as unfinished:
            (unfinished / "file").write_text(text)
    assert (tmp_path / "model" / "file").read_text() == "new"
    monkeypatch.setattr("shutil.rmtree", stopped)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model") as unfinished:
        (unfinished / "file").write_text("newer")
    assert (tmp_path / "model" / "file").read_text() == "newer"
