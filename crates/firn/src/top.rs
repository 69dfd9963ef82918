//! `firn top`: what a host's mounts, or the hosts of a job, do now.
//!
//! ```text
//!   firnd of each mount ──► thread of the mount ─┐
//!   mounts of this host ──► thread of the list ──┼──► Board ──► View ──► Screen ──► terminal, or text
//!   firn history DIR ─────► a child, seldom ─────┤                ▲
//!   hosts of the backing ─► a child ─────────────┘         keys, size
//! ```
//!
//! * [`sampler`] asks, each in a thread of its own or by a child, so that nothing that hangs holds up the screen.
//! * [`View`] is what was seen, and what the user chose: no I/O, no clock.
//! * [`screen`] draws a view, on a terminal as on a buffer.
//! * [`terminal`] reads keys, and gives the terminal back however it ends.

pub mod sampler;
pub mod screen;
pub mod terminal;

use std::collections::VecDeque;

use firn_protocol::{HostReport, Status};

use crate::job::{Host, Job};
use crate::verb::history::Listed;

/// Samples that are kept for a sparkline: as many as a wide terminal has columns.
const HISTORY_MAX: usize = 240;

/// Rates of the last samples, the newest last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    pub ingest: VecDeque<u64>,
    pub drain: VecDeque<u64>,
}

impl Rates {
    /// Adds a sample.
    pub fn push(&mut self, ingest: f64, drain: f64) {
        for (history, value) in [(&mut self.ingest, ingest), (&mut self.drain, drain)] {
            history.push_back(value.max(0.0) as u64);
            if history.len() > HISTORY_MAX {
                history.pop_front();
            }
        }
    }
}

/// A mount of this host.
#[derive(Clone, Debug)]
pub struct MountView {
    /// As people are shown it.
    pub mount_point: String,
    /// What its firnd said last; none: nothing yet.
    pub status: Option<Box<Status>>,
    /// Why it says nothing now, and for how many seconds it has said nothing.
    pub silent: Option<(String, f64)>,
    pub rates: Rates,
}

impl MountView {
    /// What its programs and lanes wait for.
    pub fn waits(&self) -> Vec<String> {
        let status = self.status.as_ref();
        status.map_or_else(Vec::new, |status| {
            crate::job::waits(&HostReport::of(status, 0))
        })
    }

    fn held_bytes(&self) -> u64 {
        self.status.as_ref().map_or(0, |status| status.held_bytes)
    }

    /// Order of trouble: the smaller, the worse; the numbers are those of a host of a job.
    pub fn rank(&self) -> u8 {
        let has_errors = |status: &Status| !status.errors.is_empty();
        match &self.status {
            _ if self.silent.is_some() => 0,
            Some(status) if has_errors(status) => 1,
            Some(_) if !self.waits().is_empty() => 4,
            // As of a host that is well.
            _ => 6,
        }
    }
}

/// What is known of the checkpoints of a directory.
#[derive(Clone, Debug, Default)]
pub enum Checkpoints {
    /// Nothing yet.
    #[default]
    Asked,
    /// The newest first.
    Listed(Vec<Listed>),
    /// Why they are not known.
    Unknown(String),
}

/// The job, as it was looked at last.
#[derive(Clone, Debug)]
pub struct JobView {
    /// What was found, or why nothing was; none: nothing yet.
    pub seen: Option<Result<Job, String>>,
    pub rates: Rates,
}

/// The table that keys move in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    /// Mounts, or hosts.
    #[default]
    Upper,
    /// Checkpoints.
    Lower,
}

/// What was seen, and what the user chose.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Name of this host.
    pub host: String,
    /// Seconds between samples.
    pub every_s: f64,
    pub is_paused: bool,
    pub shows_help: bool,
    /// Colours, or none.
    pub has_colour: bool,
    pub mounts: Vec<MountView>,
    /// Mounts that are not shown: their firnds have their sockets in another runtime directory.
    pub elsewhere: usize,
    /// Why the mounts cannot be listed.
    pub fault: Option<String>,
    /// Of the chosen mount, or of the job's mount on this host.
    pub checkpoints: Checkpoints,
    /// The hosts of the job; none: this host's mounts are shown.
    pub job: Option<JobView>,
    pub pane: Pane,
    /// Row that is chosen in each table.
    pub upper: usize,
    pub lower: usize,
    /// The mount or host of the row that the user chose: rows change their order. None: the first row, whatever it is.
    pub chosen: Option<String>,
}

impl View {
    /// Mounts, the one in trouble first, then the one that holds most.
    pub fn ordered_mounts(&self) -> Vec<&MountView> {
        let mut mounts: Vec<&MountView> = self.mounts.iter().collect();
        mounts.sort_by(|a, b| {
            let key = |mount: &MountView| (mount.rank(), std::cmp::Reverse(mount.held_bytes()));
            (key(a), &a.mount_point).cmp(&(key(b), &b.mount_point))
        });
        mounts
    }

    /// Hosts of the job that are shown, the one in trouble first.
    pub fn hosts(&self) -> Vec<&Host> {
        match self.job.as_ref().and_then(|job| job.seen.as_ref()) {
            Some(Ok(job)) => job.hosts.iter().filter(|host| !host.is_gone()).collect(),
            _ => Vec::new(),
        }
    }

    fn upper_len(&self) -> usize {
        match self.job {
            Some(_) => self.hosts().len(),
            None => self.mounts.len(),
        }
    }

    fn lower_len(&self) -> usize {
        match &self.checkpoints {
            Checkpoints::Listed(list) => list.len(),
            _ => 0,
        }
    }

    /// Moves in the table that has the keys.
    pub fn step(&mut self, rows: isize) {
        let (len, at) = match self.pane {
            Pane::Upper => (self.upper_len(), &mut self.upper),
            Pane::Lower => (self.lower_len(), &mut self.lower),
        };
        *at = at.saturating_add_signed(rows).min(len.saturating_sub(1));
        if self.pane == Pane::Upper {
            self.chosen = self.upper_names().into_iter().nth(self.upper);
        }
    }

    fn upper_names(&self) -> Vec<String> {
        match self.job {
            Some(_) => self.hosts().iter().map(|host| host.host.clone()).collect(),
            None => {
                let mounts = self.ordered_mounts();
                mounts
                    .iter()
                    .map(|mount| mount.mount_point.clone())
                    .collect()
            }
        }
    }

    /// Keeps what is chosen where it is now, or within what there is.
    pub fn clamp(&mut self) {
        let names = self.upper_names();
        let found = names
            .iter()
            .position(|name| Some(name) == self.chosen.as_ref());
        self.upper = found.unwrap_or(0);
        self.lower = self.lower.min(self.lower_len().saturating_sub(1));
    }
}
