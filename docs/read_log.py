#!/usr/bin/env python3
"""Reads a file that is in logs (.firn/log of a backing) where no Firn is at hand:

    python3 read_log.py BACKING PATH > COPY        PATH is relative to BACKING

The file is as crates/firn-log says it is: the changes of all hosts that no cut took, applied in their order to what the plain
file had. The program has all of it in memory, and looks at no checksum. It reads only logs that belong to the user who runs it and are
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


def fields(body):
    """Those of a frame's body, as postcard writes them: numbers with 7 bits in each byte, the lowest first, and texts."""
    at = 0

    def number(skipped=0):
        nonlocal at
        at += skipped
        value = shift = 0
        while True:
            byte, at = body[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def text():
        nonlocal at
        length = number()
        at += length
        return body[at - length : at].decode()

    return number, text


def frames(index, limit):
    """Each whole frame: where it begins, its epoch, its kind and functions that take what is behind them."""
    at = 0
    while index[at : at + 8] == b"FIRNFRME":
        end = at + 16 + struct.unpack_from("<I", index, at + 8)[0]
        if end > limit:
            return
        take, text = fields(index[at + 16 : end])
        epoch, _synced, kind = take(), take(), take()
        yield at, epoch, kind, take, text
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


def read_frames(container, names):
    """The frames of all indexes that count: whose, where, epoch, kind and what is behind."""
    counts = None
    if "decision" in names:
        with container.open("decision") as seal:
            counts = json.loads(seal.read().decode().split("\n", 1)[1])["indexes"]
    for name in (name[2:] for name in names if name.startswith("i-")):
        host, life = name.rsplit("-", 1)
        with container.open(f"i-{name}") as index:
            index = index.read()
        limit = len(index) if counts is None else counts.get(f"i-{name}", 0)
        for at, *frame in frames(index, limit):
            yield (host, int(life, 16)), at, *frame


def replay(container, data):
    """Applies all changes in a container to the bytes of the file below it."""
    names = container.names()
    if "done-all" in names or "head" not in names:
        return data
    version, _name, base, _checksum = container.link("head").split()
    if version != "firn-log-5":
        sys.exit(f"{container.path!r} has another version: {version}")
    if base != "-":
        data = data[: int(base)]
    # A cut ends what its host had seen: its own frames before it, and those of other indexes before so many bytes.
    cuts, grown, changes = [], [], []
    for writer, at, epoch, kind, take, text in read_frames(container, names):
        if kind == 1:
            length = take()
            seen = {(text(), take()): take() for _ in range(take())}
            cuts.append((length, {**seen, writer: at}))
            data = data[:length]
        elif kind == 4:
            grown.append((writer, at, take()))
        elif kind in (0, 2):
            changes.append((epoch, order_of(writer[0]), writer, at, kind, take))
    longest = len(data)

    def end_of(writer, at):
        return min((length for length, seen in cuts if at < seen.get(writer, 0)), default=1 << 63)

    for writer, at, length in grown:
        longest = max(longest, min(length, end_of(writer, at)))
    for _epoch, _host, writer, at, kind, take in sorted(changes, key=lambda change: (change[:2], change[2][1], change[3])):
        limit = end_of(writer, at)
        if kind == 0:
            for offset, part in written(take, container, f"d-{writer[0]}-{writer[1]:016x}"):
                longest = max(longest, min(offset + len(part), limit))
                part = part[: max(0, limit - offset)]
                data.extend(bytes(max(0, offset + len(part) - len(data)) if part else 0))
                data[offset : offset + len(part)] = part
        else:
            offset, length = take(), take()
            end = min(offset + length, limit, len(data))
            data[offset:end] = bytes(max(0, end - offset))
    return data + bytes(longest - len(data))


def main(backing, path):
    plain = os.path.join(backing, path)
    top = Own("log", Own(".firn", Own(os.path.realpath(backing))))
    with open(plain, "rb") as file:
        data = bytearray(file.read())
    # In lanes the file has the number of its link.
    dirs = [name for name in top.names() if name.startswith(f"{os.lstat(plain).st_ino:016x}-")]
    if len({name[:33] for name in dirs}) > 1:
        sys.exit(f"logs of removed files with the same number are left: {dirs}")
    for name in dirs:
        if name.count("-") != 1:
            sys.exit(f"{name} is of an earlier version, which has to flatten it")
        of_file = Own(name, top)
        for container in sorted(inside for inside in of_file.names() if inside.startswith(name)):
            data = replay(Own(container, of_file), data)
    sys.stdout.buffer.write(data)


main(*sys.argv[1:])
