#!/usr/bin/env python3
"""Lets the torch of PyPI, which is built for CUDA, be imported where CUDA's libraries are not installed.

    without_cuda.py SITE_PACKAGES

CUDA's libraries take 4 GB, and a machine without a GPU calls next to none of their functions. For each that torch names and
does not find, this makes a library of that name, with the symbols that torch asks for. Each of them ends the program. The CUDA
runtime, which torch asks for the number of GPUs, is the real one (nvidia-cuda-runtime).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import DefaultDict, Dict, List, Set

_LIBRARY = re.compile(r"^lib(cu|nccl|nv)")
# How names of CUDA's libraries begin that have no version.
_CUDA = re.compile(r"^(cu|nccl|nvshmem|nvrtc|nvml)")
_LOOSE = ""


def main() -> None:
    site = Path(sys.argv[1])
    torch = sorted((site / "torch" / "lib").glob("*.so*"))
    there = {path.name for path in torch}
    there.update(path.name for path in site.glob("nvidia/**/*.so*"))
    missing = {name for path in torch for name in needed(path) if _LIBRARY.match(name) and name not in there}
    symbols = wanted_symbols(torch)
    to = next((path for path in site.glob("nvidia/cu*/lib")), None)
    if to is None:
        # Before CUDA 13 each package has a directory of its own, and torch looks into all of them.
        to = site / "nvidia" / "cuda_runtime" / "lib"
    loose = symbols.pop(_LOOSE, {})
    for name in sorted(missing):
        # Which library has a name without a version is nowhere said; the first one counts.
        make_library(to / name, symbols.get(name, loose))
    print(f"{len(missing)} libraries in {to}")


def needed(path: Path) -> List[str]:
    text = subprocess.run(["readelf", "-d", path], stdout=subprocess.PIPE, check=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def wanted_symbols(libraries: List[Path]) -> Dict[str, Dict[str, Set[str]]]:
    """By library, and in it by version, what is undefined: the version of CUDA's symbols is the name of their library."""
    found: DefaultDict[str, DefaultDict[str, Set[str]]] = defaultdict(lambda: defaultdict(set))
    defined: Set[str] = set()
    loose: Set[str] = set()
    owners: Dict[str, str] = {}
    for path in libraries:
        for file, version in versions(path):
            owners[version] = file
        text = subprocess.run(["nm", "-D", path], stdout=subprocess.PIPE, check=True, text=True).stdout
        for line in text.splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if kind not in "Uwv":
                defined.add(name)
            elif kind == "U" and version:
                found[owners[version]][version].add(name)
            elif kind == "U":
                loose.add(name)
    for name in loose - defined:
        if _CUDA.match(name):
            found[_LOOSE][""].add(name)
    return {file: dict(by_version) for file, by_version in found.items()}


def versions(path: Path) -> List["tuple[str, str]"]:
    """Pairs of a library and a version that is needed of it."""
    text = subprocess.run(["readelf", "-V", "--wide", path], stdout=subprocess.PIPE, check=True, text=True).stdout
    pairs, file = [], ""
    for line in text.split("Version needs section")[-1].splitlines():
        match = re.search(r"File: (\S+)", line)
        if match:
            file = match[1]
        match = re.search(r"Name: (\S+)", line)
        if match:
            pairs.append((file, match[1]))
    return pairs


def make_library(path: Path, by_version: Dict[str, Set[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "names.c"), Path(work, "names.map")
        names = sorted({name for names in by_version.values() for name in names})
        body = "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
        source.write_text(f"void abort(void);\n{body}")
        script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in by_version.items()))
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
        subprocess.run(command + ([] if set(by_version) <= {""} else [f"-Wl,--version-script={script}"]), check=True)


if __name__ == "__main__":
    main()
