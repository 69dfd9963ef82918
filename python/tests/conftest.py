"""Mounts for the tests, each gone when its test ends.

The tests see Firn by FIRN_BIN and FIRN_LIB, or by an installed wheel; arenas are in FIRN_RUNTIME_DIR. They need /dev/fuse.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import firnfs
import pytest

# How a directory of checkpoints can be: on a mount that holds files in memory, with transactions, or without Firn.
KINDS = {"held": {"close": "held"}, "eager": {}, "commit": {"drain": "commit"}, "shadow": {"drain": "commit", "mode": "shadow"}}


@pytest.fixture()
def make_mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A function that mounts with options, and gives the mount point."""
    points = []

    def make(**options: Any) -> Path:
        number = len(points)
        backing = tmp_path / f"backing{number}"
        backing.mkdir()
        point = tmp_path / f"mnt{number}"
        point.mkdir()
        points.append(point)
        options.setdefault("arena_size", "32M")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [firnfs.find_firn(), "mount", *flags, str(backing), str(point)]
        subprocess.run(command, check=True)
        return point

    yield make
    for point in points:
        done = subprocess.run([firnfs.find_firn(), "umount", str(point)], stderr=subprocess.PIPE, check=False)
        if done.returncode not in (0, 10):
            subprocess.run([firnfs.find_firn(), "umount", "--force", str(point)], check=False)
            raise AssertionError(done.stderr.decode())


@pytest.fixture(params=[*KINDS, "plain"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, make_mount: Callable[..., Path]) -> Iterator[Path]:
    """A directory for checkpoints, of each kind."""
    with warnings.catch_warnings():
        if request.param == "plain":
            warnings.simplefilter("ignore", firnfs.FirnWarning)
            path = tmp_path / "plain"
            path.mkdir()
        else:
            path = make_mount(**KINDS[request.param])
        yield path


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher but the test's own."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "FIRN_JOB")) or name == "RANK":
            monkeypatch.delenv(name)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a child of fork() and gives how it ended, as waitpid(2) does."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            work()
            status = 0
        os._exit(status)
    return os.waitpid(pid, 0)[1]
