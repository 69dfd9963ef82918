//! The launcher for the hosts of a Slurm job. It starts one step, which overlaps all others and ends with the run.
//!
//! With proctrack/cgroup a process ends with the step that started it, so the mounts need a step of their own. That
//! step takes no CPUs, memory or GPUs (`--overlap`), so the steps of the command can use all of the job's.

use std::process::Command;

use super::{Launcher, Program, Start, ask_for_hosts, variable};
use crate::failure::{Failure, USAGE};

/// Variable that is set in a job: the number of the job.
pub(super) const JOB: &str = "SLURM_JOB_ID";
/// Variable with the hosts of the job, written as `n[1-64]`.
const HOST_LIST: &str = "SLURM_JOB_NODELIST";
/// Variable with the name of the host on which a step or a batch script runs.
const THIS_HOST: &str = "SLURMD_NODENAME";
/// Variable with the number of the step. Batch scripts have none. Interactive shells have a number above those of
/// steps.
const STEP: &str = "SLURM_STEP_ID";
const STEP_MAX: u32 = 0xffff_fff0;
/// Variable with the number of processes of the step.
const STEP_TASKS: &str = "SLURM_STEP_NUM_TASKS";

/// Variables with what the job asked for its own steps. srun would apply them to the step of the mounts.
const OTHERS_WISHES: [&str; 24] = [
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_GRES",
    "SLURM_HINT",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_STEP_GRES",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
    "SLURM_WAIT",
    "SRUN_CPUS_PER_TASK",
];

/// The hosts of a Slurm job.
pub(in crate::verb::run) struct Slurm {
    job: String,
    hosts: Vec<String>,
}

/// Returns whether this process has a Slurm job whose hosts it may use.
///
/// That is false for one of several processes of a step, which share the hosts. It is also false in a job whose only
/// host is this one.
pub(super) fn is_in_job() -> bool {
    let number = |name: &str| variable(name).and_then(|value| value.parse::<u32>().ok());
    let is_one_of_many = number(STEP).is_some_and(|step| step < STEP_MAX)
        && number(STEP_TASKS).is_some_and(|tasks| tasks > 1);
    let is_elsewhere = variable(THIS_HOST).is_none();
    let has_others = number("SLURM_JOB_NUM_NODES").is_some_and(|hosts| hosts > 1);
    variable(JOB).is_some() && !is_one_of_many && (is_elsewhere || has_others)
}

impl Slurm {
    pub(super) fn of_job() -> Result<Self, Failure> {
        let (Some(job), Some(list)) = (variable(JOB), variable(HOST_LIST)) else {
            let why = format!(
                "{JOB} and {HOST_LIST} are not set: run it in a Slurm job (sbatch, salloc)"
            );
            return Err(Failure::new(USAGE, why));
        };
        let mut command = Command::new("scontrol");
        command.args(["show", "hostnames", &list]);
        let hosts = ask_for_hosts(command)?;
        Ok(Self { job, hosts })
    }
}

impl Launcher for Slurm {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Returns one `srun` that starts the program once on each host.
    fn starts(&self, program: &Program) -> Vec<Start> {
        let count = self.hosts.len();
        let mut command = Command::new("srun");
        for name in OTHERS_WISHES {
            command.env_remove(name);
        }
        command
            .arg(format!("--jobid={}", self.job))
            .args([format!("--nodes={count}"), format!("--ntasks={count}")])
            .args(["--ntasks-per-node=1", "--overlap", "--mem=0", "--gres=none"])
            .args(["--job-name=firn", "--chdir=/", "--export=ALL"])
            .args(["--mpi=none", "--input=all", "--quiet"])
            // Without these options, srun would end all mounts when one host is lost.
            .args(["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]);
        program.append_to(&mut command);
        vec![Start {
            command,
            hosts: (0..count).collect(),
        }]
    }

    fn line_on(&self, host: &str, line: &str) -> String {
        format!("srun -N 1 -n 1 -w {host} {line}")
    }

    fn keeps_hosts(&self) -> bool {
        false
    }

    fn default_prefix(&self) -> String {
        format!("run.{}", self.job)
    }
}
