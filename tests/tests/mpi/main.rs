//! MPI jobs, whose ranks wait without sleeping: a program of its own, so that no other test runs beside them.

use std::sync::Mutex;

mod mpi_io;
mod mpi_shared;

/// Held while ranks run: two jobs at once on two CPUs take minutes in place of seconds.
static ONE_JOB: Mutex<()> = Mutex::new(());
