#!/usr/bin/env python3
"""Makes stubs of the frameworks from their wheels: the names and signatures that the adapters use, and nothing else.

    make_stubs.py SOURCE…            writes python/tests/stubs anew
    make_stubs.py --check SOURCE…    says what differs from what is there, and exits with 1

SOURCE is a wheel, or a directory into which wheels were installed. mypy checks the adapters against the stubs, so that CI
needs none of the frameworks; the campaign `python` checks the stubs against the newest ones.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

STUBS = Path(__file__).resolve().parent / "stubs"


@dataclass(frozen=True)
class Wanted:
    """A class or function of a module: which of its methods, and which of its attributes."""

    file: str
    name: str
    methods: Tuple[str, ...] = ()
    attributes: Tuple[str, ...] = ()
    bases: Tuple[str, ...] = ()


_DCP = "torch/distributed/checkpoint/filesystem.py"
_CALLBACK = ("on_init_end", "on_train_begin", "on_train_end", "on_step_end", "on_epoch_end", "on_save")
_RENAMES = "orbax/checkpoint/_src/path/atomicity.py"
_FILES = "torch_checkpointing/storage/filesystem.py"

# By the stub's module: which distribution it is of, and what it has.
MODULES: Dict[str, Tuple[str, List[Wanted]]] = {
    "torch": ("torch", [Wanted("torch/serialization.py", "save")]),
    "torch.serialization": (
        "torch",
        [Wanted("torch/serialization.py", "get_crc32_options"), Wanted("torch/serialization.py", "set_crc32_options")],
    ),
    "torch.distributed": (
        "torch",
        [
            Wanted("torch/distributed/__init__.py", "is_available"),
            Wanted("torch/distributed/distributed_c10d.py", "is_initialized"),
            Wanted("torch/distributed/distributed_c10d.py", "barrier"),
        ],
    ),
    "torch.distributed.checkpoint": (
        "torch",
        [
            Wanted(
                _DCP,
                "_FileSystemWriter",
                ("reset", "prepare_local_plan", "prepare_global_plan", "write_data", "finish", "checkpoint_id"),
                ("path", "use_collectives"),
            ),
            Wanted(
                "torch/distributed/checkpoint/staging.py",
                "AsyncStager",
                ("should_synchronize_after_execute", "stage", "synchronize_staging"),
            ),
            Wanted(_DCP, "FileSystemWriter", ("__init__",), (), ("_FileSystemWriter", "AsyncStager")),
            Wanted(_DCP, "FileSystemReader", ("__init__", "reset"), ("path",)),
        ],
    ),
    "torch_checkpointing.storage.filesystem": (
        "torch_checkpointing",
        [
            Wanted(_FILES, "LocalFileSystemStorageConfig", ("create_storage",), ("use_direct_io",)),
            Wanted(_FILES, "LocalFileSystemStorage", ("__init__", "rename")),
        ],
    ),
    "transformers": (
        "transformers",
        [
            Wanted(
                "transformers/training_args.py",
                "TrainingArguments",
                ("world_size",),
                ("output_dir", "save_total_limit"),
            ),
            Wanted(
                "transformers/trainer_callback.py",
                "TrainerState",
                (),
                ("global_step", "best_model_checkpoint", "is_world_process_zero"),
            ),
            Wanted("transformers/trainer_callback.py", "TrainerControl", (), ("should_save",)),
            Wanted("transformers/trainer_callback.py", "TrainerCallback", _CALLBACK),
        ],
    ),
    "lightning.fabric.plugins": (
        "lightning",
        [
            Wanted(
                "lightning/fabric/plugins/io/torch_io.py",
                "TorchCheckpointIO",
                ("save_checkpoint", "load_checkpoint", "remove_checkpoint"),
            )
        ],
    ),
    "orbax.checkpoint._src.path.atomicity": (
        "orbax_checkpoint",
        [
            Wanted(_RENAMES, "TemporaryPathBase", ("get",)),
            Wanted(_RENAMES, "AtomicRenameTemporaryPath", ("get_final", "create", "finalize"), (), ("TemporaryPathBase",)),
        ],
    ),
}

# A dataclass gives its fields to those below it.
_DATACLASSES = {"LocalFileSystemStorageConfig"}
_KEPT = re.compile(r"^(bool|int|str|None)( \| None)?$")
_Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class Missing(Exception):
    """A framework has not what an adapter uses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    args = parser.parse_args()
    try:
        made = make_stubs(args.sources)
    except Missing as missing:
        sys.exit(f"make_stubs: {missing}")
    if args.check:
        check(made)
        return
    for old in STUBS.rglob("*.pyi"):
        old.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def check(made: Dict[Path, str]) -> None:
    def names(text: str) -> List[str]:
        # The version of the framework may be another one.
        return text.splitlines()[1:]

    differ = [path for path, text in made.items() if not path.exists() or names(path.read_text()) != names(text)]
    if differ:
        print("\n".join(f"{path} is not what the framework has:\n{made[path]}" for path in differ))
        sys.exit(1)


