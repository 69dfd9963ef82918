#!/bin/bash
#SBATCH --nodes=64 --ntasks-per-node=8 --time=4:00:00
#SBATCH --mem=64G
#SBATCH --signal=TERM@300
# A job with a mount on each host for its life: nothing of Firn is installed on the cluster but this user's own binary.
#
# --mem     has room for the arena (16 GiB here), which is memory of the job.
# --signal  comes 300 s before the time limit: the application may write a last checkpoint and end; meanwhile all hosts drain.
#
# `exec`: a batch script that SIGTERM ends takes `firn run` with it, so there is none in between.
exec "$HOME/bin/firn" run --memory 16G --backing "/scratch/$USER/run42" -- \
    srun ./app
