"""The adapters with the real frameworks, on each kind of directory; each one that is not installed is skipped."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, List

import firnfs
import pytest
from conftest import in_child

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


def names(directory: Path) -> List[str]:
    return sorted(name for name in os.listdir(directory) if name != ".firn")


@pytest.mark.parametrize("name", ["torch", "torch_checkpointing", "transformers", "lightning", "orbax"])
def test_examples_of_the_adapters_work(name: str, tmp_path: Path, make_mount: Callable[..., Path]) -> None:
    pytest.importorskip("orbax.checkpoint" if name == "orbax" else name)
    module = importlib.import_module(f"firnfs.{name}")
    words = {**vars(module), "torch": torch, "dcp": dcp, "firnfs": firnfs}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    directory = make_mount(close="held")
    # In the order of the file: they share one directory.
    for public in sorted((getattr(module, name) for name in module.__all__), key=lambda one: inspect.getsourcelines(one)[1]):
        for test in finder.find(public, public.__name__, globs={**words, "directory": directory}):
            runner.run(test)
    done = runner.summarize(verbose=False)
    assert done.failed == 0 and done.attempted > 3


# ---- DCP -------------------------------------------------------------------------------------------


def state_of(value: float, count: int = 1000) -> Any:
    return {"weights": torch.full((count,), value), "epoch": int(value)}


def load_value(path: Any) -> float:
    from firnfs.torch import Reader

    state = state_of(0.0)
    dcp.load(state, storage_reader=Reader(path))
    assert bool((state["weights"] == state["weights"][0]).all())
    return float(state["weights"][0])


def test_a_distributed_checkpoint_is_read_by_its_name_or_as_the_newest(directory: Path) -> None:
    from firnfs.torch import Reader, Writer

    with pytest.raises(firnfs.FirnError):
        Reader(directory)
    for step in (1, 2):
        dcp.save(state_of(step), storage_writer=Writer(directory / f"step_{step}"))
    assert load_value(directory) == 2 and load_value(directory / "step_1") == 1
    reader = Reader(directory / "step_1")
    state = state_of(0.0)
    dcp.load(state, storage_reader=reader, checkpoint_id=str(directory))
    assert state["epoch"] == 2


def test_a_checkpoint_is_overwritten_in_one_step(directory: Path) -> None:
    from firnfs.torch import Writer

    for value in (1.0, 2.0, 3.0):
        dcp.save(state_of(value), storage_writer=Writer(directory / "step_1", overwrite=True))
        assert load_value(directory / "step_1") == value and names(directory) == ["step_1"]


def test_an_asynchronous_save_returns_when_the_tensors_may_change_and_ends_durable(directory: Path) -> None:
    from firnfs.torch import Stager

    stager = Stager()
    for step in range(1, 6):
        state = state_of(float(step), 2_000_000)
        writer = stager.writer(directory / f"step_{step}")
        future = dcp.async_save(state, storage_writer=writer)
        state["weights"].fill_(-1.0)
        future.result()
        found = firnfs.latest(directory, durable=True)
        assert found is not None and found.step == step
        state = state_of(0.0, 2_000_000)
        dcp.load(state, storage_reader=dcp.FileSystemReader(found))
        assert bool((state["weights"] == step).all())
    stager.close()


def test_an_asynchronous_save_that_fails_ends(directory: Path) -> None:
    from firnfs.torch import Stager

    (directory / "step_1").mkdir()
    stager = Stager()
    future = dcp.async_save(state_of(1.0), storage_writer=stager.writer(directory / "step_1"))
    with pytest.raises(BaseException, match="checkpoint of this name"):
        future.result()
    assert names(directory) == ["step_1"]


# ---- torch_checkpointing ---------------------------------------------------------------------------


def test_a_future_of_torch_checkpointing_is_true(directory: Path) -> None:
    manager_module = pytest.importorskip("torch_checkpointing")
    from firnfs.torch_checkpointing import StorageConfig
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig

    # A loaded machine starts its process slowly.
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=600)
    saver = AsyncCheckpointSaverConfig(process_config=process)
    config = manager_module.CheckpointManager.Config(storage_config=StorageConfig(), save=saver)
    manager = config.build()
    try:
        for step in (1, 2):
            future = manager.save(str(directory / f"step_{step}"), {"model": state_of(step), "step": step})
            future.result()
            found = firnfs.latest(directory, durable=True)
            assert found is not None and found.step == step
        loaded = manager.load(str(directory / "step_2"), into={"model": state_of(0.0), "step": 0})
        assert loaded["step"] == 2 and float(loaded["model"]["weights"][0]) == 2
    finally:
        manager.close()
    assert names(directory) == ["step_1", "step_2"]


def test_an_occupied_destination_is_refused_as_the_interface_says(directory: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    from firnfs.torch_checkpointing import StorageConfig

    storage = StorageConfig(durable=False).create_storage()
    for name in ("from", "to"):
        storage.mkdir(directory / name)
        storage.write(directory / name / "file", name.encode())
    with pytest.raises(OSError):
        storage.rename(directory / "from", directory / "to", is_directory=True)
    assert storage.read(directory / "to" / "file") == b"to"
    storage.rename(directory / "from" / "file", directory / "to" / "file")
    assert storage.read(directory / "to" / "file") == b"from"


# ---- transformers ----------------------------------------------------------------------------------


def trainer_in(directory: Path, steps: int, *callbacks: Any, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from firnfs.transformers import Callback

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
    args = transformers.TrainingArguments(
        output_dir=str(directory), max_steps=steps, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1000, per_device_train_batch_size=4, **options,
    )
    return transformers.Trainer(model=Tiny(), args=args, train_dataset=data, callbacks=[Callback(), *callbacks])


def test_a_trainer_saves_resumes_and_keeps_the_newest(directory: Path) -> None:
    trainer_in(directory, 4, save_total_limit=2).train()
    assert [one.step for one in firnfs.steps(directory)] == [2, 4]
    resumed = trainer_in(directory, 8, save_total_limit=2)
    resumed.train(resume_from_checkpoint=str(firnfs.latest(directory).path))
    assert [one.step for one in firnfs.steps(directory)] == [6, 8] and resumed.state.global_step == 8
    assert resumed.args.save_total_limit == 2


TRAINING = """
import os, sys
sys.path.insert(0, {here!r})
import firnfs
from pathlib import Path
from test_adapters import trainer_in
from transformers import TrainerCallback, trainer

