"""``firn://`` by fsspec."""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Callable

import pytest

fsspec = pytest.importorskip("fsspec")

import firnfs.fsspec as firn_fsspec  # noqa: E402


@pytest.fixture()
def fs() -> "firn_fsspec.FirnFileSystem":
    # As the wheel's entry point does.
    fsspec.register_implementation("firn", firn_fsspec.FirnFileSystem, clobber=True)
    return fsspec.filesystem("firn")


def test_files_are_written_listed_and_read_by_url(make_mount: Callable[..., Path], fs: "firn_fsspec.FirnFileSystem") -> None:
    mount = make_mount(drain="demand")
    url = f"firn://{mount}/a/b"
    fs.makedirs(f"firn://{mount}/a")
    with fsspec.open(url, "wb") as file:
        file.write(b"x" * 100_000)
    assert (mount / "a" / "b").read_bytes() == b"x" * 100_000
    assert fs.ls(f"firn://{mount}/a", detail=False) == [f"{mount}/a/b"]
    assert fs.info(url)["size"] == 100_000 and fs.unstrip_protocol(f"{mount}/a/b") == url
    assert fs._strip_protocol([url]) == [f"{mount}/a/b"]
    assert fs.durability(url) == "held"
    fs.wait(url, "drained")
    assert fs.durability(url) == "drained"
    with fsspec.open(url, "rb") as file:
        assert file.read(3) == b"xxx"
    fs.mv(url, f"firn://{mount}/c")
    fs.rm(f"firn://{mount}/c")
    assert not fs.exists(f"firn://{mount}/c")


def test_files_of_an_fsspec_transaction_appear_at_its_end(
    make_mount: Callable[..., Path], fs: "firn_fsspec.FirnFileSystem"
) -> None:
    mount = make_mount()
    (mount / "old").write_bytes(b"old")
    with fs.transaction:
        for name in ("old", "new"):
            with fs.open(f"firn://{mount}/{name}", "wb") as file:
                file.write(b"new")
        assert (mount / "old").read_bytes() == b"old" and not (mount / "new").exists()
    assert [(mount / name).read_bytes() for name in ("old", "new")] == [b"new", b"new"]
    with pytest.raises(ZeroDivisionError):
        with fs.transaction:
            with fs.open(f"firn://{mount}/old", "wb") as file:
                file.write(b"bad")
            raise ZeroDivisionError
    assert (mount / "old").read_bytes() == b"new"
    assert sorted(name for name in os.listdir(mount) if name != ".firn") == ["new", "old"]


def test_checkpoints_are_made_and_found_by_url(make_mount: Callable[..., Path], fs: "firn_fsspec.FirnFileSystem") -> None:
    mount = make_mount(close="held")
    with fs.checkpoint(f"firn://{mount}", step=1) as new:
        (new / "model").write_bytes(b"1")
    found = fs.latest(f"firn://{mount}")
    assert found is not None and found.path == mount / "step_1"
    assert [one.step for one in fs.steps(f"firn://{mount}")] == [1]


def test_its_example_works(make_mount: Callable[..., Path]) -> None:
    words = {"directory": make_mount(), "FirnFileSystem": firn_fsspec.FirnFileSystem}
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder(recurse=False).find(firn_fsspec.FirnFileSystem, "FirnFileSystem", globs=words):
        runner.run(test)
    results = runner.summarize(verbose=False)
    assert results.attempted > 0 and results.failed == 0
