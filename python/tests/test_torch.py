"""Distributed checkpoints. Where PyTorch is older than 2.0, as Debian's, these are its classes under their earlier name."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, List

import firnfs
import pytest
from conftest import KINDS, in_child

torch = pytest.importorskip("torch")



def import_earlier() -> Any:
    """Torch 1.13 has defaults that Python 3.11 takes only of classes with a hash."""
    real = dataclasses.dataclass

    def hashable(cls: Any = None, **options: Any) -> Any:
        def make(made: Any) -> Any:
            has_own = {"__hash__", "__eq__"} & set(vars(made))
            return real(made, **options) if has_own else real(made, **{"unsafe_hash": True, **options})

        return make if cls is None else make(cls)

    import torch.distributed

    try:
        dataclasses.dataclass = hashable
        return importlib.import_module("torch.distributed._shard.checkpoint")
    finally:
        dataclasses.dataclass = real


try:
    import torch.distributed.checkpoint as dcp
except ImportError:
    dcp = import_earlier()
    sys.modules["torch.distributed.checkpoint"] = dcp

from firnfs.torch import Reader, Writer  # noqa: E402
from test_checkpoint import kill_at_line, names  # noqa: E402


def save(path: Path, value: float, **options: Any) -> None:
    state = {"weights": torch.full((1000,), value), "epoch": value}
    writer = Writer(path, **options)
    if hasattr(dcp, "save"):
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save_state_dict(state, writer, no_dist=True)


def load(path: "os.PathLike[str]") -> float:
    state = {"weights": torch.zeros(1000), "epoch": 0.0}
    load_into(state, Reader(path))
    assert bool((state["weights"] == state["weights"][0]).all())
    return float(state["weights"][0])


def load_into(state: Any, reader: Any) -> None:
    if hasattr(dcp, "load"):
        dcp.load(state, storage_reader=reader)
    else:
        dcp.load_state_dict(state, reader, no_dist=True)


@pytest.mark.parametrize("durable", [False, True])
def test_a_distributed_checkpoint_has_its_name_when_it_is_complete(directory: Path, durable: bool) -> None:
    save(directory / "deep" / "step_1", 1.5, durable=durable)
    found = firnfs.latest(directory / "deep", durable=durable)
    assert found is not None and found.step == 1 and load(found) == 1.5 and load(directory / "deep") == 1.5
    assert names(directory / "deep") == ["step_1"]
    # What DCP raises is no Exception.
    with pytest.raises(BaseException) as refused:
        save(directory / "deep" / "step_1", 2.5)
    assert "checkpoint of this name" in str(refused.value)
    assert load(found) == 1.5


def test_a_plan_that_fails_leaves_nothing_when_the_writer_is_used_again(make_mount: Callable[..., Path]) -> None:
    mount = make_mount(close="held")
    writer = Writer(mount / "step_1")
    plans = writer.prepare_global_plan([])
    assert plans == [] and len(names(mount)) == 1 and firnfs.latest(mount) is None
    assert writer.checkpoint_id == mount / "step_1"
    writer.prepare_global_plan([])
    assert len(names(mount)) == 1


def test_a_trainer_that_is_killed_at_any_line_leaves_the_old_checkpoint_or_the_new_one(
    make_mount: Callable[..., Path],
) -> None:
    mount = make_mount(close="held")
    save(mount / "step_1", 1.0)
    for line in range(1, 400):
        path = mount / f"step_{1000 + line}"
        status = in_child(lambda: kill_at_line(line, lambda: save(path, 2.0), sys.modules["firnfs.torch"].__file__))
        found = firnfs.latest(mount)
        assert found is not None and load(found) == (1.0 if found.step == 1 else 2.0), f"line {line}"
        if not os.WIFSIGNALED(status):
            assert status == 0 and found.path == path and line > 20
            break
        if found.path == path:
            shutil.rmtree(path)
    else:
        raise AssertionError("no trainer came to its end")
    assert names(mount) == ["step_1", path.name]


def rank_main(path: Path, rank: int, meeting: Path, fails: bool) -> None:
    """One rank of two: each has a tensor of its own, and rank 1 may fail while it writes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    state = {f"rank_{rank}": torch.full((1000,), float(rank)), "both": torch.ones(10)}
    writer = Writer(path)
    if fails and rank == 1:
        writer.write_data = None
    if hasattr(dcp, "save"):
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save_state_dict(state, writer)


