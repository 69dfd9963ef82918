/* What ranks on several hosts do to one file of which they need to know who comes first: shared file pointers, atomic mode.
 *
 * usage: mpi_shared VERB FILE [HINT=VALUE]...
 *   shared   MPI_File_write_shared by all ranks, MPI_File_seek_shared, MPI_File_read_shared: each record is there once
 *   ordered  the same with MPI_File_write_ordered and MPI_File_read_ordered: records are in the order of ranks
 *   atomic   all ranks write the same bytes in atomic mode, and each finds those of one of them
 *   sieved   each rank writes every so manieth integer by itself, with holes between them
 *
 * Ends with 0 when every rank found what it has to. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RECORD = 1021, RECORDS = 16, ROUNDS = 6 };

static int rank, ranks;

static void fail(const char *what, int found, int expected) {
    fprintf(stderr, "rank %d of %d: %s: found %d, expected %d\n", rank, ranks, what, found, expected);
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

static void fill(int *record, int value) {
    for (int i = 0; i < RECORD; i++) record[i] = value;
}

/* The value of a record, which must be whole. */
static int value_of(const int *record) {
    for (int i = 1; i < RECORD; i++)
        if (record[i] != record[0]) fail("a record is not whole", record[i], record[0]);
    return record[0];
}

static MPI_File open_file(const char *path, MPI_Info info) {
    MPI_File file;
    int mode = MPI_MODE_CREATE | MPI_MODE_RDWR;
    check(MPI_File_open(MPI_COMM_WORLD, path, mode, info, &file), "open");
    return file;
}

static void end_phase(MPI_File file) {
    check(MPI_File_sync(file), "sync");
    MPI_Barrier(MPI_COMM_WORLD);
    check(MPI_File_sync(file), "sync");
}

static void use_shared(MPI_File file) {
    int record[RECORD], counts[RECORDS * 64] = {0}, all[RECORDS * 64];
    for (int i = 0; i < RECORDS; i++) {
        fill(record, rank * RECORDS + i);
        check(MPI_File_write_shared(file, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "write_shared");
    }
    end_phase(file);
    check(MPI_File_seek_shared(file, 0, MPI_SEEK_SET), "seek_shared");
    for (int i = 0; i < RECORDS; i++) {
        fill(record, -1);
        check(MPI_File_read_shared(file, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "read_shared");
        int value = value_of(record);
        if (value < 0 || value >= ranks * RECORDS) fail("no such record", value, 0);
        counts[value]++;
    }
    MPI_Allreduce(counts, all, ranks * RECORDS, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < ranks * RECORDS; i++)
        if (all[i] != 1) fail("times that a record was read", all[i], 1);
}

static void use_ordered(MPI_File file) {
    int record[RECORD];
    for (int i = 0; i < RECORDS; i++) {
        fill(record, i * ranks + rank);
        check(MPI_File_write_ordered(file, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "write_ordered");
    }
    end_phase(file);
    check(MPI_File_seek_shared(file, 0, MPI_SEEK_SET), "seek_shared");
    for (int i = 0; i < RECORDS; i++) {
        fill(record, -1);
        check(MPI_File_read_ordered(file, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "read_ordered");
        int value = value_of(record);
        if (value != i * ranks + rank) fail("a record in order", value, i * ranks + rank);
    }
}

static void use_atomically(MPI_File file) {
    int record[RECORD];
    check(MPI_File_set_atomicity(file, 1), "set_atomicity");
    for (int round = 0; round < ROUNDS; round++) {
        fill(record, round * ranks + rank);
        check(MPI_File_write_at(file, 0, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "write_at");
        MPI_Barrier(MPI_COMM_WORLD);
        fill(record, -1);
        check(MPI_File_read_at(file, 0, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "read_at");
        int value = value_of(record), first = value;
        if (value / ranks != round || value < 0) fail("a record of this round", value, round * ranks);
        MPI_Bcast(&first, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (value != first) fail("what another rank found", value, first);
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

static void use_holes(MPI_File file) {
    int record[RECORD], all[RECORD * 64];
    MPI_Datatype every;
    MPI_Type_vector(RECORD, 1, ranks, MPI_INT, &every);
    MPI_Type_commit(&every);
    fill(record, rank + 1);
    MPI_Offset first = rank * (MPI_Offset)sizeof(int);
    check(MPI_File_set_view(file, first, MPI_INT, every, "native", MPI_INFO_NULL), "set_view");
    check(MPI_File_write(file, record, RECORD, MPI_INT, MPI_STATUS_IGNORE), "write");
    end_phase(file);
    check(MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "native", MPI_INFO_NULL), "set_view");
    check(MPI_File_read_at(file, 0, all, RECORD * ranks, MPI_INT, MPI_STATUS_IGNORE), "read_at");
    for (int i = 0; i < RECORD * ranks; i++)
        if (all[i] != i % ranks + 1) fail("an integer", all[i], i % ranks + 1);
    MPI_Type_free(&every);
}

int main(int argc, char **argv) {
    MPI_Info info;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 3 || ranks > 64) return 2;
    MPI_Info_create(&info);
    for (int i = 3; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) return 2;
        *value = '\0';
        MPI_Info_set(info, argv[i], value + 1);
    }
    MPI_File file = open_file(argv[2], info);
    if (strcmp(argv[1], "shared") == 0) use_shared(file);
    else if (strcmp(argv[1], "ordered") == 0) use_ordered(file);
    else if (strcmp(argv[1], "atomic") == 0) use_atomically(file);
    else if (strcmp(argv[1], "sieved") == 0) use_holes(file);
    else return 2;
    check(MPI_File_close(&file), "close");
    MPI_Info_free(&info);
    if (rank == 0) printf("%d ranks agree\n", ranks);
    MPI_Finalize();
    return 0;
}
