"""Each block of docs/PYTHON.md, and the one of README.md, as it stands: only its directories are those of the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, List

import firnfs
import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What the block has to be given, by a word in it.
GIVEN = {
    "torch.save(": "import safetensors.torch, torch\nmodel = torch.nn.Linear(2, 1)\ntensors = {'a': torch.ones(2)}\nstep = 1\n",
    "save(new / f": "rank, world_size, step = 0, 1, 3\ndef save(path): path.write_bytes(b'x')\nos.environ.update(FIRN_JOB='page', RANK='0')\n",
    "state_dict": "import torch\nstate_dict = {'weights': torch.ones(3)}\n",
    "from firnfs.torch import": "warnings.simplefilter('ignore')\n",
    "firnfs.transformers": (
        "import torch\nfrom transformers import Trainer, TrainingArguments\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x, labels):\n"
        "        return {'loss': ((self.layer(x) - labels) ** 2).mean()}\n"
        "model, data = Model(), [{'x': torch.ones(4), 'labels': torch.ones(1)}] * 16\n"
        "args = TrainingArguments(output_dir='/ckpt', max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)\n"
    ),
    "firnfs.lightning": (
        "import torch\nfrom lightning.pytorch import LightningModule, Trainer\n"
        "from lightning.pytorch.callbacks import ModelCheckpoint\n"
        "class Model(LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, batch, index):\n"
        "        return self.layer(batch).mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "model, data = Model(), torch.utils.data.DataLoader([torch.ones(4)] * 16)\n"
        "saver = ModelCheckpoint(dirpath='/ckpt', every_n_train_steps=2)\n"
    ),
    "ocp.": "import numpy\narrays = {'weights': numpy.ones(3)}\n",
    "fsspec": (
        "import fsspec, firnfs.fsspec\nfsspec.register_implementation('firn', firnfs.fsspec.FirnFileSystem, clobber=True)\n"
        "table = b'table'\n"
    ),
    "step_100": "with firnfs.checkpoint('/ckpt', step=100) as new: (new / 'model.pt').write_bytes(b'x' * 100000)\n",
    "socket": "class socket:\n    sendall = staticmethod(lambda view: bytes(view))\n",
    "train.py": "open('train.py', 'w').write('import os; open(os.environ[\"FIRN_PREFIX\"] + \"/x\", \"w\").close()')\n",
    "weights)": "weights = b'x'\n",
}
# Blocks that make step_100 themselves.
MAKES_STEP_100 = ("Writer(", "StorageConfig")


def blocks(page: str) -> List[str]:
    return BLOCK.findall((ROOT / page).read_text())


def given(block: str) -> str:
    words = {word: text for word, text in GIVEN.items() if word in block}
    if any(word in block for word in MAKES_STEP_100):
        words.pop("step_100", None)
    return "import os, warnings\nimport firnfs\n" + "".join(words.values())


PAGE = [block for block in blocks("docs/PYTHON.md") if "restore(last" not in block]


@pytest.mark.parametrize("block", [*PAGE, *blocks("README.md")], ids=lambda block: block.strip().splitlines()[-1][:40])
def test_a_block_of_the_page_runs(
    block: str, make_mount: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = make_mount(close="held")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    text = given(block) + block.replace("8G", "32M")
    for name, path in (("/ckpt", mount), ("/tmp/ckpt", tmp_path / "other"), ("/scratch/run42", tmp_path / "scratch")):
        # Names as they stand in the text, so /tmp/ckpt is not that of /ckpt.
        text = re.sub(rf"(?<![\w]){name}(?=[/\"'])", str(path), text)
    if '"ckpt"' in text:
        text = text.replace('"ckpt"', f'"{mount}"')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", text], stderr=subprocess.PIPE, env=environment, text=True, check=False)
    missing = re.search(r"No module named '(?!firnfs)|cannot import name|No module named 'torch.distributed.checkpoint", done.stderr)
    if missing:
        # The campaign has all frameworks.
        assert "ALL_FRAMEWORKS" not in os.environ, done.stderr
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, f"{text}\n{done.stderr}"


FIVE_LINES = """
import os

def train(step):
    if step == {ends}:
        raise SystemExit(0)

def restore(path):
    text = path.read_text()
    assert len(text) == 100_000 and text == text[:5] * 20_000
    return int(text[:5])

def save(path):
    half = f"{{step:05}}" * 10_000
    with open(path, "w") as file:
        file.write(half)
        file.flush()
        if step == {kills}:
            os.kill(os.getpid(), 9)
        file.write(half)
"""


def test_the_five_lines_resume_after_a_kill_in_the_middle_of_a_save(directory: Path) -> None:
    (lines,) = [block for block in blocks("docs/PYTHON.md") if "restore(last" in block]
    lines = lines.replace('"/ckpt"', repr(str(directory)))

    def run(kills: int, ends: int) -> int:
        script = FIVE_LINES.format(kills=kills, ends=ends) + lines
        with warnings.catch_warnings():
            return subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False).returncode

    for kills in (0, 3, 4):
        assert run(kills, 100) == -signal.SIGKILL
        found = firnfs.latest(directory)
        assert (None if found is None else found.step) == (kills - 1 if kills else None)
    assert run(-1, 6) == 0
    assert [one.step for one in firnfs.steps(directory)] == [0, 1, 2, 3, 4, 5]
