//! The launcher for the hosts of a Flux instance. `flux exec` starts the program on all of them.

use std::process::Command;

use super::{LaunchCommand, Launcher, Program, query_words, variable};
use crate::failure::Failure;

/// Variable that is set in a batch script or an allocation. Each of them is a separate Flux instance.
const INSTANCE: &str = "FLUX_URI";
/// Variable that is set in the processes of a job in that instance.
const TASK: &str = "FLUX_TASK_RANK";

/// The hosts of a Flux instance.
pub(in crate::verb::run) struct Flux {
    /// Names of the hosts.
    hosts: Vec<String>,
    /// Job id of the instance, or `flux` if it has none. It differs between instances on the same hosts.
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
        let hosts = query_words(host_query)?;
        let mut job_id_query = Command::new("flux");
        job_id_query.args(["getattr", "jobid"]);
        let job_id = match query_words(job_id_query) {
            Ok(words) => words.concat(),
            // Only an instance that is a job of another instance has an id.
            Err(_) => "flux".into(),
        };
        let name = job_id.chars().filter(char::is_ascii_alphanumeric).collect();
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
