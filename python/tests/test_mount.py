"""State, waits, held bytes, mounts and runs; and that errors keep their number and path."""

from __future__ import annotations

import doctest
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable

import firnfs
import firnfs._find
import pytest
from firnfs import _ffi

MIB = 1 << 20


def test_a_file_is_held_then_drained_then_durable(make_mount: Callable[..., Path]) -> None:
    mount = make_mount(drain="demand")
    before = firnfs.room(mount).memory
    (mount / "file").write_bytes(b"x" * 4 * MIB)
    assert firnfs.durability(mount / "file") == "held"
    assert before - firnfs.room(mount).memory >= 4 * MIB
    state = firnfs.status(mount)
    assert state.held_bytes == 4 * MIB and state.held_files == 1
    assert "4.0 MiB in 1 files" in str(state) and "<table>" in state._repr_html_()
    firnfs.wait(mount / "file", "drained", progress=True)
    assert firnfs.durability(mount) == "drained"
    firnfs.wait(mount)
    assert firnfs.durability(mount / "file") == "durable"
    assert "everything is drained" in str(firnfs.status(mount))


def test_a_name_in_a_table_of_a_notebook_is_no_html(make_mount: Callable[..., Path]) -> None:
    directory = make_mount() / "<b>"
    directory.mkdir()
    assert "&lt;b&gt;" in firnfs.status(directory)._repr_html_()


def test_a_wait_gives_up_in_time_and_the_drain_goes_on(make_mount: Callable[..., Path]) -> None:
    mount = make_mount(drain="demand")
    (mount / "file").write_bytes(b"x" * 16 * MIB)
    with pytest.raises(TimeoutError) as late:
        firnfs.wait(mount / "file", timeout=0)
    assert late.value.errno == errno.ETIMEDOUT and late.value.filename == str(mount / "file")
    firnfs.wait(mount / "file", timeout=60)


def test_errors_keep_number_and_path(make_mount: Callable[..., Path], tmp_path: Path) -> None:
    mount = make_mount()
    with pytest.raises(firnfs.FirnError) as missing:
        firnfs.durability(mount / "missing")
    assert missing.value.errno == errno.ENOENT and missing.value.path == str(mount / "missing")
    with pytest.raises(firnfs.FirnError) as empty:
        firnfs.durability(mount)
    assert empty.value.errno == errno.ENODATA
    with pytest.raises(firnfs.NotOnFirn) as none:
        firnfs.status(tmp_path)
    assert isinstance(none.value, OSError) and none.value.errno == errno.ENODEV
    with pytest.raises(firnfs.NotOnFirn):
        firnfs.chunks(tmp_path / "file")
    with pytest.raises(ValueError, match="durable"):
        firnfs.wait(mount, "soon")
    with pytest.raises(firnfs.FirnError) as partner:
        firnfs.wait(mount, "partnered")
    assert partner.value.errno == errno.EOPNOTSUPP


def test_without_firn_files_count_as_drained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert firnfs.durability(tmp_path) == "drained"
    firnfs.wait(tmp_path)
    firnfs.wait(tmp_path, "drained")
    assert firnfs.room(tmp_path).memory == 0 and firnfs.room(tmp_path).backing > 0
    with pytest.raises(firnfs.NotOnFirn):
        firnfs.wait(tmp_path, "partnered")
    with pytest.raises(FileNotFoundError):
        firnfs.durability(tmp_path / "missing")


def test_the_memory_of_a_dead_mount_is_no_old_checkpoint(tmp_path: Path) -> None:
    backing, point = tmp_path / "backing", tmp_path / "mnt"
    backing.mkdir()
    point.mkdir()
    options = "arena-size=16M,drain=demand,takeover=no"
    mount = [firnfs.find_firn(), "mount", "-o", options, str(backing), str(point)]
    subprocess.run(mount, check=True)
    try:
        with firnfs.checkpoint(point, step=1) as new:
            (new / "model").write_bytes(b"1")
        os.kill(firnfs.status(point).pid, signal.SIGKILL)
        for place in (point, backing):
            with pytest.raises(OSError) as dead:
                firnfs.latest(place)
            assert dead.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        subprocess.run(mount, check=True)
        found = firnfs.latest(point)
        assert found is not None and (found / "model").read_bytes() == b"1"
    finally:
        subprocess.run([firnfs.find_firn(), "umount", str(point)], check=True)
    found = firnfs.latest(backing)
    assert found is not None and found.step == 1


def test_chunks_are_the_bytes_of_a_file_in_its_order(make_mount: Callable[..., Path]) -> None:
    mount = make_mount(drain="demand")
    path = mount / "file"
    data = os.urandom(3 * MIB + 17)
    with open(path, "wb") as file:
        file.write(data)
        file.seek(8 * MIB)
        file.write(b"end")
    expected = data + bytes(8 * MIB - len(data)) + b"end"
    with firnfs.chunks(path) as views:
        assert all(view.readonly for view in views)
        assert b"".join(views) == expected and views.nbytes == len(expected)
        assert not views.changed()
        path.write_bytes(b"other")
        assert b"".join(views) == expected and views.changed()
        first = next(iter(views))
    with pytest.raises(ValueError):
        first[0]
    firnfs.wait(path)
    subprocess.run([firnfs.find_firn(), "evict", str(path)], check=True, stdout=subprocess.DEVNULL)
    with firnfs.chunks(path) as views:
        assert b"".join(views) == b"other"


