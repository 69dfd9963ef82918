#!/usr/bin/env python3
"""Measures loads of a state that Firn holds in memory, beside the same from the warm page cache of ext4, in one run.

    loads.py --work DIR [--gib 1.5] [--rounds 9]

Makes an ext4 on a loop device below --work, and mounts Firn over it twice: as root, so that the kernel reads memory files by
itself, and as a user without root has it, whose programs run under the preload library. Root is needed to compare the two.
Each load is a process of its own, which copies each tensor into one that it has; imports are not part of the time.

Printed: seconds of each load, as the median with the smallest and the largest, and the ratio to ext4 in the same round. Then
training steps a second while files move into memory files, beside those of a time without.
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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List

import firnfs
import safetensors.torch
import torch

MIB = 1 << 20

LOAD = """
import sys, time, torch, safetensors.torch
path, mib = sys.argv[1], int(sys.argv[2])
own = [torch.ones(4 * 1048576) for _ in range(mib // 16)]
start = time.monotonic()
if path.endswith('.pt'):
    state = torch.load(path, mmap=True, weights_only=True)
else:
    state = safetensors.torch.load_file(path)
for target, name in zip(own, sorted(state)):
    target.copy_(state[name])
print(time.monotonic() - start)
assert float(own[-1][7]) == float(state[sorted(state)[-1]][7])
"""


@dataclass
class Load:
    name: str
    directory: Path
    environment: Dict[str, str]
    seconds: Dict[str, List[float]] = field(default_factory=dict)

    def run(self, file: str, state_bytes: int) -> None:
        words = [sys.executable, "-c", LOAD, str(self.directory / file), str(state_bytes // MIB)]
        environment = {**os.environ, **self.environment}
        took = subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout
        self.seconds.setdefault(file, []).append(float(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    state_bytes = int(args.gib * (1 << 30)) // (16 * MIB) * (16 * MIB)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, safetensors {safetensors.__version__}", flush=True)
    with loads(args.work, state_bytes) as found:
        state = {f"layer{number:03}": torch.rand(16 * MIB // 4) for number in range(state_bytes // (16 * MIB))}
        for load in found:
            torch.save(state, load.directory / "model.pt")
            safetensors.torch.save_file(state, load.directory / "model.safetensors")
        del state
        for load in found[1:]:
            wait_settled(load.directory, 2 * state_bytes)
        for number in range(args.rounds + 1):
            for file in ("model.pt", "model.safetensors"):
                for load in random.sample(found, len(found)):
                    load.run(file, state_bytes)
        report(found)
        measure_steps(found[1].directory, state_bytes, args.rounds)


@contextlib.contextmanager
def loads(work: Path, state_bytes: int) -> Iterator[List[Load]]:
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        image, ext4 = work / "ext4.img", work / "ext4"
        ext4.mkdir(exist_ok=True)
        ends.callback(shutil.rmtree, work, ignore_errors=True)
        with open(image, "wb") as file:
            file.truncate(12 * state_bytes)
        run("mkfs.ext4", "-q", "-F", image)
        run("mount", "-o", "loop", image, ext4)
        ends.callback(run, "umount", ext4)
        for name in ("plain", "root", "user"):
            (ext4 / name).mkdir()
        options = {"arena_size": f"{3 * state_bytes // MIB + 512}M", "drain": "demand", "close": "held", "fsync": "held"}
        root = ends.enter_context(firnfs.mount(ext4 / "root", work / "root", **options))
        user = ends.enter_context(firnfs.mount(ext4 / "user", work / "user", passthrough="off", **options))
        for mount in (root, user):
            ends.callback(empty, mount)
        preload = {"LD_PRELOAD": str(firnfs.preload_path())}
        yield [
            Load("ext4, warm", ext4 / "plain", {}),
            Load("Firn", root, {}),
            Load("Firn without root, preload", user, preload),
        ]


def run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True)


def empty(mount: Path) -> None:
    """Or its end would drain what is there."""
    for path in mount.iterdir():
        path.unlink()


def settled_bytes_of(mount: Path) -> int:
    words = [os.environ.get("FIRN_BIN", "firn"), "status", "--json", str(mount)]
    return int(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["settled_bytes"])


def wait_settled(mount: Path, settled_bytes: int) -> None:
    while settled_bytes_of(mount) < settled_bytes:
        time.sleep(0.1)


def report(found: List[Load]) -> None:
    for file in found[0].seconds:
        base = found[0].seconds[file][1:]
        for load in found:
            seconds = load.seconds[file][1:]
            ratios = [one / other for one, other in zip(seconds, base)]
            print(f"{file:18} {load.name:28} {spread(seconds)} s   {spread(ratios)} of ext4")


def spread(values: List[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure_steps(mount: Path, state_bytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    block = os.urandom(16 * MIB)
    ratios = []
    for number in range(rounds):
        ends = time.monotonic() + 2
        alone = steps_per_second(lambda: time.monotonic() < ends)
        before = settled_bytes_of(mount)
        path = mount / f"moves_{number}"
        with open(path, "wb") as file:
            for _ in range(state_bytes // (4 * 16 * MIB)):
                file.write(block)
            written = file.tell()
        watch = subprocess.Popen(["sleep", "2"])
        ratios.append(steps_per_second(lambda: watch.poll() is None) / alone)
        wait_settled(mount, before + written)
        path.unlink()
    print(f"steps in the 2 s after a close, to steps alone: {spread(ratios)}")


def steps_per_second(goes_on: Any) -> float:
    weights = torch.rand(384, 384)
    count, start = 0, time.monotonic()
    while goes_on():
        weights = torch.mm(weights, weights).clamp_(-1, 1)
        count += 1
    return count / (time.monotonic() - start)


if __name__ == "__main__":
    main()
