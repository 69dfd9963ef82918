//! The launcher for the hosts of a Flux instance, by `flux exec`.

use std::process::Command;

use super::{Launcher, Program, Start, ask_for_hosts, variable};
use crate::failure::Failure;

/// Variable that is set in a batch script or an allocation. Either is a Flux instance of its own.
const INSTANCE: &str = "FLUX_URI";
/// Variable that is set in the processes of a job in that instance.
const TASK: &str = "FLUX_TASK_RANK";

/// The hosts of a Flux instance.
pub(in crate::verb::run) struct Flux {
    hosts: Vec<String>,
    /// Name that differs from those of other instances on the same hosts.
    name: String,
}

/// Returns whether this process has a Flux instance of its own. That is false for a process of a job in the instance,
/// which shares the hosts with others.
pub(super) fn is_in_instance() -> bool {
    variable(INSTANCE).is_some() && variable(TASK).is_none()
}

impl Flux {
    pub(super) fn of_instance() -> Result<Self, Failure> {
        let mut command = Command::new("flux");
        command.args(["hostlist", "--expand", "instance"]);
        let hosts = ask_for_hosts(command)?;
        let mut command = Command::new("flux");
        command.args(["getattr", "jobid"]);
        // Only an instance that is a job of another instance has a number.
        let name = ask_for_hosts(command).map_or_else(|_| "flux".into(), |name| name.concat());
        let name = name.chars().filter(char::is_ascii_alphanumeric).collect();
        Ok(Self { hosts, name })
    }
}

impl Launcher for Flux {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn starts(&self, program: &Program) -> Vec<Start> {
        let mut command = Command::new("flux");
        command.args(["exec", "--dir=/"]);
        program.append_to(&mut command);
        vec![Start {
            command,
            hosts: (0..self.hosts.len()).collect(),
        }]
    }

    fn line_on(&self, host: &str, line: &str) -> String {
        format!("flux run -N 1 --requires=host:{host} {line}")
    }

    fn keeps_hosts(&self) -> bool {
        false
    }

    fn default_prefix(&self) -> String {
        format!("run.{}", self.name)
    }
}
