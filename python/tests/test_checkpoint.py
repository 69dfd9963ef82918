"""Checkpoints count as a whole or not at all, whatever happens to their writers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, Callable, List, Optional

import firnfs
import pytest
from firnfs import _checkpoint

from conftest import in_child


def save(directory: Path, step: int, **options: Any) -> None:
    with firnfs.checkpoint(directory, step=step, **options) as new:
        fill(new, step)


def fill(new: Path, step: int) -> None:
    (new / "model").write_bytes(b"%d" % step * 100_000)
    (new / "part").mkdir()
    (new / "part" / "optimizer").write_bytes(b"%d" % step * 10)


def assert_whole(found: Optional[firnfs.Checkpoint], step: int) -> None:
    assert found is not None and found.step == step
    assert (found / "model").read_bytes() == b"%d" % step * 100_000
    assert (found / "part" / "optimizer").read_bytes() == b"%d" % step * 10
    assert found.files == 2 and found.size == len(b"%d" % step) * 100_010


def names(directory: Path) -> List[str]:
    return sorted(name for name in os.listdir(directory) if name != ".firn")


def test_a_checkpoint_counts_when_its_block_ends(directory: Path) -> None:
    assert firnfs.latest(directory) is None and firnfs.steps(directory / "missing") == []
    with firnfs.checkpoint(directory, step=7) as new:
        fill(new, 7)
        assert firnfs.latest(directory) is None and firnfs.steps(directory) == []
    assert_whole(firnfs.latest(directory), 7)
    assert names(directory) == ["step_7"]


def test_the_directory_above_is_made_and_a_path_names_a_checkpoint_itself(directory: Path) -> None:
    with firnfs.checkpoint(directory / "a" / "b" / "checkpoint-500") as new:
        fill(new, 500)
    assert_whole(firnfs.latest(directory / "a" / "b"), 500)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_everything_as_it_was(directory: Path, error: "type[BaseException]") -> None:
    save(directory, 1)
    with pytest.raises(error):
        with firnfs.checkpoint(directory, step=2) as new:
            fill(new, 2)
            raise error
    assert_whole(firnfs.latest(directory), 1)
    assert names(directory) == ["step_1"]
    save(directory, 2)
    assert_whole(firnfs.latest(directory), 2)


def test_steps_are_listed_from_the_oldest_to_the_newest(directory: Path) -> None:
    for step in (5, 20, 100):
        save(directory, step)
    assert [one.step for one in firnfs.steps(directory)] == [5, 20, 100]
    assert_whole(firnfs.latest(directory), 100)


def test_what_exists_is_not_replaced(directory: Path) -> None:
    save(directory, 1)
    with pytest.raises(FileExistsError) as refused:
        save(directory, 1)
    assert refused.value.filename == str(directory / "step_1")
    (directory / "step_2").mkdir()
    (directory / "step_3").symlink_to(directory / "nowhere")
    for step in (2, 3):
        with pytest.raises(FileExistsError):
            save(directory, step)
    assert_whole(firnfs.latest(directory), 1)


def test_a_durable_checkpoint_is_durable_when_its_block_ends(directory: Path) -> None:
    save(directory, 1, durable=True)
    assert_whole(firnfs.latest(directory, durable=True), 1)
    assert firnfs.durability(directory / "step_1") in ("durable", "drained")


def test_one_that_is_in_memory_is_passed_over_where_a_durable_one_is_asked_for(
    make_mount: Callable[..., Path],
) -> None:
    directory = make_mount(drain="demand")
    save(directory, 1, durable=True)
    save(directory, 2)
    assert firnfs.durability(directory / "step_2") == "held"
    assert_whole(firnfs.latest(directory), 2)
    assert_whole(firnfs.latest(directory, durable=True), 1)
    firnfs.wait(directory / "step_2", "drained")
    found = firnfs.latest(directory, durable=True)
    assert_whole(found, 2)
    assert found is not None and found.durability == "durable"


def test_a_trainer_that_is_killed_at_any_line_leaves_the_old_checkpoint_or_the_new_one(directory: Path) -> None:
    """Each line of the module that writes checkpoints, and each line of the block, is where one trainer dies."""
    save(directory, 1)
    line, ended = 0, False
    while not ended:
        line += 1
        assert line < 400, "no trainer came to its end"
        step = 1000 + line
        status = in_child(lambda: kill_at_line(line, lambda: save(directory, step)))
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
        else:
            assert status == 0, f"line {line}"
            ended = True
        found = firnfs.latest(directory)
        assert found is not None and found.step in (1, step), f"line {line}"
        assert_whole(found, found.step)
        if found.step == step and not ended:
            # Every trainer finds the same.
            shutil.rmtree(found)
    assert_whole(firnfs.latest(directory), step)
    assert line > 20
    # Nothing of the dead stays: firnd has aborted their transactions, or the last save removed the rest.
    wait_until(lambda: all(not name.startswith(".step") for name in names(directory)))
    wait_until(lambda: len(names(directory)) == len(firnfs.steps(directory)))


def test_a_restart_right_after_a_kill_saves_the_same_step(directory: Path) -> None:
    """What the dead process left may still be there when the next one asks for its name."""

    def die() -> None:
        with firnfs.checkpoint(directory, step=5) as new:
            fill(new, 4)
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(20):
        assert os.WIFSIGNALED(in_child(die))
        save(directory, 5)
        found = firnfs.latest(directory)
        assert_whole(found, 5)
        assert found is not None
        shutil.rmtree(found)


def kill_at_line(count: int, work: Callable[[], None], *files: str) -> None:
    """Does `work`, and ends this process at one of its lines in the module of checkpoints, in this one or in `files`."""
    left = count

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (_checkpoint.__file__, __file__, *files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def test_a_child_that_leaves_the_block_ends_nothing_of_its_parent(directory: Path) -> None:
    def leave() -> None:
        with firnfs.checkpoint(directory, step=1) as new:
            fill(new, 1)
            if os.fork() == 0:
                raise SystemExit
            os.wait()

    assert in_child(leave) == 0
    assert_whole(firnfs.latest(directory), 1)


def test_a_path_without_firn_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "_warned", False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save(tmp_path, 1)
        save(tmp_path, 2)
    assert [one.category for one in told] == [firnfs.FirnWarning]
    assert told[0].filename == __file__ and "firn mount" in str(told[0].message)


def test_in_a_transaction_of_the_whole_directory_a_checkpoint_is_a_part_of_it(make_mount: Callable[..., Path]) -> None:
    directory = make_mount(drain="commit")
    firn = firnfs.find_firn()
    assert os.spawnl(os.P_WAIT, firn, "firn", "begin", str(directory)) == 0
    save(directory, 1)
    assert names(directory) == ["step_1"] and firnfs.latest(directory) is None
    assert os.spawnl(os.P_WAIT, firn, "firn", "commit", str(directory)) == 0
    assert_whole(firnfs.latest(directory), 1)


def test_a_transaction_that_somebody_else_ends_does_not_count(make_mount: Callable[..., Path]) -> None:
    directory = make_mount(drain="commit")
    with pytest.raises(firnfs.FirnError) as ended:
        with firnfs.checkpoint(directory, step=1) as new:
            (new / "a").write_bytes(b"a")
            assert os.spawnl(os.P_WAIT, firnfs.find_firn(), "firn", "abort", str(new)) == 0
    assert ended.value.path == str(directory / "step_1")
    assert names(directory) == []


def test_what_was_lost_with_the_memory_of_a_host_is_no_checkpoint(
    make_mount: Callable[..., Path], tmp_path: Path
) -> None:
    mount, backing = make_mount(drain="demand", takeover="no"), tmp_path / "backing0"
    save(mount, 1, durable=True)
    save(mount, 2)
    save(mount, 3)
    # One file of it is drained, and the other one is not.
    firnfs.wait(mount / "step_3" / "part")
    before = set(Path(os.environ["FIRN_RUNTIME_DIR"]).glob("*.arena"))
    status = firnfs.status(mount)
    os.kill(status.pid, signal.SIGKILL)
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
    for arena in before:
        arena.unlink()
    # Names are in the backing at once.
    assert {"step_1", "step_2", "step_3"} <= set(os.listdir(backing))
    assert_whole(firnfs.latest(backing), 1)
    assert [one.step for one in firnfs.steps(backing)] == [1]


def test_where_firnd_cannot_be_asked_a_checkpoint_is_synced_and_renamed(
    make_mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container that has the mount, and not the directory of its sockets."""
    mount = make_mount(drain="demand")
    runtime = os.environ["FIRN_RUNTIME_DIR"]
    elsewhere = Path(runtime) / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    try:
        monkeypatch.setenv("FIRN_RUNTIME_DIR", str(elsewhere))
        save(mount, 1)
        with pytest.raises(firnfs.FirnError):
            firnfs.latest(mount)
    finally:
        monkeypatch.setenv("FIRN_RUNTIME_DIR", runtime)
        shutil.rmtree(elsewhere)
    assert_whole(firnfs.latest(mount), 1)
    assert firnfs.durability(mount / "step_1") == "durable"


