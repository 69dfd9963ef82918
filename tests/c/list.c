/*
 * list - does with libfirn what a test says.
 *
 *     list errors FILE DIR OTHER    every error that needs no fault of firnd; OTHER is on no mount
 *     list hold FILE                holds a list; then one order a line on standard input:
 *                                       sum    FNV-1a, 64 bits, of the file as the list has it
 *                                       check  "0 CHANGED", or the errno
 *                                       again  a new handle and a new list of the same file
 *                                       free   gives the list up and keeps the handle
 *                                       list   a new list of the same file, by the same handle
 *     list threads FILE COUNT       COUNT threads list, read and free the file at once, by one handle
 *
 * Exit: 0 as expected; 1 not.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <firn.h>

static void die(const char *what, int error)
{
    fprintf(stderr, "%s: %d (%s; %s)\n", what, error, firn_strerror(error), firn_error_message());
    exit(1);
}

#define MUST(call)                        \
    do {                                  \
        int error_ = (call);              \
        if (error_)                       \
            die(#call, error_);           \
    } while (0)

/* The call fails so, and says something about it. */
#define FAILS(expected, call)                                                              \
    do {                                                                                   \
        int error_ = (call);                                                               \
        if (error_ != (expected) || !*firn_error_message() || !*firn_strerror(expected)) { \
            fprintf(stderr, "%d expected: ", (expected));                                  \
            die(#call, error_);                                                            \
        }                                                                                  \
    } while (0)

#define HOLDS(condition)                                      \
    do {                                                      \
        if (!(condition)) {                                   \
            fprintf(stderr, "not so: %s\n", #condition);      \
            exit(1);                                          \
        }                                                     \
    } while (0)

/* FNV-1a of a file as a list has it. Pieces in memory are read where they are, others are copied. */
static uint64_t sum(firn *mount, const firn_chunk_list *list, const char *path)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325), end = 0;
    const struct firn_chunk_meta *pieces = firn_chunk_list_pieces(list);
    for (size_t n = 0; n < firn_chunk_list_count(list); n++) {
        const struct firn_chunk_meta *piece = &pieces[n];
        unsigned char *copy = malloc(piece->bytes);
        const unsigned char *bytes = copy;
        HOLDS(copy && piece->offset == end && piece->bytes > 0);
        end += piece->bytes;
        if (piece->place == FIRN_IN_MEMORY) {
            HOLDS(piece->address && piece->chunk != FIRN_NO_CHUNK);
            bytes = piece->address;
            /* The copying way gives the same. */
            MUST(firn_read_chunk(mount, piece, 0, copy, piece->bytes));
            HOLDS(memcmp(copy, bytes, piece->bytes) == 0);
        } else if (piece->place == FIRN_IN_BACKING) {
            HOLDS(!piece->address && piece->chunk == FIRN_NO_CHUNK);
            FAILS(ENODATA, firn_read_chunk(mount, piece, 0, copy, piece->bytes));
            int file = open(path, O_RDONLY);
            HOLDS(file >= 0);
            HOLDS(pread(file, copy, piece->bytes, (off_t)piece->offset) == (ssize_t)piece->bytes);
            close(file);
        } else {
            MUST(firn_read_chunk(mount, piece, 0, copy, piece->bytes));
            if (piece->place == FIRN_IN_SPILL)
                HOLDS(piece->address && memcmp(copy, piece->address, piece->bytes) == 0);
        }
        for (uint64_t at = 0; at < piece->bytes; at++)
            hash = (hash ^ bytes[at]) * UINT64_C(0x100000001b3);
        free(copy);
    }
    HOLDS(end == firn_chunk_list_bytes(list));
    return hash;
}

