//! The launcher for this host alone: it starts the program as a child.

use std::process::Command;

use super::{Launcher, Program, Start, slurm, variable};

pub(in crate::verb::run) struct Local {
    hosts: Vec<String>,
}

impl Local {
    pub(super) fn new() -> Self {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        Self { hosts: vec![host] }
    }
}

impl Launcher for Local {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn starts(&self, program: &Program) -> Vec<Start> {
        let (name, args) = program.words.split_first().expect("a program has a name");
        let mut command = Command::new(name);
        command.args(args);
        vec![Start {
            command,
            hosts: vec![0],
        }]
    }

    fn line_on(&self, _: &str, line: &str) -> String {
        line.to_owned()
    }

    /// A host of a batch system's job goes back to that system when the job ends.
    fn keeps_hosts(&self) -> bool {
        let jobs = [slurm::JOB, "PBS_JOBID", "FLUX_JOB_ID"];
        jobs.iter().all(|job| variable(job).is_none())
    }
}
