/* One NetCDF-4 file that all ranks write, and that any number of ranks reads.
 *
 * usage: mpi_nc write|read FILE collective|independent
 * Ends with 0 when every rank wrote, or read what there is to be read. */
#include <mpi.h>
#include <netcdf.h>
#include <netcdf_par.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, ROWS = 120, COLUMNS = 500 };

static int rank, ranks;

static void check(int code, const char *what) {
    if (code == NC_NOERR) return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, nc_strerror(code));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static double content(int step, size_t row, size_t column) { return step * 1e6 + (double)row * COLUMNS + (double)column; }

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 4 || ROWS % ranks != 0) check(NC_EINVAL, "usage: mpi_nc write|read FILE collective|independent");
    int writes = strcmp(argv[1], "write") == 0, file, variable, dimensions[3];
    int access = strcmp(argv[3], "collective") == 0 ? NC_COLLECTIVE : NC_INDEPENDENT;
    size_t rows = ROWS / ranks, start[3] = {0, rank * rows, 0}, count[3] = {1, rows, COLUMNS};
    double *values = malloc(rows * COLUMNS * sizeof *values);
    if (writes) {
        check(nc_create_par(argv[2], NC_NETCDF4 | NC_CLOBBER, MPI_COMM_WORLD, MPI_INFO_NULL, &file), "create");
        /* The first one can grow: appended to, it is stored in chunks, and only together. */
        check(nc_def_dim(file, "step", access == NC_COLLECTIVE ? NC_UNLIMITED : STEPS, &dimensions[0]), "dimension");
        check(nc_def_dim(file, "row", ROWS, &dimensions[1]), "dimension");
        check(nc_def_dim(file, "column", COLUMNS, &dimensions[2]), "dimension");
        check(nc_def_var(file, "field", NC_DOUBLE, 3, dimensions, &variable), "variable");
        /* Whoever makes a place for values fills it, with other ranks' values on their way. */
        check(nc_def_var_fill(file, variable, NC_NOFILL, NULL), "no fill values");
        check(nc_put_att_text(file, variable, "unit", 1, "K"), "attribute");
        check(nc_enddef(file), "end of definitions");
        /* Sync, barrier, sync: what a rank writes from here on is newer than what others wrote so far, such as fill values. */
        check(nc_sync(file), "sync");
        MPI_Barrier(MPI_COMM_WORLD);
        check(nc_sync(file), "sync");
    } else {
        check(nc_open_par(argv[2], NC_NOWRITE, MPI_COMM_WORLD, MPI_INFO_NULL, &file), "open");
        check(nc_inq_varid(file, "field", &variable), "variable");
    }
    check(nc_var_par_access(file, variable, access), "access");
    for (int step = 0; step < STEPS; step++) {
        start[0] = (size_t)step;
        if (writes) {
            for (size_t at = 0; at < rows * COLUMNS; at++)
                values[at] = content(step, start[1] + at / COLUMNS, at % COLUMNS);
            check(nc_put_vara_double(file, variable, start, count, values), "put");
            continue;
        }
        check(nc_get_vara_double(file, variable, start, count, values), "get");
        for (size_t at = 0; at < rows * COLUMNS; at++)
            if (values[at] != content(step, start[1] + at / COLUMNS, at % COLUMNS)) {
                fprintf(stderr, "rank %d: step %d, element %zu: %f\n", rank, step, at, values[at]);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
    }
    check(nc_close(file), "close");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks agree\n", ranks);
    MPI_Finalize();
    return 0;
}
