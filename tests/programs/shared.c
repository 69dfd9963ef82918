/* All ranks write one file through MPI-IO, at their own offsets and collectively, and read it back.
 *
 * usage: shared DIR MIB
 * Ends with 0 when every rank read what its neighbour wrote. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char content(int rank, size_t at) { return (unsigned char)(at * 31 + at / 4096 + rank * 7 + 1); }

static void must(int result, const char *what) {
    if (result == MPI_SUCCESS) return;
    fprintf(stderr, "%s failed\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    int rank, ranks;
    char path[4096];
    MPI_File file;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
    int len = atoi(argv[2]) << 20, half = len / 2;
    unsigned char *data = malloc((size_t)len), *back = malloc((size_t)len);
    for (int i = 0; i < len; i++) data[i] = content(rank, (size_t)i);
    snprintf(path, sizeof path, "%s/shared", argv[1]);
    must(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file), "open");
    MPI_Offset start = (MPI_Offset)rank * len;
    must(MPI_File_write_at(file, start, data, half, MPI_BYTE, MPI_STATUS_IGNORE), "write_at");
    must(MPI_File_write_at_all(file, start + half, data + half, len - half, MPI_BYTE, MPI_STATUS_IGNORE),
         "write_at_all");
    must(MPI_File_sync(file), "sync");
    MPI_Barrier(MPI_COMM_WORLD);
    int neighbour = (rank + 1) % ranks;
    must(MPI_File_read_at(file, (MPI_Offset)neighbour * len, back, len, MPI_BYTE, MPI_STATUS_IGNORE), "read_at");
    for (int i = 0; i < len; i++)
        if (back[i] != content(neighbour, (size_t)i)) must(MPI_ERR_OTHER, "comparison");
    must(MPI_File_close(&file), "close");
    if (rank == 0) printf("%d ranks agree\n", ranks);
    MPI_Finalize();
    return 0;
}
