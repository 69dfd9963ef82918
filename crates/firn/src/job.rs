//! A job over several hosts that share a backing, as it can be seen from one of them, or from a host that takes no part.
//!
//! Promises
//! * No host is asked over the network: what hosts say stands beside their leases in the backing.
//! * [`Job::look`] returns within its patience, whatever the backing and the firnd of this host do.
//! * What was not answered is said ([`Job::notes`]), and what was is shown.

mod advice;
mod look;
mod rows;
mod text;

use std::collections::BTreeMap;

use firn_protocol::HostReport;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

pub use firn_hosts::Life;
pub use look::{look_at_backing, look_at_mount};
pub use rows::{program_wait, waits};
pub use text::{hosts_text, status_text};

/// What is known of the hosts of a backing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The backing, canonical where it answered.
    pub backing: BytePath,
    /// Sums over the hosts that have it mounted, and what dead ones left.
    pub total: Total,
    /// Hosts, the one in trouble first.
    pub hosts: Vec<Host>,
    /// What was not answered, and what else is to be known.
    pub notes: Vec<String>,
    /// The backing, or the firnd of this host, did not answer.
    pub is_partial: bool,
}

/// Sums over hosts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Total {
    /// Hosts that beat.
    pub alive: u64,
    /// Hosts that do not beat, and are not known to be dead.
    pub silent: u64,
    /// Hosts that died.
    pub dead: u64,
    /// Bytes that are not in the backing yet.
    pub held_bytes: u64,
    /// Files with such bytes.
    pub held_files: u64,
    /// Those of these bytes that dead and unmounted hosts have: nothing drains them by itself.
    pub stranded_bytes: u64,
    /// Files in logs: the most that a host knows of.
    pub logged_files: u64,
    /// Bytes that hosts have written to logs and that are not flattened yet.
    pub logged_bytes: u64,
    /// Bytes written to the backing since the hosts mounted it.
    pub drain_bytes: u64,
    /// Files that were synced and not changed since, as far as hosts remember them.
    pub durable_files: u64,
    /// Their bytes.
    pub durable_bytes: u64,
    /// Bytes taken from programs since the hosts mounted the backing.
    pub ingest_bytes: u64,
    /// In a second, of hosts that beat.
    pub ingest_bytes_per_second: f64,
    /// In a second, of hosts that beat.
    pub drain_bytes_per_second: f64,
    /// Writers that wait for room in memory.
    pub waiting_writers: u64,
    /// Errors not yet dealt with.
    pub errors: u64,
}

impl Total {
    /// How many hosts there are in each state, as words; the states of no host are left out.
    pub fn hosts_by_state(&self) -> String {
        let states = [
            (self.alive, "alive"),
            (self.silent, "silent"),
            (self.dead, "dead"),
        ];
        let states = states.iter().filter(|(hosts, _)| *hosts > 0);
        let words: Vec<String> = states
            .map(|(hosts, state)| format!("{hosts} {state}"))
            .collect();
        words.join(", ")
    }
}

/// A host that has, or had, the backing mounted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub host: String,
    /// Whether it lives.
    pub state: Life,
    /// What that rests on, in words.
    pub evidence: String,
    /// Whether its process is there, as its lock says.
    pub is_locked: bool,
    /// Time since its last beat, by the clock of the backing; none: it cannot be told.
    pub beat_age_seconds: Option<f64>,
    /// Time since it mounted the backing, as it counts; none: it has not said.
    pub mounted_seconds: Option<f64>,
    /// Its firnd.
    pub pid: Option<u32>,
    /// What it uses the backing for.
    pub uses: Vec<String>,
    /// How it mounts, by names of options and formats.
    pub options: BTreeMap<String, String>,
    /// What it does otherwise than most hosts.
    pub differences: Vec<String>,
    /// Files in logs that cannot be flattened before this host has closed them.
    pub keeps_from_flattening: u64,
    /// What it waits for.
    pub waits: Vec<String>,
    /// What to do, with the command.
    pub advice: Vec<String>,
    /// How it was at its last beat; none: it has not said.
    pub report: Option<HostReport>,
}

impl Host {
    /// Bytes that it holds, or held at its last beat.
    pub fn held_bytes(&self) -> u64 {
        self.report.as_ref().map_or(0, |report| report.held_bytes)
    }

    /// Whether it needs no mention: it left, and has nothing.
    pub fn is_gone(&self) -> bool {
        self.state == Life::Left && self.held_bytes() == 0
    }

    /// Whether its figures are those of a mount that drains.
    fn is_running(&self) -> bool {
        self.state.may_live()
    }

    /// Order of trouble: the smaller, the worse.
    pub fn rank(&self) -> u8 {
        let report = self.report.as_ref();
        let has_errors = report.is_some_and(|report| report.errors > 0);
        match self.state {
            Life::Dead if self.report.is_none() || self.held_bytes() > 0 => 0,
            Life::Silent => 1,
            Life::Dead => 2,
            Life::Left if self.held_bytes() > 0 => 2,
            Life::Alive if has_errors => 3,
            Life::Alive if !self.waits.is_empty() => 4,
            Life::Alive if !self.differences.is_empty() => 5,
            Life::Alive => 6,
            Life::Left => 7,
        }
    }
}

/// In one word, as people are shown it.
pub fn life_word(life: Life) -> &'static str {
    match life {
        Life::Alive => "alive",
        Life::Silent => "silent",
        Life::Dead => "dead",
        Life::Left => "left",
    }
}

impl Total {
    fn of(hosts: &[Host]) -> Self {
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
            if !host.is_running() {
                total.stranded_bytes += report.held_bytes;
                continue;
            }
            total.logged_bytes += report.logged_bytes;
            total.logged_files = total.logged_files.max(report.logged_files);
            total.waiting_writers += report.waiting_writers;
            total.errors += report.errors;
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
