"""One HDF5 file that all ranks write, through h5py with MPI, and that any number of ranks reads.

usage: mpi_h5.py write|read FILE collective|independent
       mpi_h5.py list FILE                               names, shapes, types and sums, without MPI
"""
import sys

import numpy as np

ROWS, COLUMNS = 240, 1000


def expected(name, rows):
    columns = np.arange(COLUMNS)
    return np.asarray(rows)[:, None] * 7919.0 + columns * len(name)


def parts(rank, ranks):
    """Which rows a rank has of each dataset."""
    share = ROWS // ranks
    return {
        "segmented": slice(rank * share, (rank + 1) * share),
        "strided": slice(rank, ROWS, ranks),
        "chunked": slice(rank * share, (rank + 1) * share),
    }


def settle(file, comm):
    """Sync, barrier, sync: what a rank writes from here on is newer than what others wrote so far, such as fill values."""
    file.flush()
    comm.Barrier()
    file.flush()


def write(path, comm, collective):
    import h5py

    with h5py.File(path, "w", driver="mpio", comm=comm) as file:
        for name in ("segmented", "strided"):
            file.create_dataset(name, (ROWS, COLUMNS), "f8")
        file.create_dataset("group/chunked", (ROWS, COLUMNS), "f8", chunks=(10, 100))
        file.attrs["ranks"] = "any"
        settle(file, comm)
        for name, rows in parts(comm.rank, comm.size).items():
            dataset = file["group/chunked" if name == "chunked" else name]
            values = expected(name, np.arange(ROWS)[rows])
            if collective:
                with dataset.collective:
                    dataset[rows] = values
            else:
                dataset[rows] = values
            dataset.attrs["rows"] = ROWS
        settle(file, comm)
        # More of the structure after data was written.
        file.create_dataset("scalar", data=np.int64(42))


def read(path, comm, collective):
    import h5py

    with h5py.File(path, "r", driver="mpio", comm=comm) as file:
        assert file["scalar"][()] == 42 and file.attrs["ranks"] == "any"
        for name, rows in parts(comm.rank, comm.size).items():
            dataset = file["group/chunked" if name == "chunked" else name]
            assert dataset.attrs["rows"] == ROWS
            if collective:
                with dataset.collective:
                    values = dataset[rows]
            else:
                values = dataset[rows]
            assert (values == expected(name, np.arange(ROWS)[rows])).all(), name


def listing(path):
    import h5py

    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: print(name, getattr(item, "shape", ""), dict(item.attrs)))
        for name in ("segmented", "strided", "group/chunked"):
            values = file[name][()]
            assert (values == expected(name.split("/")[-1], np.arange(ROWS))).all(), name
            print(name, values.dtype, values.sum())


if sys.argv[1] == "list":
    listing(sys.argv[2])
else:
    from mpi4py import MPI

    verb = {"write": write, "read": read}[sys.argv[1]]
    verb(sys.argv[2], MPI.COMM_WORLD, sys.argv[3] == "collective")
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        print(MPI.COMM_WORLD.size, "ranks agree")
