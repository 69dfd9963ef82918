"""A training loop that saves as many do: no temporary names, no fsync, and it resumes from the highest step there is.

--style dir    OUT/ckpt-N/ with several files, the last of which is done.json
--style file   OUT/state.json, written over in place
"""

import argparse
import json
import os
import re

STEPS = 12
EVERY = 4


def save_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file)


def load_json(path):
    with open(path) as file:
        return json.load(file)


class Directories:
    def __init__(self, out):
        self.out = out

    def load(self):
        names = (re.fullmatch(r"ckpt-(\d+)", name) for name in os.listdir(self.out))
        steps = [int(name.group(1)) for name in names if name]
        if not steps:
            return 0, 1
        at = os.path.join(self.out, f"ckpt-{max(steps)}")
        model, optimizer = (load_json(os.path.join(at, part)) for part in ("model.json", "optimizer.json"))
        done = load_json(os.path.join(at, "done.json"))
        if model["value"] != optimizer["value"]:
            raise ValueError("parts of two checkpoints")
        return done["step"], model["value"]

    def save(self, step, value):
        at = os.path.join(self.out, f"ckpt-{step}")
        os.mkdir(at)
        for part in ("model.json", "optimizer.json"):
            save_json(os.path.join(at, part), {"value": value, "padding": "x" * 5000})
        save_json(os.path.join(at, "done.json"), {"step": step})


class OneFile:
    def __init__(self, out):
        self.path = os.path.join(out, "state.json")

    def load(self):
        if not os.path.exists(self.path):
            return 0, 1
        state = load_json(self.path)
        return state["step"], state["value"]

    def save(self, step, value):
        save_json(self.path, {"step": step, "value": value, "padding": "x" * 5000})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--style", choices=["dir", "file"], required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    store = {"dir": Directories, "file": OneFile}[args.style](args.out)
    step, value = store.load()
    print(f"resumed from step {step}")
    while step < STEPS:
        step += 1
        value = (value * 31 + step) % 1_000_003
        if step % EVERY == 0:
            store.save(step, value)
    save_json(os.path.join(args.out, "final.json"), {"value": value})


main()