def make_stubs(sources: Sequence[Path]) -> Dict[Path, str]:
    """The text of each stub."""
    made: Dict[Path, str] = {}
    packages = {module.rsplit(".", count)[0] for module in MODULES for count in range(module.count(".") + 1)}
    for module in sorted(packages | set(MODULES)):
        distribution, wanted = MODULES.get(module, ("", []))
        is_package = any(other.startswith(f"{module}.") for other in MODULES)
        path = STUBS.joinpath(*module.split("."), "__init__.pyi") if is_package else STUBS.joinpath(*module.split(".")).with_suffix(".pyi")
        head = f"# Of {distribution} {version(sources, distribution)}, by make_stubs.py.\n" if distribution else "# By make_stubs.py.\n"
        body = "\n".join(stub_of(sources, one) for one in wanted)
        made[path] = f"{head}from typing import Any\n\n{body}" if wanted else head
    return made


def stub_of(sources: Sequence[Path], wanted: Wanted) -> str:
    tree = ast.parse(read(sources, wanted.file))
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    node = found.get(wanted.name)
    if node is None:
        raise Missing(f"{wanted.file} has no {wanted.name}")
    if not isinstance(node, ast.ClassDef):
        return signature(node, "")
    bases = f"({', '.join(wanted.bases)})" if wanted.bases else ""
    lines = [f"class {wanted.name}{bases}:"]
    if wanted.name in _DATACLASSES:
        lines = ["from dataclasses import dataclass", "", "@dataclass", *lines]
    fields = attributes_of(node)
    for name in wanted.attributes:
        if name not in fields:
            raise Missing(f"{wanted.name} of {wanted.file} has no attribute {name}")
        lines.append(f"    {name}: {annotation(fields[name])}{' = ...' if wanted.name in _DATACLASSES else ''}")
    methods = {one.name: one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for name in wanted.methods:
        if name not in methods:
            raise Missing(f"{wanted.name} of {wanted.file} has no method {name}")
        lines.append(signature(methods[name], "    "))
    if len(lines) == 1:
        lines.append("    ...")
    return "\n".join(lines) + "\n"


def attributes_of(node: ast.ClassDef) -> "Dict[str, ast.expr | None]":
    """Fields of the class, and what its methods assign to self."""
    found: "Dict[str, ast.expr | None]" = {}
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign):
            target, kind = one.target, one.annotation
        elif isinstance(one, ast.Assign) and len(one.targets) == 1:
            target, kind = one.targets[0], None
        else:
            continue
        if isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"):
            found.setdefault(target.id if isinstance(target, ast.Name) else target.attr, kind)
    return found


def annotation(kind: "ast.expr | None") -> str:
    text = "" if kind is None else ast.unparse(kind)
    return text if _KEPT.match(text) else "Any"


def signature(node: _Function, indent: str) -> str:
    """The function with its parameters, without what its types need."""
    args = node.args
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if one is not None and one.arg not in ("self", "cls"):
            one.annotation = ast.Name(annotation(one.annotation))
    for defaults in (args.defaults, args.kw_defaults):
        defaults[:] = [None if value is None else ast.Constant(...) for value in defaults]  # type: ignore[misc]
    decorators = [name for one in node.decorator_list for name in [ast.unparse(one)] if name in ("property", "classmethod")]
    head = "".join(f"{indent}@{name}\n" for name in decorators)
    is_async = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    result = "None" if node.name == "__init__" else "Any"
    return f"{head}{indent}{is_async}def {node.name}({ast.unparse(args)}) -> {result}: ..."


def read(sources: Sequence[Path], file: str) -> str:
    for source in sources:
        if source.is_dir() and (source / file).exists():
            return (source / file).read_text()
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                if file in wheel.namelist():
                    return wheel.read(file).decode()
    raise Missing(f"none of the sources has {file}")


def version(sources: Sequence[Path], distribution: str) -> str:
    pattern = re.compile(rf"^{distribution}-([^-]+)(\.dist-info|-.*\.whl)$")
    for source in sources:
        names = [one.name for one in source.iterdir()] if source.is_dir() else [source.name]
        for match in filter(None, map(pattern.match, names)):
            return match[1]
    raise Missing(f"none of the sources is {distribution}")


if __name__ == "__main__":
    main()
