"""Trains to the end with an unmodified trainer, from the newest checkpoint there is: trainers.py hf|lightning OUT DIGEST.

The models and schedules are those of ckpt-chaos, with more steps. DIGEST gets a digest of the weights at the end.
"""

import hashlib
import os
import sys


def train_hf(out):
    from ckpt_chaos.targets import hf_trainer as target
    from transformers.trainer_utils import get_last_checkpoint

    target.MAX_STEPS = 300
    trainer = target.make_trainer(out, target.Hooks())
    trainer.args.save_total_limit = 3
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
    return trainer.model


def train_lightning(out):
    import lightning.pytorch as pl
    from ckpt_chaos.targets import lightning_trainer as target

    target.MAX_EPOCHS = 60
    pl.seed_everything(0, workers=False)
    model = target.Lit()
    has_checkpoint = os.path.exists(os.path.join(out, "checkpoints", "last.ckpt"))
    trainer = target.make(out, target.Hooks())
    trainer.fit(model, target.loader(), ckpt_path="last" if has_checkpoint else None)
    return model


def main():
    kind, out, digest = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    model = {"hf": train_hf, "lightning": train_lightning}[kind](out)
    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode())
        weights.update(value.detach().numpy().tobytes())
    with open(digest, "w") as file:
        file.write(weights.hexdigest())


main()
