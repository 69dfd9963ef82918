/*
 * mover - copies files of a Firn mount elsewhere out of the mount's memory.
 *
 * What an RDMA agent does, with a local file in the place of the other node: it maps the region once, and
 * for each file asks where the pieces are, takes them from there, and in the end asks whether all that held.
 * Pieces in memory are written straight from the region, without a copy in this process; spilled ones are
 * read into a buffer first, and what only the backing has comes through the mount.
 *
 *     mover FILE TARGET [FILE TARGET]...
 *
 * Exit: 0 copied; 1 failed; 2 usage.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <firn.h>

/* A list that does not hold, or a file that changes while it is copied, is tried again so often. */
enum { TRIES = 5 };
/* What is not in memory goes through a buffer of this size: one request of the mount. */
enum { BUFFER_BYTES = 1 << 20 };

static char buffer[BUFFER_BYTES];

struct copied {
    unsigned long long memory, spill, backing;
};

static int fail(const char *what, const char *path, int error)
{
    fprintf(stderr, "mover: %s: cannot %s: %s\n", path, what, strerror(error));
    return error;
}

/* An error of the library: what happened, and what to do about it. */
static int fail_firn(const char *path, int error)
{
    fprintf(stderr, "mover: %s: %s\n       (%s)\n", path, firn_error_message(), firn_strerror(error));
    return error;
}

static int write_all(int target, const char *path, const void *from, uint64_t bytes, uint64_t offset)
{
    while (bytes > 0) {
        ssize_t n = pwrite(target, from, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail("write", path, errno);
        from = (const char *)from + n;
        bytes -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

/* Reads what has no address: from the spill file or a memory file by the library, else through the mount. */
static int fetch(firn *mount, const struct firn_chunk_meta *piece, uint64_t from, size_t bytes, int file,
                 const char *path)
{
    if (piece->place == FIRN_IN_SPILL || piece->place == FIRN_IN_MEMORY_FILE) {
        int error = firn_read_chunk(mount, piece, from, buffer, bytes);
        return error ? fail_firn(path, error) : 0;
    }
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(file, buffer + done, bytes - done, (off_t)(piece->offset + from + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail("read", path, errno);
        if (n == 0) {
            /* It was cut meanwhile: the check at the end will say so. */
            memset(buffer + done, 0, bytes - done);
            break;
        }
        done += (size_t)n;
    }
    return 0;
}

static int copy_piece(firn *mount, const struct firn_chunk_meta *piece, int file, int target, const char *path,
                      const char *target_path, struct copied *copied)
{
    switch (piece->place) {
    case FIRN_IN_MEMORY:
        copied->memory += piece->bytes;
        return write_all(target, target_path, piece->address, piece->bytes, piece->offset);
    case FIRN_IN_HOLE:
        return 0;
    case FIRN_IN_MEMORY_FILE:
        copied->memory += piece->bytes;
        break;
    case FIRN_IN_SPILL:
        copied->spill += piece->bytes;
        break;
    default:
        copied->backing += piece->bytes;
    }
    for (uint64_t from = 0; from < piece->bytes; from += BUFFER_BYTES) {
        uint64_t left = piece->bytes - from;
        size_t bytes = left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES;
        int error = fetch(mount, piece, from, bytes, file, path);
        if (!error)
            error = write_all(target, target_path, buffer, bytes, piece->offset + from);
        if (error)
            return error;
    }
    return 0;
}

/* All pieces of a list; `file` is only opened where something comes through the mount. */
static int copy_list(firn *mount, const firn_chunk_list *list, int target, const char *path,
                     const char *target_path, struct copied *copied)
{
    const struct firn_chunk_meta *pieces = firn_chunk_list_pieces(list);
    int error = 0, file = -1;
    if (ftruncate(target, 0) || ftruncate(target, (off_t)firn_chunk_list_bytes(list)))
        return fail("size", target_path, errno);
    for (size_t n = 0; !error && n < firn_chunk_list_count(list); n++) {
        if (pieces[n].place == FIRN_IN_BACKING && file < 0) {
            file = open(path, O_RDONLY | O_CLOEXEC);
            if (file < 0)
                return fail("open", path, errno);
        }
        error = copy_piece(mount, &pieces[n], file, target, path, target_path, copied);
    }
    if (file >= 0)
        close(file);
    return error;
}

/* 0: the copy is the file as it was when it was listed. EAGAIN: not all of it; once more. */
static int copy_once(firn *mount, const char *path, int target, const char *target_path, struct copied *copied)
{
    firn_chunk_list *list;
    int changed, error = firn_get_chunk_meta_list(mount, path, &list);
    if (error)
        return fail_firn(path, error);
    error = copy_list(mount, list, target, path, target_path, copied);
    if (!error) {
        error = firn_chunk_list_check(list, &changed);
        if (error)
            fail_firn(path, error);
        /* What came from memory and the spill file is of one instant; what came from the backing is not. */
        else if (changed && copied->backing > 0)
            error = EAGAIN;
    }
    firn_chunk_list_free(list);
    return error;
}

static int copy(firn *mount, const char *path, const char *target_path)
{
    struct copied copied;
    int target = open(target_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (target < 0)
        return fail("open", target_path, errno);
    int error = EAGAIN;
    for (int n = 0; n < TRIES && error == EAGAIN; n++) {
        memset(&copied, 0, sizeof copied);
        error = copy_once(mount, path, target, target_path, &copied);
    }
    if (error == EAGAIN)
        fprintf(stderr, "mover: %s: it is being written: copy it once it is closed\n", path);
    if (close(target) && !error)
        error = fail("close", target_path, errno);
    if (!error)
        printf("%s memory=%llu spill=%llu backing=%llu\n", path, copied.memory, copied.spill, copied.backing);
    return error;
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc % 2 == 0) {
        fprintf(stderr, "usage: mover FILE TARGET [FILE TARGET]...\n");
        return 2;
    }
    firn *mount;
    struct firn_data_region region = {.size = sizeof region};
    int error = firn_open(argv[1], &mount);
    if (error) {
        fail_firn(argv[1], error);
        return 1;
    }
    /* Here an RDMA agent registers [region.address, region.address + region.bytes) with its network. */
    error = firn_map_region(mount, &region);
    if (error)
        fail_firn(argv[1], error);
    for (int n = 1; !error && n < argc; n += 2)
        error = copy(mount, argv[n], argv[n + 1]);
    firn_close(mount);
    return error ? 1 : 0;
}
