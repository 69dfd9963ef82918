#!/usr/bin/env python3
"""Reads a file that is in logs (.firn/log of a backing) where no Firn is at hand:

    python3 read_log.py BACKING PATH > COPY        PATH is relative to BACKING

The file is as crates/firn-log says it is: the changes of all hosts, applied in their order to what the plain file had. The
program has all of it in memory, and believes what it finds: it looks at no checksum. Nobody may have the file open. Without the
package xxhash it does not know whose bytes are newer where two hosts wrote the same ones without knowing of each other.
"""
import json
import os
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


def written(take, logs):
    """The pieces of a frame, and their bytes."""
    log, position, checksums = take(), take(), take()
    runs, offset = take(4 * checksums), 0
    with open(f"{logs}-{log:08x}", "rb") as file:
        file.seek(position)
        for _ in range(runs):
            distance, length, gap, more = take(), take(), take(), take()
            offset += distance >> 1 ^ -(distance & 1)
            for number in range(more + 1):
                yield offset + number * (length + gap), file.read(length)


def replay(container, data):
    """Applies all changes in a container to the bytes of the file below it."""
    names = os.listdir(container)
    if "all" in names:
        return data
    if "head" not in names:
        return data
    version, _name, base, _checksum = os.readlink(f"{container}/head").split()
    if version != "firn-log-2":
        sys.exit(f"{container} has another version: {version}")
    if base != "-":
        data = data[: int(base)]
    counts = None
    if "seal" in names:
        with open(f"{container}/seal", encoding="utf-8") as seal:
            counts = json.loads(seal.read().split("\n", 1)[1])["indexes"]
    changes = []
    for writer in (name[2:] for name in names if name.startswith("i-")):
        host, life = writer.rsplit("-", 1)
        with open(f"{container}/i-{writer}", "rb") as index:
            index = index.read()
        limit = len(index) if counts is None else counts.get(f"i-{writer}", 0)
        changes += [(epoch, host, int(life, 16), at, take, f"{container}/d-{writer}") for at, epoch, take in frames(index, limit)]
    changes = [(epoch, order_of(host), *rest) for epoch, host, *rest in changes]
    for _epoch, _host, _life, _at, take, logs in sorted(changes, key=lambda change: change[:4]):
        kind = take()
        if kind == 0:
            for offset, part in written(take, logs):
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
    plain, top = os.path.join(backing, path), os.path.join(backing, ".firn/log")
    with open(plain, "rb") as file:
        data = bytearray(file.read())
    # In lanes the file has the number of its link.
    of_file = sorted(name for name in os.listdir(top) if name.startswith(f"{os.lstat(plain).st_ino:016x}-"))
    if len({name.split("-")[1] for name in of_file}) > 1:
        sys.exit(f"logs of removed files with the same number are left: {of_file}")
    for name in of_file:
        data = replay(os.path.join(top, name), data)
    sys.stdout.buffer.write(data)


main(*sys.argv[1:])