static int errors(const char *file, const char *dir, const char *other)
{
    firn *mount = NULL;
    firn_chunk_list *list = NULL;
    struct firn_data_region region = {.size = sizeof region}, again = region;
    char byte, missing[4096];
    int changed = 7;

    FAILS(ENODEV, firn_open(other, &mount));
    FAILS(ENODEV, firn_open("/no/such/place", &mount));
    FAILS(EINVAL, firn_open(NULL, &mount));
    FAILS(EINVAL, firn_open(file, NULL));
    HOLDS(mount == NULL);
    MUST(firn_open(file, &mount));

    FAILS(EINVAL, firn_get_data_region(mount, NULL));
    FAILS(EINVAL, firn_get_data_region(NULL, &region));
    region.size = 0;
    FAILS(EINVAL, firn_get_data_region(mount, &region));
    region.size = sizeof region;
    MUST(firn_get_data_region(mount, &region));
    HOLDS(region.address == NULL && region.spill_address == NULL && region.path && region.bytes > 0);
    HOLDS(region.bytes % region.chunk_bytes == 0 && region.offset % region.page_bytes == 0);

    MUST(firn_get_chunk_meta_list(mount, file, &list));
    HOLDS(firn_chunk_list_count(list) > 0 && firn_chunk_list_pieces(list)[0].place == FIRN_IN_MEMORY);
    HOLDS(firn_chunk_list_pieces(list)[0].address == NULL);
    FAILS(EINVAL, firn_read_chunk(mount, firn_chunk_list_pieces(list), 0, &byte, 1));
    firn_chunk_list_free(list);

    MUST(firn_map_region(mount, &region));
    MUST(firn_map_region(mount, &again));
    HOLDS(region.address && again.address == region.address);
    MUST(firn_get_chunk_meta_list(mount, file, &list));
    const struct firn_chunk_meta *piece = firn_chunk_list_pieces(list);
    HOLDS(piece->address == (const char *)region.address + piece->at);
    MUST(firn_read_chunk(mount, piece, piece->bytes - 1, &byte, 1));
    MUST(firn_read_chunk(mount, piece, piece->bytes, NULL, 0));
    FAILS(EINVAL, firn_read_chunk(mount, piece, piece->bytes, &byte, 1));
    FAILS(EINVAL, firn_read_chunk(mount, piece, UINT64_MAX, &byte, 1));
    FAILS(EINVAL, firn_read_chunk(mount, piece, 0, NULL, 1));
    FAILS(EINVAL, firn_read_chunk(mount, NULL, 0, &byte, 1));
    struct firn_chunk_meta wrong = *piece;
    wrong.at = region.bytes;
    FAILS(EINVAL, firn_read_chunk(mount, &wrong, 0, &byte, 1));
    wrong.place = 99;
    FAILS(EINVAL, firn_read_chunk(mount, &wrong, 0, &byte, 1));

    firn_chunk_list *none = NULL;
    snprintf(missing, sizeof missing, "%s.missing", file);
    FAILS(ENOENT, firn_get_chunk_meta_list(mount, missing, &none));
    FAILS(EISDIR, firn_get_chunk_meta_list(mount, dir, &none));
    FAILS(ENODEV, firn_get_chunk_meta_list(mount, other, &none));
    FAILS(EINVAL, firn_get_chunk_meta_list(mount, NULL, &none));
    FAILS(EINVAL, firn_get_chunk_meta_list(NULL, file, &none));
    FAILS(EINVAL, firn_get_chunk_meta_list(mount, file, NULL));
    snprintf(missing, sizeof missing, "%s/\xff\xfe", dir);
    FAILS(ENOENT, firn_get_chunk_meta_list(mount, missing, &none));
    HOLDS(none == NULL);

    /* Errors of one call leave the others alone. */
    MUST(firn_chunk_list_check(list, &changed));
    HOLDS(changed == 0);
    MUST(firn_chunk_list_check(list, NULL));
    FAILS(EINVAL, firn_chunk_list_check(NULL, &changed));

    /* One too many, and one more once another is gone. */
    static firn_chunk_list *many[1023];
    for (size_t n = 0; n < 1023; n++)
        MUST(firn_get_chunk_meta_list(mount, file, &many[n]));
    FAILS(EMFILE, firn_get_chunk_meta_list(mount, file, &none));
    firn_chunk_list_free(many[0]);
    MUST(firn_get_chunk_meta_list(mount, file, &many[0]));

    firn_close(mount);
    FAILS(ESTALE, firn_chunk_list_check(list, &changed));
    firn_chunk_list_free(list);
    for (size_t n = 0; n < 1023; n++)
        firn_chunk_list_free(many[n]);
    firn_chunk_list_free(NULL);
    firn_close(NULL);
    HOLDS(firn_chunk_list_count(NULL) == 0 && firn_chunk_list_bytes(NULL) == 0 && !firn_chunk_list_pieces(NULL));
    HOLDS(strcmp(firn_strerror(0), firn_strerror(ENODEV)) != 0 && *firn_strerror(-12345) && *firn_version());
    return 0;
}

