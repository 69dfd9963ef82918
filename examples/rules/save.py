"""Writes a checkpoint as Hugging Face's Trainer does: some files, and trainer_state.json as the last one.

usage: save.py DIR [--kill]     --kill: SIGKILL before the last file, as a scheduler or the kernel may do it
"""

import os
import signal
import sys

directory = sys.argv[1]
os.mkdir(directory)
for name in ["model.safetensors", "rng_state.pth", "trainer_state.json"]:
    if name == "trainer_state.json" and "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.path.join(directory, name), "wb") as file:
        file.write(bytes(1 << 20))
