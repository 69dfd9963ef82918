"""SIGKILL of a trainer right after its save returned: is the checkpoint there?

For each library this says so in a row. Of those of Firn it must be there; of the others it depends on how far the background came.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

import firnfs
import pytest

pytest.importorskip("torch")

STATE = """
import os, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
import firnfs

directory = Path(sys.argv[1])
state = {f"layer{number}": torch.full((4_000_000,), 1.0) for number in range(4)}
"""

# A loaded machine starts the process of torch_checkpointing slowly.
MANAGER = """
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig

process = CheckpointProcessConfig(subprocess_init_timeout_secs=600)
saver = AsyncCheckpointSaverConfig(process_config=process)
"""

# By name: what saves, and whether the checkpoint is there whatever comes.
SAVES = {
    "firnfs.checkpoint + torch.save": (
        'with firnfs.checkpoint(directory, step=1) as new:\n    torch.save(state, new / "model.pt")',
        True,
    ),
    "dcp.save, firnfs.torch.Writer": (
        'from firnfs.torch import Writer\ndcp.save(state, storage_writer=Writer(directory / "step_1"))',
        True,
    ),
    "dcp.async_save, firnfs.torch.Stager": (
        "from firnfs.torch import Stager\nstager = Stager()\n"
        'dcp.async_save(state, storage_writer=stager.writer(directory / "step_1"))',
        True,
    ),
    "firnfs.lightning.CheckpointIO": (
        'from firnfs.lightning import CheckpointIO\nCheckpointIO().save_checkpoint(state, directory / "step=1.ckpt")',
        True,
    ),
    "dcp.async_save": (
        'dcp.async_save(state, storage_writer=dcp.FileSystemWriter(directory / "step_1"))',
        False,
    ),
    "torch_checkpointing, own storage": (
        f"{MANAGER}manager = CheckpointManager(CheckpointManager.Config(save=saver))\n"
        'manager.save(str(directory / "step_1"), {"model": state})',
        False,
    ),
    "torch_checkpointing, firnfs": (
        f"{MANAGER}from firnfs.torch_checkpointing import StorageConfig\n"
        "manager = CheckpointManager(CheckpointManager.Config(storage_config=StorageConfig(), save=saver))\n"
        'manager.save(str(directory / "step_1"), {"model": state})',
        False,
    ),
    "Orbax, asynchronous": (
        "import numpy\nimport orbax.checkpoint as ocp\nmanager = ocp.CheckpointManager(directory)\n"
        'manager.save(1, args=ocp.args.StandardSave({"weights": numpy.full(16_000_000, 1.0)}))',
        False,
    ),
    "Orbax, asynchronous, firnfs": (
        "import numpy\nimport orbax.checkpoint as ocp\nfrom firnfs.orbax import TemporaryPath\n"
        "options = ocp.CheckpointManagerOptions(temporary_path_class=TemporaryPath)\n"
        "manager = ocp.CheckpointManager(directory, options=options)\n"
        'manager.save(1, args=ocp.args.StandardSave({"weights": numpy.full(16_000_000, 1.0)}))',
        False,
    ),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_checkpoint_whose_save_returned_is_there_after_a_kill(name: str, make_mount: Callable[..., Path]) -> None:
    save, must = SAVES[name]
    directory = make_mount(close="held", arena_size="256M")
    script = f"{STATE}\n{save}\nos.kill(os.getpid(), 9)\n"
    done = subprocess.run([sys.executable, "-c", script, str(directory)], stderr=subprocess.PIPE, check=False)
    if b"No module named" in done.stderr:
        pytest.skip(done.stderr.decode().splitlines()[-1])
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-1000:]
    # A process of its own may go on; it ends when it sees that its parent is gone.
    deadline = time.monotonic() + 20
    while not must and firnfs.latest(directory) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    found = firnfs.latest(directory)
    print(f"| {name} | {'there' if found is not None and found.step == 1 else 'lost'} |")
    assert not must or (found is not None and found.step == 1)
