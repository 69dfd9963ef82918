/* One checkpoint file a rank, written in uneven pieces, read back by the next rank.
 *
 * usage: ranks DIR MIB
 * Ends with 0 when every rank read what its neighbour wrote. */
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned char content(int rank, size_t at) { return (unsigned char)(at * 31 + at / 4096 + rank * 7 + 1); }

static void fail(int rank, const char *what) {
    fprintf(stderr, "rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    int rank, ranks;
    char path[4096];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3) fail(rank, "usage: ranks DIR MIB");
    size_t len = (size_t)atoi(argv[2]) << 20, at = 0, piece = 64;
    unsigned char *data = malloc(len), *back = malloc(len);
    for (size_t i = 0; i < len; i++) data[i] = content(rank, i);

    snprintf(path, sizeof path, "%s/rank.%d", argv[1], rank);
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    if (fd < 0) fail(rank, "cannot create the file");
    while (at < len) {
        size_t want = piece < len - at ? piece : len - at;
        ssize_t done = write(fd, data + at, want);
        if (done <= 0) fail(rank, "cannot write");
        at += (size_t)done;
        piece = piece > 400000 ? 64 : piece * 3 + 1;
    }
    if (close(fd) != 0) fail(rank, "close failed");
    MPI_Barrier(MPI_COMM_WORLD);

    int neighbour = (rank + 1) % ranks;
    snprintf(path, sizeof path, "%s/rank.%d", argv[1], neighbour);
    fd = open(path, O_RDONLY);
    if (fd < 0) fail(rank, "cannot open the neighbour's file");
    for (at = 0; at < len;) {
        ssize_t got = read(fd, back + at, len - at);
        if (got <= 0) fail(rank, "the neighbour's file is short");
        at += (size_t)got;
    }
    close(fd);
    for (size_t i = 0; i < len; i++)
        if (back[i] != content(neighbour, i)) fail(rank, "the neighbour's file differs");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks agree\n", ranks);
    MPI_Finalize();
    return 0;
}
