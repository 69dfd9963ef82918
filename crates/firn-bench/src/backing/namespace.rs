//! A network namespace of this run's own (root only), for servers that shall be other hosts.

use std::process::Command;

use crate::cleanup::{Guard, defer};

use super::{run, run_quietly};

/// A network namespace, named after this process.
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes it, with its loopback up. `guards` gets what removes it, with all of its processes.
    pub fn create(guards: &mut Vec<Guard>) -> anyhow::Result<Self> {
        let name = format!("firn-bench-{}", std::process::id());
        let removed = name.clone();
        guards.push(defer(move || {
            // Servers leave their process group and some survive the end of their connections. The namespace is this
            // run's own, so whatever is in it is too.
            end_all(&run("ip", &["netns", "pids", &removed]).unwrap_or_default());
            run_quietly("ip", &["netns", "del", &removed]);
        }));
        let namespace = Self { name };
        ip(&format!("netns add {}", namespace.name))?;
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Its name, for `ip`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `ip ARGS` inside.
    pub fn ip(&self, args: &str) -> anyhow::Result<()> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Starts `program` with the namespace's network and this process's mounts.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name));
        command.arg(program);
        command
    }
}

/// `ip ARGS` in this process's namespace.
pub fn ip(args: &str) -> anyhow::Result<()> {
    run("ip", &args.split(' ').collect::<Vec<_>>()).map(drop)
}

/// Ends the processes whose numbers stand in `pids`, one a line.
fn end_all(pids: &str) {
    use rustix::process::{Pid, Signal, kill_process};
    for pid in pids
        .lines()
        .filter_map(|line| Pid::from_raw(line.trim().parse().ok()?))
    {
        let _ = kill_process(pid, Signal::KILL);
    }
}
