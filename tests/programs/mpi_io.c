/* One file that all ranks write through MPI-IO, and that any number of ranks reads.
 *
 * usage: mpi_io write|read FILE PATTERN ACCESS [size=WAY] [HINT=VALUE]...
 *   PATTERN  strided    every rank's first row, then every rank's second one
 *            segmented  all rows of the first rank, then all of the next one
 *            nested     a part of the array, cut in up to three directions, out of a larger one in memory
 *   ACCESS   collective or independent
 *   WAY      how all ranks set the size of the file:
 *            zero         MPI_File_set_size(file, 0) after the open, of a file that has old bytes
 *            truncated    open(2) with O_TRUNC before that, of such a file
 *            grown        MPI_File_set_size to what it is to have
 *            preallocated MPI_File_preallocate of that, and a sync of all
 *            cut          MPI_File_set_size to that after more was written and synced
 *
 * The file is an array of integers; each is a function of its place, so the file is the same whoever writes it.
 * A writer syncs, waits for the others, syncs again, and reads what its neighbour wrote.
 * Ends with 0 when every rank wrote, or read what there is to be read. */
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NZ = 48, NY = 48, NX = 300, ROWS = NZ * NY };

static int rank, ranks;

static void fail(const char *what) {
    fprintf(stderr, "rank %d of %d: %s\n", rank, ranks, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(int code, const char *what) {
    char text[MPI_MAX_ERROR_STRING];
    int len;
    if (code == MPI_SUCCESS) return;
    MPI_Error_string(code, text, &len);
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int content(int place) { return (int)((unsigned)place * 2654435761u >> 3) | 1; }

/* What a rank has of the file, and where that is in its memory. */
struct part {
    MPI_Offset displacement;
    MPI_Datatype in_file;
    /* How many of it are in the memory, each a `in_memory`. */
    int count;
    MPI_Datatype in_memory;
    int *memory;
    size_t memory_len;
    /* By index in memory: its place in the file, or -1. */
    int *places;
};

static void rows_of(struct part *part, int who, int is_strided) {
    int rows = ROWS / ranks;
    part->memory_len = (size_t)rows * NX;
    part->places = malloc(part->memory_len * sizeof(int));
    for (int row = 0; row < rows; row++)
        for (int x = 0; x < NX; x++) {
            int in_file = is_strided ? row * ranks + who : who * rows + row;
            part->places[row * NX + x] = in_file * NX + x;
        }
    if (is_strided) {
        MPI_Datatype row;
        MPI_Type_contiguous(NX, MPI_INT, &row);
        MPI_Type_create_resized(row, 0, (MPI_Aint)ranks * NX * sizeof(int), &part->in_file);
        MPI_Type_free(&row);
        part->displacement = (MPI_Offset)who * NX * sizeof(int);
    } else {
        MPI_Type_contiguous(rows * NX, MPI_INT, &part->in_file);
        part->displacement = (MPI_Offset)who * rows * NX * sizeof(int);
    }
    part->in_memory = MPI_INT;
    part->count = rows * NX;
}

/* A part of the array with a border of one element around it in memory, as in a simulation. */
static void block_of(struct part *part, int who) {
    int cuts[3] = {0, 0, 0}, sizes[3] = {NZ, NY, NX}, own[3], starts[3], padded[3], ones[3] = {1, 1, 1};
    MPI_Dims_create(ranks, 3, cuts);
    int rest = who;
    for (int d = 2; d >= 0; d--) {
        own[d] = sizes[d] / cuts[d];
        starts[d] = rest % cuts[d] * own[d];
        padded[d] = own[d] + 2;
        rest /= cuts[d];
    }
    MPI_Type_create_subarray(3, sizes, own, starts, MPI_ORDER_C, MPI_INT, &part->in_file);
    MPI_Type_create_subarray(3, padded, own, ones, MPI_ORDER_C, MPI_INT, &part->in_memory);
    MPI_Type_commit(&part->in_memory);
    part->displacement = 0;
    part->count = 1;
    part->memory_len = (size_t)padded[0] * padded[1] * padded[2];
    part->places = malloc(part->memory_len * sizeof(int));
    for (size_t at = 0; at < part->memory_len; at++) part->places[at] = -1;
    for (int z = 0; z < own[0]; z++)
        for (int y = 0; y < own[1]; y++)
            for (int x = 0; x < own[2]; x++)
                part->places[((z + 1) * padded[1] + y + 1) * padded[2] + x + 1] =
                    ((starts[0] + z) * NY + starts[1] + y) * NX + starts[2] + x;
}

static struct part part_of(const char *pattern, int who) {
    struct part part;
    if (strcmp(pattern, "nested") == 0) block_of(&part, who);
    else rows_of(&part, who, strcmp(pattern, "strided") == 0);
    MPI_Type_commit(&part.in_file);
    part.memory = malloc(part.memory_len * sizeof(int));
    return part;
}

static void set_view(MPI_File file, struct part *part) {
    check(MPI_File_set_view(file, part->displacement, MPI_INT, part->in_file, "native", MPI_INFO_NULL), "set the view");
}

static void read_part(MPI_File file, const char *pattern, int who, int is_collective) {
    struct part part = part_of(pattern, who);
    memset(part.memory, 0, part.memory_len * sizeof(int));
    set_view(file, &part);
    MPI_Status status;
    check(is_collective ? MPI_File_read_all(file, part.memory, part.count, part.in_memory, &status)
                        : MPI_File_read(file, part.memory, part.count, part.in_memory, &status),
          "read");
    for (size_t at = 0; at < part.memory_len; at++) {
        int wanted = part.places[at] < 0 ? 0 : content(part.places[at]);
        if (part.memory[at] != wanted) {
            fprintf(stderr, "rank %d: part %d at element %d of the file: %d instead of %d\n", rank, who,
                    part.places[at], part.memory[at], wanted);
            fail("other bytes than were written");
        }
    }
}

static const MPI_Offset BYTES = (MPI_Offset)ROWS * NX * sizeof(int);

/* The first rank leaves old bytes, more than the file is to have, before any other one opens it. */
static void write_old(const char *path) {
    if (rank == 0) {
        char *old = malloc(2 * BYTES);
        memset(old, 0xcd, 2 * BYTES);
        int fd = open(path, O_CREAT | O_RDWR, 0644);
        if (fd < 0 || write(fd, old, 2 * BYTES) != 2 * BYTES || close(fd) != 0) fail("write old bytes");
        free(old);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/* What each rank wrote before is older than what any of them does next. */
static void sync_all(MPI_File file) {
    check(MPI_File_sync(file), "sync");
    MPI_Barrier(MPI_COMM_WORLD);
    check(MPI_File_sync(file), "sync");
}

static int is_way(const char *way, const char *wanted) { return way != NULL && strcmp(way, wanted) == 0; }

static void before_open(const char *path, const char *way) {
    if (is_way(way, "zero") || is_way(way, "truncated")) write_old(path);
    if (is_way(way, "truncated")) {
        int fd = open(path, O_RDWR | O_TRUNC);
        if (fd < 0 || close(fd) != 0) fail("open with O_TRUNC");
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

static void after_open(MPI_File file, const char *way) {
    if (is_way(way, "zero")) check(MPI_File_set_size(file, 0), "set the size to nothing");
    if (is_way(way, "grown")) check(MPI_File_set_size(file, BYTES), "set the size");
    if (is_way(way, "preallocated")) {
        /* A write, says MPI, and both libraries write zeros by one rank: what others write over them comes after a sync. */
        check(MPI_File_preallocate(file, BYTES), "preallocate");
        sync_all(file);
    }
    if (is_way(way, "cut")) {
        MPI_Status status;
        int beyond = rank;
        check(MPI_File_write_at(file, BYTES + rank * (MPI_Offset)sizeof beyond, &beyond, 1, MPI_INT, &status), "write beyond the end");
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 5) fail("usage: mpi_io write|read FILE PATTERN ACCESS [HINT=VALUE]...");
    int writes = strcmp(argv[1], "write") == 0, is_collective = strcmp(argv[4], "collective") == 0;
    const char *pattern = argv[3];
    if (ROWS % ranks != 0) fail("the rows cannot be dealt out to so many ranks");
    MPI_Info hints;
    MPI_Info_create(&hints);
    const char *way = NULL;
    for (int at = 5; at < argc; at++) {
        char *value = strchr(argv[at], '=');
        if (value == NULL) fail("a hint is written HINT=VALUE");
        *value = 0;
        if (strcmp(argv[at], "size") == 0) way = value + 1;
        else MPI_Info_set(hints, argv[at], value + 1);
    }
    if (writes) before_open(argv[2], way);
    MPI_File file;
    int mode = writes ? MPI_MODE_CREATE | MPI_MODE_RDWR : MPI_MODE_RDONLY;
    check(MPI_File_open(MPI_COMM_WORLD, argv[2], mode, hints, &file), "open");
    if (writes) {
        after_open(file, way);
        struct part part = part_of(pattern, rank);
        for (size_t at = 0; at < part.memory_len; at++)
            part.memory[at] = part.places[at] < 0 ? -1 : content(part.places[at]);
        set_view(file, &part);
        MPI_Status status;
        check(is_collective ? MPI_File_write_all(file, part.memory, part.count, part.in_memory, &status)
                            : MPI_File_write(file, part.memory, part.count, part.in_memory, &status),
              "write");
        sync_all(file);
        if (is_way(way, "cut")) check(MPI_File_set_size(file, BYTES), "cut");
        read_part(file, pattern, (rank + 1) % ranks, is_collective);
    } else {
        MPI_Offset bytes;
        check(MPI_File_get_size(file, &bytes), "get the size");
        if (bytes != BYTES) fail("the file has another size");
        read_part(file, pattern, rank, is_collective);
    }
    check(MPI_File_close(&file), "close");
    if (rank == 0) printf("%d ranks agree\n", ranks);
    MPI_Finalize();
    return 0;
}