static int hold(const char *path)
{
    firn *mount;
    firn_chunk_list *list;
    struct firn_data_region region = {.size = sizeof region};
    char line[64];
    MUST(firn_open(path, &mount));
    MUST(firn_map_region(mount, &region));
    MUST(firn_get_chunk_meta_list(mount, path, &list));
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("held");
    while (fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "sum\n") == 0) {
            printf("%016" PRIx64 "\n", sum(mount, list, path));
        } else if (strcmp(line, "check\n") == 0) {
            int changed = 0, error = firn_chunk_list_check(list, &changed);
            printf("%d %d\n", error, changed);
        } else if (strcmp(line, "again\n") == 0) {
            firn_chunk_list_free(list);
            firn_close(mount);
            MUST(firn_open(path, &mount));
            MUST(firn_map_region(mount, &region));
            MUST(firn_get_chunk_meta_list(mount, path, &list));
            puts("held");
        } else if (strcmp(line, "free\n") == 0) {
            firn_chunk_list_free(list);
            list = NULL;
            puts("free");
        } else if (strcmp(line, "list\n") == 0) {
            MUST(firn_get_chunk_meta_list(mount, path, &list));
            puts("held");
        } else {
            fprintf(stderr, "no such order: %s", line);
            return 1;
        }
    }
    firn_chunk_list_free(list);
    firn_close(mount);
    return 0;
}

struct shared {
    firn *mount;
    const char *path;
    uint64_t expected;
};

static void *one_thread(void *argument)
{
    const struct shared *shared = argument;
    for (int n = 0; n < 50; n++) {
        firn_chunk_list *list, *none;
        int changed;
        MUST(firn_get_chunk_meta_list(shared->mount, shared->path, &list));
        HOLDS(sum(shared->mount, list, shared->path) == shared->expected);
        MUST(firn_chunk_list_check(list, &changed));
        HOLDS(!changed);
        firn_chunk_list_free(list);
        FAILS(EINVAL, firn_get_chunk_meta_list(shared->mount, NULL, &none));
    }
    return NULL;
}

static int threads(const char *path, int count)
{
    struct shared shared = {.path = path};
    struct firn_data_region region = {.size = sizeof region};
    firn_chunk_list *list;
    pthread_t running[64];
    HOLDS(count > 0 && count <= 64);
    MUST(firn_open(path, &shared.mount));
    MUST(firn_map_region(shared.mount, &region));
    MUST(firn_get_chunk_meta_list(shared.mount, path, &list));
    shared.expected = sum(shared.mount, list, path);
    for (int n = 0; n < count; n++)
        HOLDS(pthread_create(&running[n], NULL, one_thread, &shared) == 0);
    for (int n = 0; n < count; n++)
        HOLDS(pthread_join(running[n], NULL) == 0);
    firn_chunk_list_free(list);
    firn_close(shared.mount);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "errors") == 0)
        return errors(argv[2], argv[3], argv[4]);
    if (argc == 3 && strcmp(argv[1], "hold") == 0)
        return hold(argv[2]);
    if (argc == 4 && strcmp(argv[1], "threads") == 0)
        return threads(argv[2], atoi(argv[3]));
    fprintf(stderr, "usage: list errors FILE DIR OTHER | hold FILE | threads FILE COUNT\n");
    return 1;
}
