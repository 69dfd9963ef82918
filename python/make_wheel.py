#!/usr/bin/env python3
"""Makes the wheel of built programs and libraries; scripts/dist calls it.

    make_wheel.py --built DIR --to DIR [--glibc 2.28]

One wheel serves every Python: there is no compiled extension. The same tree gives the same bytes: times are those of
SOURCE_DATE_EPOCH. The tag names the newest glibc that a file needs, or --glibc, which must be enough.

Prints the path of the wheel.
"""

import argparse
import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIBRARIES = ["libfirn.so", "libfirn_preload.so"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", type=Path, required=True, help="directory of firn and the libraries")
    parser.add_argument("--to", type=Path, required=True, help="directory for the wheel")
    parser.add_argument("--glibc", help="version that the tag names")
    parser.add_argument("--level", type=int, default=6, help="of compression, 0 to 9")
    args = parser.parse_args()

    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    if project["version"] != version:
        sys.exit(f"make_wheel: python/pyproject.toml has version {project['version']}, Cargo.toml {version}: make them equal")

    binaries = [args.built / name for name in ["firn", *LIBRARIES]]
    needed = max((needed_glibc(path) for path in binaries), key=as_numbers)
    glibc = args.glibc or needed
    if as_numbers(needed) > as_numbers(glibc):
        sys.exit(f"make_wheel: a file in {args.built} needs glibc {needed}, newer than {glibc}: build it by `make wheel`")
    tag = f"py3-none-manylinux_{glibc.replace('.', '_')}_{platform.machine()}"

    stem = f"{project['name']}-{version}"
    info = f"{stem}.dist-info"
    files = {}
    for source in sorted((HERE / "firnfs").rglob("*")):
        if source.suffix in (".py", ".typed") or source.name == "py.typed":
            files[f"firnfs/{source.relative_to(HERE / 'firnfs')}"] = (source.read_bytes(), 0o644)
    for name in LIBRARIES:
        files[f"firnfs/_lib/{name}"] = ((args.built / name).read_bytes(), 0o755)
    files[f"{stem}.data/scripts/firn"] = ((args.built / "firn").read_bytes(), 0o755)
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        files[f"{info}/licenses/{name}"] = ((ROOT / name).read_bytes(), 0o644)
    files[f"{info}/METADATA"] = (metadata(project).encode(), 0o644)
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: firn make_wheel\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        0o644,
    )
    files[f"{info}/entry_points.txt"] = (entry_points(project).encode(), 0o644)
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, (data, _) in files.items())
    files[f"{info}/RECORD"] = (f"{record}{info}/RECORD,,\n".encode(), 0o644)

    wheel = args.to / f"{stem}-{tag}.whl"
    when = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), 315532800))[:6]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=args.level) as archive:
        for name, (data, mode) in files.items():
            entry = zipfile.ZipInfo(name, when)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    print(wheel)


def needed_glibc(path: Path) -> str:
    done = subprocess.run(["readelf", "--version-info", "--wide", path], stdout=subprocess.PIPE, check=True, text=True)
    return max(re.findall(r"GLIBC_([0-9.]+)", done.stdout), key=as_numbers, default="2.5")


def as_numbers(version: str) -> "tuple[int, ...]":
    return tuple(int(part) for part in version.split("."))


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def metadata(project: dict) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Keywords: {','.join(project['keywords'])}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE-APACHE",
        "License-File: LICENSE-MIT",
        *(f"Classifier: {one}" for one in project["classifiers"]),
        f"Requires-Python: {project['requires-python']}",
    ]
    for extra, packages in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {package}; extra == '{extra}'" for package in packages]
    lines += ["Description-Content-Type: text/markdown", ""]
    return "\n".join(lines) + "\n" + (HERE / project["readme"]).read_text()


def entry_points(project: dict) -> str:
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    parts = []
    for group, entries in groups.items():
        parts.append(f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()))
    return "\n".join(parts)


if __name__ == "__main__":
    main()