def run_ranks(path: Path, meeting: Path, fails: bool) -> List[int]:
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                rank_main(path, rank, meeting, fails)
                status = 0
            os._exit(status)
        children.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in children]


def test_ranks_make_one_checkpoint_and_none_if_one_of_them_fails(make_mount: Callable[..., Path], tmp_path: Path) -> None:
    mount = make_mount(close="held")
    assert run_ranks(mount / "step_1", tmp_path / "first", fails=False) == [0, 0]
    found = firnfs.latest(mount)
    assert found is not None and found.step == 1 and names(mount) == ["step_1"]
    state = {"rank_0": torch.ones(1000), "both": torch.zeros(10)}
    if hasattr(dcp, "save"):
        # Before 2.0 only the coordinator writes tensors that are not sharded.
        state["rank_1"] = torch.zeros(1000)
    load_into(state, dcp.FileSystemReader(found))
    sums = {name: float(tensor.sum()) for name, tensor in state.items()}
    assert sums == {name: {"rank_0": 0, "rank_1": 1000, "both": 10}[name] for name in state}
    assert 0 not in run_ranks(mount / "step_2", tmp_path / "second", fails=True)
    found = firnfs.latest(mount)
    assert found is not None and found.step == 1
    save(mount / "step_3", 3.0)
    assert names(mount) == ["step_1", "step_3"]


def test_a_checkpoint_is_overwritten_in_one_step(directory: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save(directory / "step_1", value, overwrite=True)
        assert load(directory / "step_1") == value and names(directory) == ["step_1"]


OVERWRITING_RANK = """
import sys
from test_torch import Writer, dcp, torch

path, rank, meeting = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
for value in range(2, 1000):
    state = {f"rank_{number}": torch.full((50_000,), float(value)) for number in range(2)}
    writer = Writer(path, overwrite=True)
    dcp.save(state, storage_writer=writer) if hasattr(dcp, "save") else dcp.save_state_dict(state, writer)
    print(value, flush=True)
"""


@pytest.mark.parametrize("kind", ["held", "commit"])
def test_two_ranks_overwrite_a_checkpoint_and_one_is_killed(
    make_mount: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """The state is that of one save, before or after: SIGKILL at a time that differs from round to round."""
    mount = make_mount(**KINDS[kind])
    path = mount / "step_1"
    for number in range(int(os.environ.get("FIRN_CRASH_ROUNDS", "3"))):
        command = [sys.executable, "-c", OVERWRITING_RANK, str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ranks = [
            subprocess.Popen([*command, str(rank), str(tmp_path / f"meeting{number}")], stdout=subprocess.PIPE, env=environment)
            for rank in range(2)
        ]
        try:
            output = ranks[0].stdout
            assert output is not None and output.readline() and output.readline()
            # Through all of a save, which takes some tens of milliseconds.
            time.sleep(number % 25 * 0.004)
            ranks[number % 2].kill()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        state = {"rank_0": torch.zeros(50_000), "rank_1": torch.zeros(50_000)}
        load_into(state, dcp.FileSystemReader(path))
        values = {float(edge) for tensor in state.values() for edge in (tensor.min(), tensor.max())}
        assert len(values) == 1 and values.pop() >= 2, f"round {number}"
        found = firnfs.latest(mount)
        assert found is not None and found.step == 1
    # What the last round left beside goes with the next save of this host.
    save(mount / "step_2", 1.0)
    assert names(mount) == ["step_1", "step_2"]
