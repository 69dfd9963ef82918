//! The launcher for the hosts of a Flux instance. `flux exec` starts the program on all of them.

use std::process::Command;

use super::{LaunchCommand, Launcher, Program, query_hosts, variable};
use crate::failure::Failure;

/// Variable that is set in a batch script or an allocation. Each of them is a separate Flux instance.
const INSTANCE: &str = "FLUX_URI";
/// Variable that is set in the processes of a job in that instance.
const TASK: &str = "FLUX_TASK_RANK";

/// The hosts of a Flux instance.
pub(in crate::verb::run) struct Flux {
    hosts: Vec<String>,
    /// Number of the instance as a job, or `flux`. Instances on the same hosts have different numbers.
    name: String,
}

/// Returns whether this process may use all hosts of a Flux instance. A process of a job in the instance may not,
/// because other jobs share the hosts.
pub(super) fn is_in_instance() -> bool {
    variable(INSTANCE).is_some() && variable(TASK).is_none()
}

impl Flux {
    /// Asks Flux for the hosts of the enclosing instance. Fails if Flux does not answer.
    pub(super) fn from_instance() -> Result<Self, Failure> {
        let mut host_query = Command::new("flux");
        host_query.args(["hostlist", "--expand", "instance"]);
        let hosts = query_hosts(host_query)?;
        let mut number_query = Command::new("flux");
        number_query.args(["getattr", "jobid"]);
        let number = match query_hosts(number_query) {
            Ok(words) => words.concat(),
            // Only an instance that is a job of another instance has a number.
            Err(_) => "flux".into(),
        };
        let name = number.chars().filter(char::is_ascii_alphanumeric).collect();
        Ok(Self { hosts, name })
    }
}

impl Launcher for Flux {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn launch_commands(&self, program: &Program) -> Vec<LaunchCommand> {
        let mut command = Command::new("flux");
        command.args(["exec", "--dir=/"]);
        program.append_to(&mut command);
        vec![LaunchCommand {
            command,
            hosts: (0..self.hosts.len()).collect(),
        }]
    }

    fn line_on_host(&self, host: &str, line: &str) -> String {
        format!("flux run -N 1 --requires=host:{host} {line}")
    }

    fn keeps_hosts(&self) -> bool {
        false
    }

    fn default_prefix(&self) -> String {
        format!("run.{}", self.name)
    }
}
