//! The launcher for the hosts of a Slurm job. One `srun` starts the program on all of them.
//!
//! That `srun` is a separate job step, which lasts until the run ends. With proctrack/cgroup, Slurm ends a process
//! together with the step that started it, so a step of the user's command cannot contain the mounts. The step of the
//! mounts reserves no CPUs, memory or GPUs (`--overlap`), so all of them are available to the steps of the command.

use std::process::Command;

use super::{LaunchCommand, Launcher, Program, query_words, variable};
use crate::failure::{Failure, USAGE};

/// Variable that is set in a job: the number of the job.
pub(super) const JOB: &str = "SLURM_JOB_ID";
/// Variable with the hosts of the job, written as `n[1-64]`.
const HOST_LIST: &str = "SLURM_JOB_NODELIST";
/// Variable with the name of the host on which a step or a batch script runs.
const THIS_HOST: &str = "SLURMD_NODENAME";
/// Variable with the number of the step. Batch scripts have none.
const STEP: &str = "SLURM_STEP_ID";
/// First of the numbers that Slurm reserves, for example for interactive shells. Ordinary steps have lower numbers.
const RESERVED_STEPS: u32 = 0xffff_fff0;
/// Variable with the number of processes of the step.
const STEP_TASKS: &str = "SLURM_STEP_NUM_TASKS";

/// Variables with the resources that the job requested for its own steps. srun would apply them to the step of the
/// mounts, so they are removed from its environment.
const RESOURCE_REQUESTS: [&str; 24] = [
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
    /// Id of the job.
    job: String,
    /// Names of the hosts.
    hosts: Vec<String>,
}

/// Returns whether this process has a Slurm job in which it should start a step for the mounts.
///
/// It should not if it is one of several processes of a step, because the other processes use the same hosts. It need
/// not if it runs on the only host of the job.
pub(super) fn is_in_job() -> bool {
    let number = |name: &str| variable(name).and_then(|value| value.parse::<u32>().ok());
    let is_one_of_several_tasks = number(STEP).is_some_and(|step| step < RESERVED_STEPS)
        && number(STEP_TASKS).is_some_and(|tasks| tasks > 1);
    // salloc can run this process on a login host, which is not part of the job.
    let is_outside_job_hosts = variable(THIS_HOST).is_none();
    let has_other_hosts = number("SLURM_JOB_NUM_NODES").is_some_and(|hosts| hosts > 1);
    variable(JOB).is_some() && !is_one_of_several_tasks && (is_outside_job_hosts || has_other_hosts)
}

impl Slurm {
    /// Asks Slurm for the hosts of the enclosing job. Fails outside a job, and if Slurm does not answer.
    pub(super) fn from_job() -> Result<Self, Failure> {
        let (Some(job), Some(list)) = (variable(JOB), variable(HOST_LIST)) else {
            let text = format!(
                "{JOB} and {HOST_LIST} are not set: run it in a Slurm job (sbatch, salloc)"
            );
            return Err(Failure::new(USAGE, text));
        };
        let mut command = Command::new("scontrol");
        command.args(["show", "hostnames", &list]);
        let hosts = query_words(command)?;
        Ok(Self { job, hosts })
    }
}

impl Launcher for Slurm {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Returns one `srun` that starts the program once on each host, in a job step that reserves no resources.
    fn launch_commands(&self, program: &Program) -> Vec<LaunchCommand> {
        let host_count = self.hosts.len();
        let mut command = Command::new("srun");
        // Variables of the job would request CPUs, memory or GPUs for this step.
        for name in RESOURCE_REQUESTS {
            command.env_remove(name);
        }
        command
            .arg(format!("--jobid={}", self.job))
            .arg(format!("--nodes={host_count}"))
            .arg(format!("--ntasks={host_count}"))
            .args(["--ntasks-per-node=1", "--overlap", "--mem=0", "--gres=none"])
            .args(["--job-name=firn", "--chdir=/", "--export=ALL"])
            .args(["--mpi=none", "--input=all", "--quiet"])
            // Without these options, srun would end all mounts when one host is lost.
            .args(["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]);
        program.append_to(&mut command);
        vec![LaunchCommand {
            command,
            hosts: (0..host_count).collect(),
        }]
    }

    fn line_on_host(&self, host: &str, line: &str) -> String {
        format!("srun -N 1 -n 1 -w {host} {line}")
    }

    fn keeps_hosts(&self) -> bool {
        false
    }

    fn default_prefix(&self) -> String {
        format!("run.{}", self.job)
    }
}
