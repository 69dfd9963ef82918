//! The launcher for a run on this host alone. It starts the program as a child process.

use std::process::Command;

use super::{LaunchCommand, Launcher, Program, slurm, variable};

/// This host, as the only host of a run.
pub(in crate::verb::run) struct Local {
    hosts: Vec<String>,
}

impl Local {
    pub(super) fn new() -> Self {
        Self {
            hosts: vec![crate::text::own_host_name()],
        }
    }
}

impl Launcher for Local {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn launch_commands(&self, program: &Program) -> Vec<LaunchCommand> {
        let (name, args) = program.words.split_first().expect("a program has a name");
        let mut command = Command::new(name);
        command.args(args);
        vec![LaunchCommand {
            command,
            hosts: vec![0],
        }]
    }

    fn line_on_host(&self, _: &str, line: &str) -> String {
        line.to_owned()
    }

    /// Returns false in a job of a batch system, which takes the host back when the job ends.
    fn keeps_hosts(&self) -> bool {
        let jobs = [slurm::JOB, "PBS_JOBID", "FLUX_JOB_ID"];
        jobs.iter().all(|job| variable(job).is_none())
    }
}