calls = 0
def dying(real):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        return real(*args, **options)
    return call

class Dying(TrainerCallback):
    def on_save(self, args, state, control, **_):
        dying(lambda: None)()

if sys.argv[2] != "0":
    torch_save = trainer.torch.save
    trainer.torch.save = dying(torch_save)
    trainer.Trainer._save_rng_state = dying(trainer.Trainer._save_rng_state)
    trainer.TrainerState.save_to_json = dying(trainer.TrainerState.save_to_json)
    trainer.Trainer.save_model = dying(trainer.Trainer.save_model)
where = Path(sys.argv[1])
last = firnfs.latest(where)
made = trainer_in(where, 12, Dying(), save_total_limit=1)
made.train(resume_from_checkpoint=None if last is None else str(last.path))
"""


def test_a_trainer_that_is_killed_in_a_save_resumes_from_the_one_before(directory: Path) -> None:
    """With one checkpoint to keep, at each of its steps of a save, then to the end."""
    pytest.importorskip("transformers")
    seen = []
    for kill in (9, 10, 11, 12, 13, 0):
        command = [sys.executable, "-c", TRAINING.format(here=str(Path(__file__).parent)), str(directory), str(kill)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-2000:]
        deadline = time.monotonic() + 30
        while firnfs.latest(directory) is None:
            assert time.monotonic() < deadline
        found = firnfs.latest(directory)
        assert found is not None and (found / "trainer_state.json").stat().st_size > 0
        seen.append(found.step)
    assert seen == sorted(seen) and seen[-1] == 12
    assert [one.step for one in firnfs.steps(directory)] == [12]
    assert names(directory) == ["checkpoint-12"]


# ---- Lightning -------------------------------------------------------------------------------------


def lightning_trainer(directory: Path, steps: int) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")
    from firnfs.lightning import CheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=2, monitor="progress", mode="max")
    return lightning.Trainer(
        max_steps=steps, callbacks=[saver], plugins=[CheckpointIO()], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )


def test_lightning_saves_and_resumes(directory: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Tiny(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            self.log("progress", float(self.global_step))
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader([torch.ones(4) for _ in range(64)], batch_size=4)
    lightning_trainer(directory, 6).fit(Tiny(), data)
    found = firnfs.steps(directory)
    assert [one.step for one in found] == [4, 6] and len(names(directory)) == 2
    resumed = lightning_trainer(directory, 8)
    resumed.fit(Tiny(), data, ckpt_path=str(found[-1].path))
    assert resumed.global_step == 8 and firnfs.latest(directory).step == 8


def test_a_file_of_lightning_is_the_old_or_the_new_one_after_a_kill(directory: Path) -> None:
    pytest.importorskip("lightning")
    from firnfs.lightning import CheckpointIO

    path = directory / "epoch=1-step=2.ckpt"
    CheckpointIO().save_checkpoint({"weights": torch.zeros(1000)}, path)
    real = torch.save

    def dying(*args: Any) -> None:
        real(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = dying
    try:
        status = in_child(lambda: CheckpointIO().save_checkpoint({"weights": torch.ones(1000)}, path))
    finally:
        torch.save = real
    assert os.WIFSIGNALED(status)
    assert float(CheckpointIO().load_checkpoint(path)["weights"].sum()) == 0
    CheckpointIO(durable=True).save_checkpoint({"weights": torch.ones(1000)}, path)
    assert float(CheckpointIO().load_checkpoint(path)["weights"].sum()) == 1000
    assert names(directory) == [path.name]
    CheckpointIO().remove_checkpoint(path)
    CheckpointIO().remove_checkpoint(path)
    assert names(directory) == []


# ---- Orbax -----------------------------------------------------------------------------------------


def test_a_step_of_orbax_is_durable_when_its_save_has_ended(directory: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    import numpy
    from firnfs.orbax import TemporaryPath

    options = ocp.CheckpointManagerOptions(temporary_path_class=TemporaryPath, max_to_keep=2)
    manager = ocp.CheckpointManager(directory, options=options)
    try:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave({"weights": numpy.full(1000, step)}))
            manager.wait_until_finished()
            assert firnfs.durability(directory / str(step)) in ("durable", "drained")
        assert manager.latest_step() == 3 and sorted(manager.all_steps()) == [2, 3]
        restored = manager.restore(3, args=ocp.args.StandardRestore({"weights": numpy.zeros(1000, dtype=int)}))
        assert int(restored["weights"].sum()) == 3000
    finally:
        manager.close()
