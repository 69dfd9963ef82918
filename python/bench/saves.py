#!/usr/bin/env python3
"""Measures saves of a state by each library, on Firn and beside it, in one run.

    saves.py --work DIR [--gib 1.5] [--rounds 9] [--only NAME]…

Makes an ext4 on a loop device below --work, and mounts Firn over it: root is needed. Each round does each save once, in an
order that differs from round to round. Between two saves all is drained, synced and removed.

Printed for each save, as the median with the smallest and the largest:

* blocked: seconds until the training may go on,
* durable: seconds until the checkpoint survives the loss of power,
* steps: training steps a second while the save goes on, beside those of the same round without a save,
* memory: how much more anonymous and shared memory the processes of the training have at most, in parts of the state.

Then the ratios that docs/PYTHON.md has. Every ratio is one of figures of the same round; the machine may be loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import firnfs
import torch
import torch.distributed.checkpoint as dcp

MIB = 1 << 20


@dataclass
class Places:
    ext4: Path
    tmpfs: Path
    firn: Path


@dataclass
class Figure:
    blocked_s: float
    durable_s: float
    step_ratio: float
    memory_ratio: float


@dataclass
class Save:
    """A way to save: `begin` returns when the training may go on, what it returns waits until all is durable."""

    name: str
    begin: Callable[[Any, Places, int], Callable[[], None]]
    figures: List[Figure] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", action="append")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--preload", action="store_true", help="with the preload library: files of Firn are written without FUSE")
    parser.add_argument("--json", type=Path, help="where all figures are put")
    args = parser.parse_args()
    if args.preload and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": firnfs.preload_path()})
    print(f"seed {args.seed}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)
    state_bytes = int(args.gib * (1 << 30))
    with places(args.work, state_bytes) as found, saves() as all_saves:
        chosen = [save for save in all_saves if not args.only or save.name in args.only]
        state = {f"layer{number}": torch.rand(16 * MIB // 4) for number in range(state_bytes // (16 * MIB))}
        order = random.Random(args.seed)
        for number in range(args.rounds + 1):
            order.shuffle(chosen)
            for save in chosen:
                figure = measure(save, state, found, number, state_bytes)
                # The first round is that in which libraries make what they keep.
                if number > 0:
                    save.figures.append(figure)
                print(f"  {number} {save.name}: {figure}", file=sys.stderr, flush=True)
        chosen.sort(key=lambda save: save.name)
        report(chosen)
        if args.json:
            args.json.write_text(json.dumps({save.name: [vars(one) for one in save.figures] for save in chosen}))


# ---- places ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def places(work: Path, state_bytes: int) -> Iterator[Places]:
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        image, ext4, tmpfs = work / "ext4.img", work / "ext4", work / "tmpfs"
        for point in (ext4, tmpfs):
            point.mkdir(exist_ok=True)
        ends.callback(shutil.rmtree, work, ignore_errors=True)
        with open(image, "wb") as file:
            file.truncate(4 * state_bytes)
        run("mkfs.ext4", "-q", "-F", image)
        run("mount", "-o", "loop", image, ext4)
        ends.callback(run, "umount", ext4)
        run("mount", "-t", "tmpfs", "-o", f"size={state_bytes + 256 * MIB}", "tmpfs", tmpfs)
        ends.callback(run, "umount", tmpfs)
        (ext4 / "plain").mkdir()
        backing = ext4 / "backing"
        backing.mkdir()
        arena = f"{state_bytes // MIB + 512}M"
        firn = ends.enter_context(firnfs.mount(backing, work / "firn", arena_size=arena, close="held"))
        yield Places(ext4 / "plain", tmpfs, firn)


def run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True)


# ---- saves -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def saves() -> Iterator[List[Save]]:
    made = [
        Save("torch.save to ext4", save_torch_to_ext4),
        Save("torch.save to tmpfs + cp", save_torch_to_tmpfs),
        Save("torch.save to Firn", save_torch_to_firn),
        Save("dcp.async_save to ext4", save_dcp_to_ext4),
        Save("dcp.async_save to Firn", save_dcp_to_firn),
        Save("torch.save to Firn, no CRC32", without_crc32(save_torch_to_firn)),
    ]
    with contextlib.ExitStack() as ends:
        with contextlib.suppress(ImportError):
            import safetensors.torch

            save_file = safetensors.torch.save_file
            made.append(Save("safetensors to ext4", lambda *args: save_safetensors_to_ext4(save_file, *args)))
            made.append(Save("safetensors to Firn", lambda *args: save_safetensors_to_firn(save_file, *args)))
        with contextlib.suppress(ImportError):
            made += torch_checkpointing_saves(ends)
        yield made


def save_torch_to_ext4(state: Any, at: Places, number: int) -> Callable[[], None]:
    torch.save(state, at.ext4 / f"step_{number}")
    return lambda: sync_file(at.ext4 / f"step_{number}")


def save_torch_to_tmpfs(state: Any, at: Places, number: int) -> Callable[[], None]:
    source, target = at.tmpfs / f"step_{number}", at.ext4 / f"step_{number}"
    torch.save(state, source)
    copy = subprocess.Popen(["sh", "-c", f"cp '{source}' '{target}' && sync '{target}'"])

    def wait() -> None:
        if copy.wait() != 0:
            raise OSError("cp failed")

    return wait


def save_torch_to_firn(state: Any, at: Places, number: int) -> Callable[[], None]:
    with firnfs.checkpoint(at.firn, step=number) as new:
        torch.save(state, new / "model.pt")
    return lambda: firnfs.wait(at.firn / f"step_{number}")


def save_safetensors_to_ext4(save_file: Any, state: Any, at: Places, number: int) -> Callable[[], None]:
    save_file(state, at.ext4 / f"step_{number}")
    return lambda: sync_file(at.ext4 / f"step_{number}")


def save_safetensors_to_firn(save_file: Any, state: Any, at: Places, number: int) -> Callable[[], None]:
    with firnfs.checkpoint(at.firn, step=number) as new:
        save_file(state, new / "model.safetensors")
    return lambda: firnfs.wait(at.firn / f"step_{number}")


def save_dcp_to_ext4(state: Any, at: Places, number: int) -> Callable[[], None]:
    writer = dcp.FileSystemWriter(at.ext4 / f"step_{number}")
    # Its stager of today; the writer's own is deprecated.
    stager = dcp.DefaultStager(dcp.StagingOptions(False, False, False, False)) if hasattr(dcp, "DefaultStager") else None
    options = {} if stager is None else {"async_stager": stager}
    future = dcp.async_save(state, storage_writer=writer, **options)
    return lambda: ignore(future.result())


def save_dcp_to_firn(state: Any, at: Places, number: int) -> Callable[[], None]:
    from firnfs.torch import Stager

    stager = Stager()
    writer = stager.writer(at.firn / f"step_{number}")
    future = dcp.async_save(state, storage_writer=writer)
    return lambda: ignore(future.result())


def torch_checkpointing_saves(ends: contextlib.ExitStack) -> List[Save]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    from firnfs.torch_checkpointing import StorageConfig

    def save(storage: Any, place: str) -> Callable[[Any, Places, int], Callable[[], None]]:
        manager: Optional[Any] = None

        def begin(state: Any, at: Places, number: int) -> Callable[[], None]:
            nonlocal manager
            if manager is None:
                # A loaded machine starts its process slowly.
                process = CheckpointProcessConfig(subprocess_init_timeout_secs=600)
                saver = AsyncCheckpointSaverConfig(process_config=process)
                manager = CheckpointManager.Config(storage_config=storage, save=saver).build()
                ends.callback(manager.close)
            to = getattr(at, place) / f"step_{number}"
            future = manager.save(str(to), {"model": state})
            # Until the copy of the tensors is made, the training may not change them.
            if manager._staging_future is not None:
                manager._staging_future.result()

            def wait() -> None:
                future.result()
                if storage is own:
                    for file in to.rglob("*"):
                        sync_file(file)

            return wait

        return begin

    # O_DIRECT, its default, ext4 refuses for lengths that are no multiple of a block.
    own = LocalFileSystemStorageConfig(use_direct_io=False)
    return [
        Save("torch_checkpointing to ext4", save(own, "ext4")),
        Save("torch_checkpointing to Firn", save(StorageConfig(), "firn")),
    ]


def without_crc32(begin: Callable[[Any, Places, int], Callable[[], None]]) -> Callable[[Any, Places, int], Callable[[], None]]:
    """The same without the checksums that torch.save puts into its files; PyTorch before 2.6 always has them."""

    def begin_without(state: Any, at: Places, number: int) -> Callable[[], None]:
        if not hasattr(torch.serialization, "set_crc32_options"):
            return begin(state, at, number)
        torch.serialization.set_crc32_options(False)
        try:
            return begin(state, at, number)
        finally:
            torch.serialization.set_crc32_options(True)

    return begin_without


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ignore(_: Any) -> None:
    pass


# ---- measurement -----------------------------------------------------------------------------------


def measure(save: Save, state: Any, at: Places, number: int, state_bytes: int) -> Figure:
    clean(at)
    ends = time.monotonic() + 1
    alone = steps_per_second(lambda: time.monotonic() < ends)
    with Memory() as memory:
        start = time.monotonic()
        wait = save.begin(state, at, number)
        blocked = time.monotonic() - start
        waiter = threading.Thread(target=wait)
        waiter.start()
        rate = steps_per_second(waiter.is_alive)
        waiter.join()
        durable = time.monotonic() - start
    clean(at)
    return Figure(blocked, durable, rate / alone if rate else 1.0, memory.extra_bytes / state_bytes)


def steps_per_second(goes_on: Callable[[], bool]) -> float:
    weights = torch.rand(384, 384)
    count, start = 0, time.monotonic()
    while goes_on():
        weights = torch.mm(weights, weights).clamp_(-1, 1)
        count += 1
    seconds = time.monotonic() - start
    return count / seconds if seconds > 0.2 else 0.0


def clean(at: Places) -> None:
    firnfs.wait(at.firn, "drained")
    for place in (at.ext4, at.tmpfs, at.firn):
        for path in place.iterdir():
            if path.name == ".firn":
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


class Memory:
    """Samples how much memory this process and its children have, which no file is behind."""

    def __enter__(self) -> "Memory":
        self._base = self._peak = tree_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self._peak - self._base

    def _sample(self) -> None:
        while not self._ends.wait(0.02):
            self._peak = max(self._peak, tree_bytes())


def tree_bytes() -> int:
    """Anonymous memory of all, and shared memory of the one that has most: they share it."""
    anonymous, shared = 0, 0
    for pid in [os.getpid(), *children()]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{pid}/status").read_text()
            kib: Dict[str, int] = {}
            for line in text.splitlines():
                if line.startswith(("RssAnon", "RssShmem")):
                    kib[line.split(":")[0]] = int(line.split()[1])
            anonymous += kib.get("RssAnon", 0)
            shared = max(shared, kib.get("RssShmem", 0))
    return (anonymous + shared) * 1024


def children() -> List[int]:
    found: List[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


# ---- report ----------------------------------------------------------------------------------------

# What is compared: a save on Firn, another one, the figure, and what is wanted of their ratio.
GOALS = [
    ("dcp.async_save to Firn", "dcp.async_save to ext4", "blocked_s", "at most 0.60"),
    ("dcp.async_save to Firn", "torch.save to tmpfs + cp", "durable_s", "at most 1.00"),
    ("torch.save to Firn", "torch.save to tmpfs + cp", "durable_s", "at most 1.00"),
    ("torch.save to Firn", "torch.save to tmpfs + cp", "blocked_s", ""),
    ("torch.save to Firn", "torch.save to ext4", "blocked_s", ""),
    ("torch.save to Firn, no CRC32", "torch.save to Firn", "blocked_s", ""),
    ("safetensors to Firn", "safetensors to ext4", "blocked_s", ""),
    ("torch_checkpointing to Firn", "torch_checkpointing to ext4", "blocked_s", ""),
    ("torch_checkpointing to Firn", "torch_checkpointing to ext4", "durable_s", ""),
]


def report(all_saves: List[Save]) -> None:
    print("| save | blocked s | durable s | steps | memory |")
    print("|---|---|---|---|---|")
    for save in all_saves:
        cells = [spread([getattr(one, name) for one in save.figures]) for name in vars(save.figures[0])]
        print(f"| {save.name} | {' | '.join(cells)} |")
    print("\n| ratio of | to | | wanted |")
    print("|---|---|---|---|")
    by_name = {save.name: save for save in all_saves}
    for one, other, name, wanted in GOALS:
        if one in by_name and other in by_name:
            pairs = zip(by_name[one].figures, by_name[other].figures)
            ratios = [getattr(a, name) / getattr(b, name) for a, b in pairs]
            print(f"| {one}, {name} | {other} | {spread(ratios)} | {wanted} |")


def spread(values: List[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
