//! A job: the hosts that share a backing (the directory that they mount), as one host sees them. That host need not
//! have the backing mounted.
//!
//! Terms
//! * A *lease* is a file in the backing that shows that a host is alive. The host renews it every two seconds. Each
//!   renewal is a *heartbeat*.
//! * A *report* is the status that a host writes beside its lease.
//! * *firnd* is the daemon of a mount. It *drains* data: it writes data that is only in memory to the backing.
//!
//! Promises
//! * No host is asked over the network: all facts come from the leases and reports in the backing.
//! * [`Job::inspect`] returns at its timeout, even if the backing or the firnd of this host hangs.
//! * [`Job::notes`] names each source that did not answer, and everything that answered is shown.

mod advice;
mod inspect;
mod rows;
mod text;

use std::collections::BTreeMap;

use firn_protocol::HostReport;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

pub use firn_hosts::Life;
pub use inspect::{inspect_backing, inspect_own_mount};
pub use rows::{describe_program_wait, describe_waits};
pub use text::{hosts_text, status_text};

/// What is known of the hosts of a backing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Path of the backing. It is canonical if the backing answered.
    pub backing: BytePath,
    /// Sums over the hosts that have the backing mounted, and over what dead hosts left.
    pub total: JobTotals,
    /// Hosts. Those with the worst problems come first.
    pub hosts: Vec<Host>,
    /// Sentences about sources that did not answer, and about other things that the user should know.
    pub notes: Vec<String>,
    /// Whether the backing, or the firnd of this host, did not answer.
    pub is_partial: bool,
}

/// Sums over the hosts of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobTotals {
    /// Hosts whose leases are renewed.
    pub alive: u64,
    /// Hosts whose leases are not renewed, and which are not known to be dead.
    pub silent: u64,
    /// Hosts that are known to be dead.
    pub dead: u64,
    /// Bytes that are not in the backing yet.
    pub held_bytes: u64,
    /// Files with bytes that are not in the backing yet.
    pub held_files: u64,
    /// The part of `held_bytes` that is on dead or unmounted hosts. No running firnd drains these bytes.
    pub stranded_bytes: u64,
    /// Files that lie in logs (layout=log): the largest count that a single host reports.
    pub logged_files: u64,
    /// Bytes that hosts have written to logs, and that are not flattened into plain files yet.
    pub logged_bytes: u64,
    /// Bytes written to the backing since the hosts mounted it.
    pub drain_bytes: u64,
    /// Files that were synced and not changed since, as far as the hosts remember them.
    pub durable_files: u64,
    /// Bytes of the files that `durable_files` counts.
    pub durable_bytes: u64,
    /// Bytes received from programs since the hosts mounted the backing.
    pub ingest_bytes: u64,
    /// Bytes per second received from programs, over the hosts whose leases are renewed.
    pub ingest_bytes_per_second: f64,
    /// Bytes per second written to the backing, over the hosts whose leases are renewed.
    pub drain_bytes_per_second: f64,
    /// Writers that wait for free memory.
    pub waiting_writers: u64,
    /// Errors that are still recorded.
    pub errors: u64,
}

impl JobTotals {
    /// Returns how many hosts are in each state, in words. States without a host are left out.
    pub fn hosts_by_state(&self) -> String {
        let hosts_by_state = [
            (self.alive, "alive"),
            (self.silent, "silent"),
            (self.dead, "dead"),
        ];
        let mut words = Vec::new();
        for (host_count, state) in hosts_by_state {
            if host_count > 0 {
                words.push(format!("{host_count} {state}"));
            }
        }
        words.join(", ")
    }
}

/// A host that has the backing mounted, or had it mounted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Name of the host.
    #[serde(rename = "host")]
    pub name: String,
    /// Whether the host is alive, silent, dead, or has left.
    pub state: Life,
    /// The evidence for `state`, in words.
    pub evidence: String,
    /// Whether the lease is locked, which shows that the host's process exists.
    pub is_locked: bool,
    /// Seconds since the last heartbeat, by the clock of the backing. `None` means that the time is unknown.
    #[serde(rename = "heartbeat_age_seconds")]
    pub heartbeat_age_seconds: Option<f64>,
    /// Seconds since the host mounted the backing, by its own report. `None` means that the host has not reported it.
    pub mounted_seconds: Option<f64>,
    /// Process id of the host's firnd.
    pub pid: Option<u32>,
    /// What the host uses the backing for.
    pub uses: Vec<String>,
    /// How the host mounts: the values of the options and formats that hosts have to agree on.
    pub options: BTreeMap<String, String>,
    /// Options in which this host differs from most hosts.
    pub differences: Vec<String>,
    /// Number of files in logs that this host keeps from being flattened (copied into plain files), because it may
    /// still write to them.
    pub keeps_from_flattening: u64,
    /// What programs and lanes (I/O servers) of the host wait for.
    pub waits: Vec<String>,
    /// What the user should do, with the commands.
    pub advice: Vec<String>,
    /// The host's last report. `None` means that it has written none.
    pub report: Option<HostReport>,
}

