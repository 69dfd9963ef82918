//! The launcher for hosts that a file lists. It starts the program on each host by a remote shell such as ssh.
//!
//! Relies on the remote shell. Its last two arguments are a host and one command line in the syntax of sh(1). It must
//! pass on standard input and output, and end when the command ends. It need not pass on the environment, because the
//! command line sets the variables that the program needs.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use super::{LaunchCommand, Launcher, Program, variable};
use crate::failure::{Failure, USAGE};
use crate::text;

/// Variable with the path of a file that names the hosts of a PBS job, once for each process.
const PBS_HOSTS: &str = "PBS_NODEFILE";
const PBS_JOB: &str = "PBS_JOBID";
/// Maximum size in bytes of a file with hosts: 100,000 hosts with names of 40 bytes.
const HOSTS_BYTES_MAX: u64 = 4 << 20;

/// The hosts of a file.
pub(in crate::verb::run) struct RemoteShell {
    /// Names of the hosts.
    hosts: Vec<String>,
    /// The shell and its arguments. A host and a command line follow them.
    shell: Vec<String>,
    /// Id of the PBS job, or `pbs` if the id is unknown. `None` means that the hosts are not those of a PBS job.
    pbs_job: Option<String>,
}

/// Returns whether this process runs in a PBS job.
pub(super) fn is_in_pbs_job() -> bool {
    variable(PBS_HOSTS).is_some()
}

impl RemoteShell {
    /// Reads the hosts from a file. Fails if the file cannot be read, or names no valid hosts.
    pub(super) fn from_file(file: &Path, shell: Vec<String>) -> Result<Self, Failure> {
        let shown_path = text::path(file);
        let mut list = String::new();
        std::fs::File::open(file)
            .and_then(|opened| opened.take(HOSTS_BYTES_MAX).read_to_string(&mut list))
            .map_err(|error| {
                let text = format!("cannot read the hosts in {shown_path}: {error}");
                Failure::new(USAGE, text)
            })?;
        let hosts = parse_hosts(&list)
            .map_err(|error| Failure::new(USAGE, format!("the hosts in {shown_path}: {error}")))?;
        if shell.is_empty() {
            return Err(Failure::new(USAGE, "--remote-shell names no program"));
        }
        Ok(Self {
            hosts,
            shell,
            pbs_job: None,
        })
    }

    /// Reads the hosts of the enclosing PBS job. Fails outside a job, and as [`RemoteShell::from_file`] does.
    pub(super) fn from_pbs_job(shell: Vec<String>) -> Result<Self, Failure> {
        let Some(file) = variable(PBS_HOSTS) else {
            let text = format!("{PBS_HOSTS} is not set: run it in a PBS job (qsub)");
            return Err(Failure::new(USAGE, text));
        };
        Ok(Self {
            pbs_job: Some(variable(PBS_JOB).unwrap_or_else(|| "pbs".into())),
            ..Self::from_file(Path::new(&file), shell)?
        })
    }
}

/// Parses a list of hosts. The first word of each line is a host; the number of processes in `n17:4` is ignored.
///
/// Returns each host once. Fails if the list has no host, or a word that cannot be a host. The error says which.
fn parse_hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for line in list.lines() {
        let line_without_comment = line.split('#').next().unwrap_or_default();
        let Some(word) = line_without_comment.split_whitespace().next() else {
            continue;
        };
        let host = match word.rsplit_once(':') {
            Some((host, processes)) if processes.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => word,
        };
        // The name becomes an argument of the remote shell, so it must not look like an option.
        if host.is_empty() || host.starts_with('-') {
            return Err(format!("`{word}` is not a host"));
        }
        if !hosts.iter().any(|known| known == host) {
            hosts.push(host.to_owned());
        }
    }
    if hosts.is_empty() {
        return Err("there are none; write one host on each line".into());
    }
    Ok(hosts)
}

impl Launcher for RemoteShell {
    fn hosts(&self) -> &[String] {
        &self.hosts
    }

    fn launch_commands(&self, program: &Program) -> Vec<LaunchCommand> {
        let remote_line = remote_command_line(program);
        let mut launch_commands = Vec::with_capacity(self.hosts.len());
        for (index, host) in self.hosts.iter().enumerate() {
            let mut command = Command::new(&self.shell[0]);
            command.args(&self.shell[1..]).arg(host).arg(&remote_line);
            launch_commands.push(LaunchCommand {
                command,
                hosts: vec![index],
            });
        }
        launch_commands
    }

    fn line_on_host(&self, host: &str, line: &str) -> String {
        format!("{} {host} {line}", self.shell.join(" "))
    }

    fn keeps_hosts(&self) -> bool {
        self.pbs_job.is_none()
    }

    fn default_prefix(&self) -> String {
        let Some(job) = &self.pbs_job else {
            return "run".into();
        };
        let job_name: String = job.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("run.{job_name}")
    }
}

/// Returns the command line for a host's sh(1): it sets the variables, and replaces the shell by the program.
fn remote_command_line(program: &Program) -> String {
    let mut line = String::from("exec env");
    for (name, value) in &program.variables {
        line += &format!(" {}={}", name.to_string_lossy(), quote_for_sh(value));
    }
    for word in &program.words {
        line += &format!(" {}", quote_for_sh(word));
    }
    line
}

/// Quotes text as one word of sh(1).
fn quote_for_sh(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_hosts_may_be_that_of_an_mpi_or_of_pbs() {
        let list = "# of the job\n\nn1 slots=4\nn2:8\nn1\n  n3.site  # spare\n";
        assert_eq!(parse_hosts(list).unwrap(), ["n1", "n2", "n3.site"]);
        for wrong in ["", "# none\n", "n1\n-oProxyCommand=x\n", ":4\n"] {
            assert!(parse_hosts(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_command_line_is_one_for_any_word() {
        let program = Program {
            words: ["/opt/it's/firn", "run-host", "5"].map(Into::into).into(),
            variables: vec![("FIRN_RUNTIME_DIR".into(), "/a b".into())],
        };
        assert_eq!(
            remote_command_line(&program),
            r"exec env FIRN_RUNTIME_DIR='/a b' '/opt/it'\''s/firn' 'run-host' '5'"
        );
    }
}
