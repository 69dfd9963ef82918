/* MPI_LB and MPI_UB, which MPI-3 removed and ROMIO's own tests still use: a type with one of them among its parts begins or
 * ends there. Included before such a program (`mpicc -include`). */
#ifndef MPI1_TYPES_H
#define MPI1_TYPES_H
#include <mpi.h>

static char mpi1_lower, mpi1_upper;
#undef MPI_LB
#undef MPI_UB
#define MPI_LB ((MPI_Datatype)&mpi1_lower)
#define MPI_UB ((MPI_Datatype)&mpi1_upper)

static inline int mpi1_create_struct(int count, const int lengths[], const MPI_Aint places[], const MPI_Datatype parts[],
                                     MPI_Datatype *made) {
    int own_lengths[16], own = 0, has_lower = 0, has_upper = 0;
    MPI_Aint own_places[16], lower = 0, upper = 0;
    MPI_Datatype own_parts[16], whole;
    if (count > 16) return MPI_ERR_ARG;
    for (int at = 0; at < count; at++)
        if (parts[at] == MPI_LB) lower = places[at], has_lower = 1;
        else if (parts[at] == MPI_UB) upper = places[at], has_upper = 1;
        else own_lengths[own] = lengths[at], own_places[own] = places[at], own_parts[own++] = parts[at];
    int code = (MPI_Type_create_struct)(own, own_lengths, own_places, own_parts, &whole);
    if (code != MPI_SUCCESS) return code;
    MPI_Aint natural_lower, extent;
    MPI_Type_get_extent(whole, &natural_lower, &extent);
    if (!has_lower) lower = natural_lower;
    if (!has_upper) upper = natural_lower + extent;
    code = MPI_Type_create_resized(whole, lower, upper - lower, made);
    MPI_Type_free(&whole);
    return code;
}
#define MPI_Type_create_struct(...) mpi1_create_struct(__VA_ARGS__)
#endif
