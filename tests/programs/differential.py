"""The same random operations in two directories: answers and files must be the same.

differential.py SEED COUNT ONE TWO
"""
import fcntl
import os
import random
import sys

seed, count, one, two = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rng = random.Random(seed)
names = ["a", "b", "c", "a/x", "a/y", "b/x", "b/y", "b/z", "c/x", "a/x/1", "b/x/1", "b/x/2"]
open_files = {}


def both(act):
    answers = []
    for top in (one, two):
        try:
            answers.append(act(top))
        except OSError as error:
            answers.append(("errno", error.errno))
    assert answers[0] == answers[1], (step, act, [str(answer)[:200] for answer in answers])
    return answers[0]


def opened(slot, path, flags):
    files = []

    def act(top):
        files.append(os.open(os.path.join(top, path), flags, 0o640))
        return True

    if both(act) is True:
        if os.path.isdir(os.path.join(one, path)):
            # Offsets of directories mean something else on each file system.
            for file in files:
                os.close(file)
            return
        for file in open_files.pop(slot, []):
            os.close(file)
        open_files[slot] = files


def on(slot, act):
    files = open_files[slot]
    return both(lambda top: act(files[0 if top == one else 1]))


def lock_relative(fd, lock):
    """Locks a range relative to the offset or to the end, and says which ranges are locked by this descriptor then."""
    whence, start, length = lock
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start, whence)
    # /proc/locks leaves some out where other processes lock and unlock meanwhile.
    with open(f"/proc/self/fdinfo/{fd}") as info:
        mine = [line.split() for line in info if line.startswith("lock:")]
    return sorted(tuple(line[7:]) for line in mine)


def attributes(stat):
    return (stat.st_mode, stat.st_size if (stat.st_mode & 0o170000) != 0o040000 else 0, stat.st_nlink
            if (stat.st_mode & 0o170000) != 0o040000 else 0)


def walk(top):
    found = {}
    for base, dirs, files in os.walk(top):
        for name in dirs + files:
            path = os.path.join(base, name)
            stat = os.lstat(path)
            content = b""
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    content = file.read()
            found[os.path.relpath(path, top)] = (attributes(stat), content)
    return found


for step in range(count):
    path, other, slot = rng.choice(names), rng.choice(names), rng.randrange(5)
    offset, length = rng.randrange(200000), rng.choice([1, 100, 4096, 5000, 70000, 200000])
    data = bytes([rng.randrange(256)]) * length
    lock = (rng.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]), rng.choice([0, 5, -5]), rng.randrange(1, 50))
    kind = rng.randrange(100)
    if kind < 16:
        flags = rng.choice([os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT, os.O_RDONLY,
                            os.O_RDWR | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                            os.O_RDWR | os.O_CREAT | os.O_EXCL])
        opened(slot, path, flags)
    elif kind < 24:
        both(lambda top: os.mkdir(os.path.join(top, path)))
    elif kind < 32:
        both(lambda top: os.rename(os.path.join(top, path), os.path.join(top, other)))
    elif kind < 36:
        both(lambda top: os.link(os.path.join(top, path), os.path.join(top, other)))
    elif kind < 39:
        both(lambda top: os.symlink("b/x", os.path.join(top, path)))
    elif kind < 43:
        both(lambda top: os.unlink(os.path.join(top, path)))
    elif kind < 45:
        both(lambda top: os.rmdir(os.path.join(top, path)))
    elif kind < 50:
        both(lambda top: attributes(os.stat(os.path.join(top, path))))
        both(lambda top: attributes(os.lstat(os.path.join(top, path))))
    elif kind < 53:
        both(lambda top: os.truncate(os.path.join(top, path), offset))
    elif kind < 55:
        both(lambda top: os.utime(os.path.join(top, path), (1000000000, 1000000000 + step), follow_symlinks=False))
    elif slot not in open_files:
        continue
    elif kind < 63:
        on(slot, lambda fd: os.write(fd, data))
    elif kind < 66:
        on(slot, lambda fd: os.writev(fd, [data, b"between", data]))
    elif kind < 70:
        on(slot, lambda fd: os.pwrite(fd, data, offset))
    elif kind < 74:
        at = rng.choice([offset, -1])
        flags = rng.choice([0, os.RWF_APPEND, os.RWF_DSYNC, os.RWF_APPEND | os.RWF_DSYNC])
        on(slot, lambda fd: os.pwritev(fd, [data, b"between"], at, flags))
    elif kind < 78:
        on(slot, lambda fd: os.read(fd, length))
    elif kind < 80:
        on(slot, lambda fd: os.readv(fd, [bytearray(10), bytearray(length)]))
    elif kind < 83:
        on(slot, lambda fd: os.pread(fd, length, offset))
    elif kind < 86:
        at = rng.choice([offset, -1])
        on(slot, lambda fd: os.preadv(fd, [bytearray(10), bytearray(length)], at))
    elif kind < 87:
        on(slot, lambda fd: lock_relative(fd, lock))
    elif kind < 90:
        whence = rng.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])
        amount = rng.choice([0, offset, -offset])
        on(slot, lambda fd: os.lseek(fd, amount, whence))
    elif kind < 93:
        on(slot, lambda fd: os.ftruncate(fd, offset))
    elif kind < 96:
        on(slot, lambda fd: attributes(os.fstat(fd)))
    elif kind < 98:
        copies = [os.dup(file) for file in open_files[slot]]
        for file in open_files[slot]:
            os.close(file)
        open_files[slot] = copies
    else:
        for file in open_files.pop(slot):
            os.close(file)
found = [walk(one), walk(two)]
assert found[0].keys() == found[1].keys(), (sorted(found[0]), sorted(found[1]))
for name in found[0]:
    assert found[0][name] == found[1][name], (name, str(found[0][name])[:300], str(found[1][name])[:300])
print("same", len(found[0]))
