"""``python -m firnfs`` is ``firn``; so is ``mount.firn`` by its name."""

import os
import sys
from typing import NoReturn

from ._find import find_firn
from .errors import FirnError


def main(name: str = "firn") -> NoReturn:
    """Becomes the program ``firn``, called ``name``."""
    try:
        os.execv(find_firn(), [name, *sys.argv[1:]])
    except FirnError as error:
        print(f"firn: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def mount_firn() -> NoReturn:
    """``mount.firn``, for mount(8)."""
    main("mount.firn")


if __name__ == "__main__":
    main()