impl Host {
    /// Returns how many bytes the host holds that are not in the backing yet, by its last report. Returns 0 without a
    /// report.
    pub fn held_bytes(&self) -> u64 {
        self.report.as_ref().map_or(0, |report| report.held_bytes)
    }

    /// Returns whether the host needs no mention: it has unmounted, and holds nothing.
    pub fn is_gone(&self) -> bool {
        self.state == Life::Left && self.held_bytes() == 0
    }

    /// Returns whether the host's figures are those of a mount that still drains.
    fn is_running(&self) -> bool {
        self.state.may_live()
    }

    /// Returns how much attention the host needs.
    pub fn trouble(&self) -> Trouble {
        let report = self.report.as_ref();
        let has_errors = report.is_some_and(|report| report.errors > 0);
        match self.state {
            Life::Dead if self.report.is_none() || self.held_bytes() > 0 => Trouble::DataAtRisk,
            Life::Silent => Trouble::NoAnswer,
            Life::Dead => Trouble::Gone,
            Life::Left if self.held_bytes() > 0 => Trouble::Gone,
            Life::Alive if has_errors => Trouble::HostErrors,
            Life::Alive if !self.waits.is_empty() => Trouble::Waits,
            Life::Alive if !self.differences.is_empty() => Trouble::OptionsDiffer,
            Life::Alive => Trouble::Healthy,
            Life::Left => Trouble::HasLeft,
        }
    }
}

/// How much attention a host or a mount needs. The worst variant comes first, and tables are sorted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// The host is dead, and data that it held may be lost.
    DataAtRisk,
    /// The host does not renew its lease, or the firnd of the mount does not answer.
    NoAnswer,
    /// The mount has errors.
    MountErrors,
    /// The host is dead without data, or it has unmounted and left data in memory.
    Gone,
    /// The host of a job has errors.
    HostErrors,
    /// Programs, lanes or the drain wait for something.
    Waits,
    /// Options of the host differ from those of the other hosts.
    OptionsDiffer,
    /// The host or mount is healthy.
    Healthy,
    /// The host has unmounted and left nothing behind.
    HasLeft,
}

/// Colour in which a table shows a row with some trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleColour {
    /// The colour of an error.
    Error,
    /// The colour of a warning.
    Warning,
    /// No colour.
    Plain,
}

impl Trouble {
    /// Returns the colour of the row.
    pub fn colour(self) -> TroubleColour {
        match self {
            Self::DataAtRisk | Self::NoAnswer | Self::MountErrors => TroubleColour::Error,
            Self::Gone | Self::HostErrors | Self::Waits => TroubleColour::Warning,
            Self::OptionsDiffer | Self::Healthy | Self::HasLeft => TroubleColour::Plain,
        }
    }
}

/// Returns the word that users see for a host's state.
pub fn life_word(life: Life) -> &'static str {
    match life {
        Life::Alive => "alive",
        Life::Silent => "silent",
        Life::Dead => "dead",
        Life::Left => "left",
    }
}

impl JobTotals {
    /// Sums up the hosts. First come the figures of all hosts, then those of hosts with a running firnd (the daemon).
    ///
    /// Bytes that are held (in memory only) on a host without a running firnd count as stranded: nothing drains them.
    /// Rates count only hosts that are alive: they renew their leases, the files that show that they live.
    fn sum_of(hosts: &[Host]) -> Self {
        let mut total = Self::default();
        for host in hosts {
            let report = host.report.clone().unwrap_or_default();
            match host.state {
                Life::Alive => total.alive += 1,
                Life::Silent => total.silent += 1,
                Life::Dead => total.dead += 1,
                Life::Left => {}
            }
            total.held_bytes += report.held_bytes;
            total.held_files += report.held_files;
            total.drain_bytes += report.drain_bytes;
            total.durable_files += report.durable_files;
            total.durable_bytes += report.durable_bytes;
            total.ingest_bytes += report.ingest_bytes;
            // The figures below count only hosts with a running firnd: those of other hosts are no longer current.
            if !host.is_running() {
                total.stranded_bytes += report.held_bytes;
                continue;
            }
            total.logged_bytes += report.logged_bytes;
            // All hosts see the same files in logs, so a sum would count each file several times.
            total.logged_files = total.logged_files.max(report.logged_files);
            total.waiting_writers += report.waiting_writers;
            total.errors += report.errors;
            // The rates of a silent host are from its last heartbeat, and may be old.
            if host.state == Life::Alive {
                total.ingest_bytes_per_second += report.ingest_bytes_per_second;
                total.drain_bytes_per_second += report.drain_bytes_per_second;
            }
        }
        total
    }
}

#[cfg(test)]
pub use text::tests::example;
