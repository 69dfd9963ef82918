/* Ranks that write their blocks of one file until they are told to stop, and say which writes have returned.
 *
 * usage: mpi_kill FILE LOGS STOP zero|preallocated
 *
 * All ranks set the size of the file first, as the last word says. Block k of rank r is block k * ranks + r of the file,
 * and each of its bytes is a function of its place. When a write has returned, its number is appended to LOGS/RANK.
 * A rank whose host fails writes no more. All end when there is a file STOP, and with 0 whatever failed. */
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 5000, BLOCKS_MAX = 2000 };

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_File file;
    if (argc != 5 || MPI_File_open(MPI_COMM_WORLD, argv[1], MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file) != MPI_SUCCESS)
        MPI_Abort(MPI_COMM_WORLD, 2);
    int sized = strcmp(argv[4], "zero") == 0 ? MPI_File_set_size(file, 0)
                                             : MPI_File_preallocate(file, (MPI_Offset)BLOCKS_MAX / 4 * ranks * BLOCK);
    /* To preallocate is to write zeros. */
    if (sized == MPI_SUCCESS) sized = MPI_File_sync(file);
    MPI_Barrier(MPI_COMM_WORLD);
    if (sized == MPI_SUCCESS) sized = MPI_File_sync(file);
    if (sized != MPI_SUCCESS) MPI_Abort(MPI_COMM_WORLD, 3);
    char name[4096];
    snprintf(name, sizeof name, "%s/%d", argv[2], rank);
    int log = open(name, O_CREAT | O_WRONLY | O_APPEND, 0644);
    if (log < 0) MPI_Abort(MPI_COMM_WORLD, 4);
    static uint8_t block[BLOCK];
    int works = 1;
    for (uint32_t number = 0; access(argv[3], F_OK) != 0; number++) {
        if (!works || number >= BLOCKS_MAX) {
            usleep(10000);
            continue;
        }
        MPI_Offset place = ((MPI_Offset)number * ranks + rank) * BLOCK;
        for (int at = 0; at < BLOCK; at++) block[at] = (uint8_t)((uint64_t)(place + at) * 2654435761u >> 13) | 1;
        MPI_Status status;
        int count = 0;
        works = MPI_File_write_at(file, place, block, BLOCK, MPI_BYTE, &status) == MPI_SUCCESS;
        works = works && MPI_Get_count(&status, MPI_BYTE, &count) == MPI_SUCCESS && count == BLOCK;
        if (works && write(log, &number, sizeof number) != sizeof number) MPI_Abort(MPI_COMM_WORLD, 5);
    }
    MPI_File_close(&file);
    MPI_Finalize();
    return 0;
}
