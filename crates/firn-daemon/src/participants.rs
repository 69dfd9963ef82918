//! Several hosts that commit together: which hosts they are, which process of this host used which file, and the text
//! of their conflicts.

use std::collections::HashMap;
use std::time::Duration;

use firn_backing::backoff::Backoff;
use firn_config::{Options, Participants};
use firn_transact::conflict::{AccessedFile, ConflictReport};
use firn_transact::{Expected, Members};

use crate::error::AttachError;
use crate::host_name::host_name;
use crate::process::process_of_thread;

/// Pauses between two reads of what other hosts have published.
pub(crate) const READ_RETRY: Backoff =
    Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
/// Limit of conflicts in an error message; the published verdict has all of them.
const LISTED_CONFLICTS_MAX: usize = 20;

/// Returns the hosts that commit transactions together, as the options count or name them, and the name of this host.
/// `None` if this host commits alone. Fails if the options name hosts without this one.
pub(crate) fn members(options: &Options) -> Result<Option<Members>, AttachError> {
    let expected = match &options.participants {
        Participants::Off => return Ok(None),
        Participants::Count(count) => Expected::Count(*count as usize),
        Participants::Hosts(hosts) => Expected::Hosts(hosts.clone()),
    };
    let host = host_name(options)?;
    if let Expected::Hosts(hosts) = &expected
        && !hosts.contains(&host)
    {
        return Err(AttachError::NoParticipant {
            host,
            participants: hosts.join(", "),
        });
    }
    Ok(Some(Members { host, expected }))
}

/// Merges the uses of each file by the threads of a process into one use by that process, because the kernel reports
/// the thread of each request. A thread that has ended counts under its own number.
pub(crate) fn merge_threads_of_process(mut used: Vec<AccessedFile>) -> Vec<AccessedFile> {
    let mut processes = HashMap::new();
    for file in &mut used {
        for (thread, accesses) in std::mem::take(&mut file.processes) {
            let process = *processes
                .entry(thread)
                .or_insert_with(|| process_of_thread(thread));
            let process_accesses = file.processes.entry(process).or_default();
            process_accesses.read.extend(&accesses.read);
            process_accesses.written.extend(&accesses.written);
        }
    }
    used
}

/// Describes the conflicts of a transaction for the user.
pub(crate) fn describe_conflict(report: &ConflictReport, scope: &str) -> String {
    let mut text = match report.total {
        1 => format!("the transaction of {scope} is not committed: 1 conflict between hosts"),
        total => {
            format!("the transaction of {scope} is not committed: {total} conflicts between hosts")
        }
    };
    for conflict in report.conflicts.iter().take(LISTED_CONFLICTS_MAX) {
        text += &format!("\n  {conflict}");
    }
    let listed = report.conflicts.len().min(LISTED_CONFLICTS_MAX) as u64;
    if report.total > listed {
        text += &format!("\n  and {} more", report.total - listed);
    }
    text + "\nthe transaction is kept: firn abort drops it; programs of several hosts that use the same bytes before a \
            commit need mode=shadow"
}
