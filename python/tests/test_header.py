"""What _ffi declares is what firn.h says."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import firnfs
import pytest
from firnfs import _ffi

HEADER = Path(__file__).parents[2] / "crates/firn-c/include/firn.h"

STRUCTURES = {
    "firn_status": _ffi.StatusStructure,
    "firn_room": _ffi.RoomStructure,
    "firn_checkpoint": _ffi.CheckpointStructure,
    "firn_data_region": _ffi.RegionStructure,
    "firn_chunk_meta": _ffi.ChunkStructure,
}

CONSTANTS = {
    **{f"FIRN_{name.upper()}": value for value, name in enumerate(_ffi.LEVELS)},
    **{f"FIRN_{name.upper().replace('-', '_')}": value for value, name in enumerate(_ffi.STATES)},
    "FIRN_NEXT_ID": _ffi.NEXT_ID,
    "FIRN_IN_MEMORY": _ffi.IN_MEMORY,
    "FIRN_IN_SPILL": _ffi.IN_SPILL,
    "FIRN_IN_BACKING": _ffi.IN_BACKING,
    "FIRN_IN_HOLE": _ffi.IN_HOLE,
}

pytestmark = pytest.mark.skipif(not HEADER.exists(), reason="only in the repository")


def test_structures_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    lines, expected = [], []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        expected.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
            expected.append(getattr(structure, field).offset)
    for name, value in CONSTANTS.items():
        lines.append(f'printf("%llu\\n", (unsigned long long){name});')
        expected.append(value)
    source = tmp_path / "sizes.c"
    body = "\n".join(lines)
    source.write_text(f"#include <stdio.h>\n#include <firn.h>\nint main(void) {{\n{body}\nreturn 0; }}\n")
    subprocess.run(["cc", "-I", HEADER.parent, "-o", tmp_path / "sizes", source], check=True)
    done = subprocess.run([tmp_path / "sizes"], stdout=subprocess.PIPE, check=True)
    assert [int(line) for line in done.stdout.split()] == expected


def test_functions_have_as_many_arguments_as_in_the_header() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    for name, _, arguments in _ffi._FUNCTIONS:
        match = re.search(rf"\b{name}\(([^)]*)\)\s*;", text)
        assert match, f"{name} is not in the header"
        declared = [] if match[1].strip() == "void" else match[1].split(",")
        assert len(declared) == len(arguments), name


def test_the_version_is_that_of_the_library_and_of_the_repository() -> None:
    cargo = (HEADER.parents[3] / "Cargo.toml").read_text()
    match = re.search(r'^version = "(.*)"$', cargo, re.M)
    assert match is not None
    assert firnfs.__version__ == match[1] == _ffi.version()
    assert f'version = "{match[1]}"' in (Path(__file__).parents[1] / "pyproject.toml").read_text()
