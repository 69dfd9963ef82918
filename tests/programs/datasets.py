"""Writes an HDF5 file with h5py as a training job does, or checks it.

usage: datasets.py write|check FILE
"""

import sys

import h5py
import numpy as np


def expected():
    rng = np.random.default_rng(42)
    weights = {f"layer{i}/weight": rng.standard_normal((64 + i, 333)) for i in range(12)}
    weights["layer3/weight"][10:20] = 7.0
    return weights


def write(path):
    rng = np.random.default_rng(42)
    with h5py.File(path, "w") as file:
        for i in range(12):
            file.create_dataset(f"layer{i}/weight", data=rng.standard_normal((64 + i, 333)), chunks=True)
        file.attrs["step"] = 100
    with h5py.File(path, "r+") as file:
        file["layer3/weight"][10:20] = 7.0
        file.create_dataset("history", data=np.arange(1000), maxshape=(None,))
    with h5py.File(path, "a") as file:
        file["history"].resize((5000,))
        file["history"][1000:] = np.arange(1000, 5000)


def check(path):
    with h5py.File(path, "r") as file:
        assert file.attrs["step"] == 100
        assert (file["history"][:] == np.arange(5000)).all()
        for name, values in expected().items():
            assert (file[name][:] == values).all(), name
    print("as written")


{"write": write, "check": check}[sys.argv[1]](sys.argv[2])
