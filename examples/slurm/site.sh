# shellcheck shell=bash disable=SC2034
# Settings of the scripts beside this file, which read it. They run as root, or with the rights of the job's user (task-prolog).

# Slurm gives none.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
# Where `firn` and the preload library are.
firn=/usr/bin/firn
preload=/usr/lib/libfirn_preload.so
# Users who have this directory get a mount in each job; others do not.
wish=/scratch/$SLURM_JOB_USER/ckpt
# It stays after the job: a job that is requeued has the same number, and finds its files.
backing=$wish/$SLURM_JOB_ID
point=/local/ckpt/$SLURM_JOB_ID
# The arena is memory that Slurm must not give to jobs: see README.md, "Memory".
options=arena-size=16G,layout=log
# Below PrologEpilogTimeout of slurm.conf.
drain_limit=10min

as_user() { runuser -u "$SLURM_JOB_USER" -- "$@"; }
tell() { logger -t "firn[$SLURM_JOB_ID]" -- "$*" 2>/dev/null || :; }
