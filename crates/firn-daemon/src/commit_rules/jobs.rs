//! Says which processes are one job: the processes that were started by one process.
//!
//! The number of a job is the process number of the highest ancestor below a process that starts jobs. Jobs are started
//! by init, by a shell at a terminal, and by a process of another user (sshd, a batch system).
//!
//! So the ranks that mpirun or torchrun has started are one job. Two runs are two jobs if they come from two terminals,
//! from one shell at a terminal, or run in the background after their shell has ended.

use std::fs;

/// Limit of ancestors that are followed; a longer chain ends there.
const ANCESTORS_MAX: usize = 256;

/// The relations of a process to others, from /proc.
struct ProcessRelations {
    parent: u32,
    user: u32,
    /// The process leads a session that has a terminal, as an interactive shell does.
    is_shell: bool,
}

/// Returns the number of the job of a process: the process number of its highest ancestor below a process that starts
/// jobs (init, a shell, a process of another user). It is the process's own number if /proc does not have the process.
pub(super) fn job_of(process: u32) -> u32 {
    let mut top = process;
    let Some(mut relations) = read_relations(process) else {
        return process;
    };
    for _ in 0..ANCESTORS_MAX {
        if relations.is_shell {
            return top;
        }
        let Some(parent) = read_relations(relations.parent) else {
            return top;
        };
        let starts_jobs = relations.parent <= 1 || parent.is_shell || parent.user != relations.user;
        if starts_jobs {
            return top;
        }
        top = relations.parent;
        relations = parent;
    }
    top
}

/// Reads the relations of a process from /proc; `None` if the process is gone or cannot be read.
fn read_relations(process: u32) -> Option<ProcessRelations> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program may have any characters; the last parenthesis ends it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |index: usize| fields.get(index)?.parse::<i64>().ok();
    let parent = field(1)?;
    let session = field(3)?;
    let terminal = field(4)?;
    let user = firn_process::read_status(process, "Uid")?;
    Some(ProcessRelations {
        parent: u32::try_from(parent).ok()?,
        user: user.split_ascii_whitespace().next()?.parse().ok()?,
        is_shell: terminal != 0 && session == i64::from(process),
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio, id};

    use super::*;

    #[test]
    fn a_child_is_of_the_job_of_its_parent() {
        let mut child = Command::new("cat");
        let mut child = child.stdin(Stdio::piped()).spawn().expect("cat");
        assert_eq!(job_of(child.id()), job_of(id()));
        drop(child.stdin.take());
        child.wait().expect("wait");
    }
}
