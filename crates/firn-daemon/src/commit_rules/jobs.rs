//! Which processes are one job: those that were started by one process.
//!
//! The job of a process is the number of its highest ancestor below what starts jobs: init, a shell at a terminal, a process of
//! another user (sshd, a batch system). Ranks that mpirun or torchrun has started are one job; two runs from two terminals, from
//! one shell at a terminal, or in the background after their shell has ended, are two.

use std::fs;

/// Longer chains of ancestors are cut.
const ANCESTORS_MAX: usize = 256;

/// What /proc says of a process.
struct Relation {
    parent: u32,
    user: u32,
    /// It leads a session that has a terminal.
    is_shell: bool,
}

/// The number of the job of a process; its own number where nothing is known of it.
pub(super) fn job_of(process: u32) -> u32 {
    let mut top = process;
    let Some(mut relation) = relation_of(process) else {
        return process;
    };
    for _ in 0..ANCESTORS_MAX {
        if relation.is_shell {
            return top;
        }
        let Some(parent) = relation_of(relation.parent) else {
            return top;
        };
        let starts_jobs = relation.parent <= 1 || parent.is_shell || parent.user != relation.user;
        if starts_jobs {
            return top;
        }
        top = relation.parent;
        relation = parent;
    }
    top
}

fn relation_of(process: u32) -> Option<Relation> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name may have any characters, and ends with the last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |index: usize| fields.get(index)?.parse::<i64>().ok();
    let (parent, session, terminal) = (field(1)?, field(3)?, field(4)?);
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    Some(Relation {
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