def test_chunks_are_held_as_long_as_an_array_uses_them(make_mount: Callable[..., Path]) -> None:
    mount = make_mount(drain="demand")
    (mount / "file").write_bytes(b"x" * MIB)
    views = firnfs.chunks(mount / "file")
    part = next(iter(views))[:3]
    with pytest.raises(BufferError):
        views.close()
    (mount / "file").write_bytes(b"y" * MIB)
    assert bytes(part) == b"xxx"
    del part
    views.close()
    views.close()


def test_a_mount_ends_with_its_block(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with pytest.raises(ZeroDivisionError):
        with firnfs.mount(backing, tmp_path / "mnt", arena_size="16M", close="held") as point:
            (point / "file").write_text("kept")
            raise ZeroDivisionError
    assert not os.path.ismount(tmp_path / "mnt") and (backing / "file").read_text() == "kept"


def test_a_mount_that_cannot_be_says_why(tmp_path: Path, make_mount: Callable[..., Path]) -> None:
    mount = make_mount()
    with pytest.raises(firnfs.FirnError, match="drain") as bad:
        with firnfs.mount(tmp_path, tmp_path / "x", drain="never"):
            pass
    assert bad.value.errno == errno.EINVAL and bad.value.path == str(tmp_path / "x")
    with pytest.raises(firnfs.FirnError) as busy:
        with firnfs.mount(tmp_path / "backing0", tmp_path / "y"):
            pass
    assert busy.value.errno == errno.EBUSY and str(mount) in str(busy.value)


def test_a_program_runs_with_its_directory_on_firn(tmp_path: Path) -> None:
    write = 'mkdir "$FIRN_PREFIX/step_1" && echo kept >"$FIRN_PREFIX/step_1/x"'
    options = {"backing": tmp_path / "results", "memory": "32M", "quiet": True}
    assert firnfs.run(["sh", "-c", write], **options).returncode == 0
    assert (tmp_path / "results" / "step_1" / "x").read_text() == "kept\n"
    assert firnfs.run(["sh", "-c", "exit 7"], check=False, **options).returncode == 7
    with pytest.raises(subprocess.CalledProcessError):
        firnfs.run(["sh", "-c", "exit 7"], **options)


def test_without_fuse_a_python_program_saves_and_resumes_by_the_preload_library(tmp_path: Path) -> None:
    script = (
        "import firnfs, os, sys\n"
        "here = os.environ['FIRN_PREFIX']\n"
        "last = firnfs.latest(here)\n"
        "step = last.step + 1 if last else 1\n"
        "assert last is None or (last / 'model').read_bytes() == b'%d' % last.step\n"
        "with firnfs.checkpoint(here, step=step) as new:\n"
        "    (new / 'model').write_bytes(b'%d' % step)\n"
        "assert firnfs.latest(here).step == step\n"
        "assert [one.step for one in firnfs.steps(here)] == list(range(1, step + 1))\n"
    )
    for _ in range(3):
        firnfs.run(
            [sys.executable, "-c", script],
            backing=tmp_path / "results",
            prefix=tmp_path / "ckpt",
            memory="32M",
            frontend="preload",
            quiet=True,
        )
    found = firnfs.steps(tmp_path / "results")
    assert [one.step for one in found] == [1, 2, 3] and (found[2] / "model").read_bytes() == b"3"


def test_examples_of_the_documentation_work(make_mount: Callable[..., Path], tmp_path: Path) -> None:
    """Each example of a public function, in the order in which they are read: they share one directory."""
    directory = make_mount(close="held")
    with firnfs.checkpoint(directory, step=1, durable=True) as new:
        (new / "model").write_bytes(b"1")
    held_file = make_mount(drain="demand") / "file"
    held_file.write_bytes(b"x" * 4 * MIB)
    results = tmp_path / "results"
    results.mkdir()
    words = {**{name: getattr(firnfs, name) for name in firnfs.__all__}}
    words.update(directory=directory, held_file=held_file, results=results, mount_point=tmp_path / "here")
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    functions = [name for name in firnfs.__all__ if not name[0].isupper()]
    first = ["checkpoint", "steps"]
    for name in first + [name for name in functions if name not in first]:
        found = finder.find(getattr(firnfs, name), name, globs=dict(words))
        assert sum(len(test.examples) for test in found) > 0, f"{name} has no example"
        for test in found:
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_importing_firnfs_imports_no_framework() -> None:
    code = "import firnfs, sys; print([n for n in ('torch', 'numpy', 'fsspec', 'tqdm', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"[]\n"


def test_the_program_and_the_libraries_are_found_and_missing_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "firn"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("FIRN_BIN", str(program))
    with pytest.raises(firnfs.FirnError, match="FIRN_BIN") as not_executable:
        firnfs.find_firn()
    assert not_executable.value.path == str(program)
    program.chmod(0o755)
    assert firnfs.find_firn() == str(program)
    # The tests run without an installed package: what is beside the program counts.
    with pytest.raises(firnfs.FirnError, match="libfirn_preload.so"):
        firnfs.preload_path()
    library = tmp_path / "lib" / "libfirn_preload.so"
    library.parent.mkdir()
    library.touch()
    assert firnfs.preload_path() == str(library)
    monkeypatch.setenv("FIRN_LIB", str(library))
    monkeypatch.setattr(_ffi, "_loaded", None)
    with pytest.raises(firnfs.FirnError, match="install firnfs again") as broken:
        firnfs.latest(tmp_path)
    assert broken.value.path == str(library)
    monkeypatch.delenv("FIRN_BIN")
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(firnfs._find, "_script_directories", lambda: iter(()))
    assert firnfs.find_firn() == str(program)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(firnfs.FirnError, match="pip install firnfs"):
        firnfs.find_firn()
