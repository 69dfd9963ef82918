//! MPI jobs, whose ranks wait without sleeping: a program of its own, so that no other test runs beside them.

mod mpi_io;
mod mpi_shared;