# ---- by ranks --------------------------------------------------------------------------------------


def save_rank(directory: Path, step: int, rank: int, ranks: int = 3, **options: Any) -> None:
    with firnfs.checkpoint(directory, step=step, ranks=ranks, rank=rank, **options) as new:
        (new / f"rank_{rank}").write_bytes(b"%d" % rank * 1000)


@pytest.mark.parametrize("durable", [False, True])
def test_with_ranks_it_counts_when_the_last_one_has_left(
    directory: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setenv("FIRN_JOB", "one")
    for rank in (2, 0):
        save_rank(directory, 1, rank, durable=durable)
        assert firnfs.latest(directory) is None
    save_rank(directory, 1, 1, durable=durable)
    found = firnfs.latest(directory)
    assert found is not None and found.files == 3
    assert names(directory) == ["step_1"]
    assert [name for name in sorted(os.listdir(found)) if name[0] != "."] == ["rank_0", "rank_1", "rank_2"]


def test_ranks_at_once_make_one_checkpoint_each_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRN_JOB", "at once")
    for step in range(8):
        children = []
        for rank in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    save_rank(directory, step, rank)
                finally:
                    os._exit(0 if sys.exc_info()[0] is None else 1)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
        found = firnfs.latest(directory)
        assert found is not None and found.step == step and found.files == 3
    assert len(names(directory)) == 8


def test_a_rank_that_dies_or_fails_makes_it_not_count_until_it_has_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRN_JOB", "one")
    save_rank(directory, 1, 0)
    save_rank(directory, 1, 1)
    status = in_child(lambda: kill_at_line(30, lambda: save_rank(directory, 1, 2)))
    assert os.WIFSIGNALED(status)
    with pytest.raises(ZeroDivisionError):
        with firnfs.checkpoint(directory, step=1, ranks=3, rank=2):
            raise ZeroDivisionError
    assert firnfs.latest(directory) is None
    save_rank(directory, 1, 2)
    found = firnfs.latest(directory)
    assert found is not None and found.files == 3


def test_marks_of_an_earlier_job_do_not_count_and_are_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRN_JOB", "earlier")
    for rank in (0, 1):
        save_rank(directory, 1, rank)
    monkeypatch.setenv("FIRN_JOB", "later")
    save_rank(directory, 1, 2)
    assert firnfs.latest(directory) is None
    for rank in (0, 1):
        save_rank(directory, 1, rank)
    assert firnfs.latest(directory) is not None
    assert names(directory) == ["step_1"]


def test_a_reader_completes_what_the_last_ranks_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ranks of two hosts may both not see the other's mark."""
    monkeypatch.setenv("FIRN_JOB", "blind")
    monkeypatch.setattr(_checkpoint, "_complete", lambda staging, final, ranks: None)
    for rank in range(3):
        save_rank(directory, 1, rank)
    monkeypatch.undo()
    found = firnfs.latest(directory)
    assert found is not None and found.files == 3 and names(directory) == ["step_1"]


def test_ranks_must_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            save(tmp_path, 1, **options)

    refused("FIRN_JOB", ranks=2, rank=0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    refused("FIRN_JOB", ranks=2, rank=0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    refused("rank=", ranks=2)
    refused("not below", ranks=2, rank=2)
    refused("needs ranks", rank=0)
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("SLURM_PROCID", "1")
    one = _checkpoint._job()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert one != _checkpoint._job()
    with pytest.raises(ValueError):
        save(tmp_path, -1)


def test_what_another_put_in_the_place_of_a_checkpoint_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRN_JOB", "one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory = tmp_path / "ckpt"
    directory.mkdir()
    (directory / f".step_1.{_checkpoint._job()}.3.firnfs").symlink_to(elsewhere)
    with pytest.raises(firnfs.FirnError, match="another user"):
        save_rank(directory, 1, 0)
    assert os.listdir(elsewhere) == []
    firnfs.steps(directory)


RANK_OF_A_HOST = """
import sys
import firnfs

mount, rank = sys.argv[1], int(sys.argv[2])
for step in range(6):
    with firnfs.checkpoint(mount, step=step, ranks=2, rank=rank) as new:
        (new / f"rank_{rank}").write_bytes(b"%d" % step * 100_000)
"""


def test_ranks_on_two_hosts_make_one_checkpoint_each_time(tmp_path: Path) -> None:
    """Two firnd over one backing, each with memory of its own: the ranks meet in the backing alone."""
    (tmp_path / "backing").mkdir()
    hosts, started = {}, []
    try:
        for name in ("one", "two"):
            runtime = Path(os.environ["FIRN_RUNTIME_DIR"]) / f"host-{name}"
            runtime.mkdir(mode=0o700)
            point = tmp_path / name
            point.mkdir()
            hosts[point] = {**os.environ, "FIRN_RUNTIME_DIR": str(runtime), "FIRN_JOB": "two hosts"}
            # A list does not show what the kernel has cached, however long it may.
            options = ["--arena-size=32M", "--layout=log", "--close=held", "--attr-timeout=1h", f"--host={name}"]
            command = [firnfs.find_firn(), "mount", *options, str(tmp_path / "backing"), str(point)]
            subprocess.run(command, env=hosts[point], check=True)
        for rank, (point, environment) in enumerate(hosts.items()):
            command = [sys.executable, "-c", RANK_OF_A_HOST, str(point), str(rank)]
            started.append(subprocess.Popen(command, env=environment))
        assert [one.wait() for one in started] == [0, 0]
        for point, environment in hosts.items():
            # A reader of either host completes what the last ranks did not see of each other.
            count = "import firnfs, sys; print([(one.step, one.files, one.size) for one in firnfs.steps(sys.argv[1])])"
            command = [sys.executable, "-c", count, str(point)]
            expected = f"{[(step, 2, 200_000) for step in range(6)]}\n".encode()
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            assert done.stdout == expected
    finally:
        for one in started:
            one.kill()
            one.wait()
        for point, environment in hosts.items():
            done = subprocess.run([firnfs.find_firn(), "umount", str(point)], env=environment, check=False)
            if done.returncode != 0:
                subprocess.run([firnfs.find_firn(), "umount", "--force", str(point)], env=environment, check=False)
            shutil.rmtree(environment["FIRN_RUNTIME_DIR"])
    for step in range(6):
        for rank in range(2):
            assert (tmp_path / "backing" / f"step_{step}" / f"rank_{rank}").read_bytes() == b"%d" % step * 100_000
