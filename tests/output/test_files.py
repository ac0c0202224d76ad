"""Files are complete or absent; links are followed, pipes and folders are not replaced."""

import gzip
import lzma
import os
import subprocess
import sys
import threading
import time

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write, locked, read_lines, refuse_same, split_lines


def test_an_error_keeps_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
        1 / 0  # noqa: B018
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]
    with atomic_write(path) as file:
        file.write("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    for text in ("first", "second"):
        with atomic_write(tmp_path / "link") as file:
            file.write(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "file").read_text() == text


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with atomic_write(tmp_path / "pipe", "wb") as file:
        file.write(b"text")
    reader.join()
    assert read == [b"text"] and (tmp_path / "pipe").is_fifo()


def test_compressed_text_is_read(tmp_path):
    for suffix, compress in ((".gz", gzip.compress), (".xz", lzma.compress), (".txt", bytes)):
        path = tmp_path / f"text{suffix}"
        path.write_bytes(compress(b"one\ntwo\n"))
        assert read_lines(path) == ["one", "two"]
        if suffix != ".txt":
            path.write_bytes(path.read_bytes()[:-4])
            with pytest.raises(InputError, match=f"^cannot read {path}: "):
                read_lines(path)


def test_one_file_under_two_names_is_refused(tmp_path):
    refuse_same({"--out": tmp_path / "a", "--json": tmp_path / "b", "DATA": None, "--path": None})
    with pytest.raises(InputError, match="--path and --out are both .*; give another file"):
        refuse_same({"--path": tmp_path / "a", "--json": tmp_path / "b", "--out": tmp_path / "c" / ".." / "a"})


def test_a_file_that_is_missing_inside_the_block_is_named(tmp_path):
    with (
        pytest.raises(InputError, match="No such file.*absent.*; .*out was not changed"),
        atomic_write(tmp_path / "out"),
    ):
        (tmp_path / "absent").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="Is a directory"), atomic_write(tmp_path):
        pass


def test_a_byte_order_mark_is_removed_and_does_not_shift_line_numbers():
    assert split_lines("\ufeffa\nb\n".encode(), "text") == ["a", "b"]
    with pytest.raises(InputError, match="text, line 2: not valid UTF-8"):
        split_lines(b"\xef\xbb\xbfa\n\xff\n", "text")


def test_a_lock_is_kept_by_the_child_of_a_killed_process(tmp_path):
    code = "import subprocess, sys; from fairseq_lot.output.files import locked\n"
    code += "with locked(sys.argv[1]) as lock: subprocess.run(['sh', '-c', sys.argv[2]], pass_fds=[lock])"
    child = f"touch {tmp_path}/begun; sleep 1; touch {tmp_path}/ended"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "lock", child]) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "ended").exists()
    with locked(tmp_path / "lock"):
        assert (tmp_path / "ended").exists()


def test_one_thread_at_a_time_holds_a_lock(tmp_path):
    inside = []

    def work():
        with locked(tmp_path / "lock"):
            inside.append(1)
            time.sleep(0.05)
            inside.append(-1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [1, -1] * 4
