"""Trainer of Hugging Face transformers: its checkpoints count as a whole or not at all.

    from firnfs.transformers import Callback

    trainer = Trainer(..., callbacks=[Callback()])
    trainer.train(resume_from_checkpoint=firnfs.latest(output_dir))

A Trainer writes ``checkpoint-N`` file by file, and removes old checkpoints before the new one counts. With this callback

* on a mount with ``drain=commit`` each checkpoint is a transaction, if all ranks are on one host,
* elsewhere a checkpoint has a mark until it is complete, and ``firnfs.latest`` passes over it,
* what a killed Trainer left is removed when the next one is made,
* old checkpoints (``save_total_limit``) are removed after the new one counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Optional

import torch.distributed
from transformers import TrainerCallback

from . import _checkpoint, _ffi

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["Callback"]

_NAME = re.compile(r"^checkpoint-(\d+)$")


class Callback(TrainerCallback):
    """Makes each checkpoint of a Trainer count when it is complete.

    With ``save_strategy="best"`` a Trainer tells nobody before it saves: there a mark comes with the end alone.

    Args:
        durable: Training goes on when the checkpoint survives the loss of power; with ``drain=commit`` always.

    Example:
        >>> from transformers import TrainerControl, TrainerState, TrainingArguments
        >>> args, state = TrainingArguments(output_dir=str(directory), use_cpu=True), TrainerState(global_step=5)
        >>> callback = Callback()
        >>> _ = callback.on_step_end(args, state, TrainerControl(should_save=True))
        >>> _ = (directory / "checkpoint-5" / "model").write_bytes(b"weights")
        >>> firnfs.latest(directory)
        >>> _ = callback.on_save(args, state, TrainerControl())
        >>> firnfs.latest(directory).step
        5
    """

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self._limit: Optional[int] = None
        self._path: Optional[Path] = None
        self._transaction: Optional[_ffi.Handle] = None

    def on_init_end(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Removes what a killed Trainer left."""
        output = _output(args)
        if not state.is_world_process_zero or not output.is_dir():
            return
        for path in _checkpoints(output):
            if _checkpoint.is_unfinished(path):
                shutil.rmtree(path, ignore_errors=True)

    def on_train_begin(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Takes over the removal of old checkpoints."""
        self._abort()
        self._limit, args.save_total_limit = args.save_total_limit, None

    def on_train_end(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Gives the limit back."""
        args.save_total_limit = self._limit
        self._abort()

    def on_step_end(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Begins a checkpoint."""
        if control.should_save:
            self._begin(args, state)

    def on_epoch_end(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Begins a checkpoint."""
        if control.should_save:
            self._begin(args, state)

    def on_save(self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **_: Any) -> None:
        """Lets the checkpoint count, then removes old ones."""
        path = _output(args) / f"checkpoint-{state.global_step}"
        if args.world_size > 1 and self._transaction is None and not _is_one_host(args):
            _checkpoint.bring_to_backing(path)
        _meet()
        if state.is_world_process_zero and path.is_dir():
            self._end(path)
            self._rotate(args, state, path)
        _meet()

    def _begin(self, args: "TrainingArguments", state: "TrainerState") -> None:
        path = _output(args) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and path != self._path:
            self._abort()
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another host would not see the directory of a transaction.
            if _is_one_host(args):
                # One of this name, which the Trainer overwrites, is marked below.
                with contextlib.suppress(FileExistsError):
                    self._transaction = _checkpoint.begin(path)
            if self._transaction is None:
                _checkpoint.mark_unfinished(path)
            self._path = path
        # No other rank makes the directory before.
        _meet()

    def _end(self, path: Path) -> None:
        transaction, self._transaction, self._path = self._transaction, None, None
        if transaction is not None:
            with transaction:
                transaction.commit(path)
            return
        if not _checkpoint.is_unfinished(path):
            _checkpoint.mark_unfinished(path)
        _checkpoint.finish(path, self.durable)

    def _abort(self) -> None:
        transaction, path = self._transaction, self._path
        self._transaction = self._path = None
        if transaction is not None and path is not None:
            with transaction:
                _checkpoint.abort(transaction, path)

    def _rotate(self, args: "TrainingArguments", state: "TrainerState", newest: Path) -> None:
        limit = self._limit if args.save_total_limit is None else args.save_total_limit
        if not limit or limit < 1:
            return
        best = state.best_model_checkpoint
        kept = {newest} | ({Path(best)} if best else set())
        old = [path for path in _checkpoints(newest.parent) if path not in kept]
        for path in old[: len(old) + len(kept) - max(limit, len(kept))]:
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(output: Path) -> List[Path]:
    """The one with the lowest step first."""
    found = [(int(match[1]), output / match[0]) for match in map(_NAME.match, os.listdir(output)) if match is not None]
    return [path for _, path in sorted(found)]


def _output(args: "TrainingArguments") -> Path:
    # A Trainer writes to "trainer_output" where nothing is given, and says so in its arguments.
    return Path(args.output_dir or "trainer_output")


def _is_one_host(args: "TrainingArguments") -> bool:
    return bool(args.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))


def _meet() -> None:
    """Waits for the other ranks, where there are some."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
