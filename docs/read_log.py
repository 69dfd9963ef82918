#!/usr/bin/env python3
"""Reads a file that is in logs (.firn/log of a backing) where no Firn is at hand:

    python3 read_log.py BACKING PATH > COPY        PATH is relative to BACKING

The file is as crates/firn-log says it is: the changes of all hosts, applied in their order to what the plain file had. The
program has all of it in memory, and looks at no checksum. It reads only logs that belong to the user who runs it and are
closed to everybody else: anybody may have made others where the top of a backing is open to others. Nobody may have the file
open. Without the package xxhash it does not know whose bytes are newer where two hosts wrote the same ones without knowing of
each other.

Exit status: 0 done, 1 failed, 10 the logs are not this user's alone.
"""
import json
import os
import stat
import struct
import sys

try:
    from xxhash import xxh3_64_intdigest as order_of
except ImportError:
    order_of = str


def numbers(body):
    """Those of a frame's body, as postcard writes them: 7 bits in each byte, the lowest first."""
    at = 0

    def take(skipped=0):
        nonlocal at
        at += skipped
        value = shift = 0
        while True:
            byte, at = body[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    return take


def frames(index, limit):
    """Each whole frame: where it begins, its epoch and a function that takes the numbers behind it."""
    at = 0
    while index[at : at + 8] == b"FIRNFRME":
        end = at + 16 + struct.unpack_from("<I", index, at + 8)[0]
        if end > limit:
            return
        take = numbers(index[at + 16 : end])
        epoch, _synced = take(), take()
        yield at, epoch, take
        at = end


class Own:
    """A directory of this user alone. Nothing in it is reached through a link, or by its path once more."""

    def __init__(self, name, parent=None):
        self.path = name if parent is None else f"{parent.path}/{name}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            self.fd = os.open(name, flags, dir_fd=None if parent is None else parent.fd)
        except NotADirectoryError:
            print(f"{self.path!r} is no directory: it is not this user's alone, and not read", file=sys.stderr)
            sys.exit(10)
        # The backing is whose it may be; what is Firn's in it is not.
        if parent is not None:
            self.check(os.fstat(self.fd), "")

    def check(self, found, name):
        is_closed = stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o077
        if found.st_uid != os.geteuid() or not is_closed:
            told = f"belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}"
            print(f"{os.path.join(self.path, name)!r} {told}: it is not this user's alone, and not read", file=sys.stderr)
            sys.exit(10)

    def names(self):
        return os.listdir(self.fd)

    def open(self, name):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd)
        file = open(fd, "rb")
        found = os.fstat(fd)
        self.check(found, name)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            sys.exit(f"{os.path.join(self.path, name)!r} is not a regular file with one name")
        return file

    def link(self, name):
        self.check(os.stat(name, dir_fd=self.fd, follow_symlinks=False), name)
        return os.readlink(name, dir_fd=self.fd)


def written(take, container, logs):
    """The pieces of a frame, and their bytes."""
    log, position, checksums = take(), take(), take()
    runs, offset = take(4 * checksums), 0
    with container.open(f"{logs}-{log:08x}") as file:
        file.seek(position)
        for _ in range(runs):
            distance, length, gap, more = take(), take(), take(), take()
            offset += distance >> 1 ^ -(distance & 1)
            for number in range(more + 1):
                yield offset + number * (length + gap), file.read(length)


def replay(container, data):
    """Applies all changes in a container to the bytes of the file below it."""
    names = container.names()
    if "all" in names:
        return data
    if "head" not in names:
        return data
    version, _name, base, _checksum = container.link("head").split()
    if version != "firn-log-2":
        sys.exit(f"{container.path!r} has another version: {version}")
    if base != "-":
        data = data[: int(base)]
    counts = None
    if "seal" in names:
        with container.open("seal") as seal:
            counts = json.loads(seal.read().decode().split("\n", 1)[1])["indexes"]
    changes = []
    for writer in (name[2:] for name in names if name.startswith("i-")):
        host, life = writer.rsplit("-", 1)
        with container.open(f"i-{writer}") as index:
            index = index.read()
        limit = len(index) if counts is None else counts.get(f"i-{writer}", 0)
        changes += [(epoch, host, int(life, 16), at, take, f"d-{writer}") for at, epoch, take in frames(index, limit)]
    changes = [(epoch, order_of(host), *rest) for epoch, host, *rest in changes]
    for _epoch, _host, _life, _at, take, logs in sorted(changes, key=lambda change: change[:4]):
        kind = take()
        if kind == 0:
            for offset, part in written(take, container, logs):
                data.extend(bytes(max(0, offset - len(data))))
                data[offset : offset + len(part)] = part
        elif kind == 1:
            length = take()
            data = data[:length] + bytes(max(0, length - len(data)))
        elif kind == 2:
            offset, length = take(), take()
            end = min(offset + length, len(data))
            data[offset:end] = bytes(max(0, end - offset))
    return data


def main(backing, path):
    plain = os.path.join(backing, path)
    top = Own("log", Own(".firn", Own(os.path.realpath(backing))))
    with open(plain, "rb") as file:
        data = bytearray(file.read())
    # In lanes the file has the number of its link.
    of_file = sorted(name for name in top.names() if name.startswith(f"{os.lstat(plain).st_ino:016x}-"))
    if len({name.split("-")[1] for name in of_file}) > 1:
        sys.exit(f"logs of removed files with the same number are left: {of_file}")
    for name in of_file:
        data = replay(Own(name, top), data)
    sys.stdout.buffer.write(data)


main(*sys.argv[1:])
