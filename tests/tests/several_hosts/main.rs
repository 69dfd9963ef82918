//! What several hosts do with one backing at the same time.

mod file_locks;
mod hosts;
mod launchers;
mod log_layout;
mod log_reads;
mod moosefs;
mod peers;
mod placement;
mod rules;
mod shared_names;
mod slurm;
mod tokens;
mod watch;
