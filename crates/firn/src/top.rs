//! `firn top`: a full-screen display of what the mounts of a host, or the hosts of a job, are doing. firnd is the daemon
//! of a mount. A job is the hosts that share a backing, the directory that they mount.
//!
//! ```text
//!   firnd of each mount ──► thread of the mount ─┐
//!   mounts of this host ──► thread of the list ──┼─► Answers ─► View ──► Screen ──► terminal, or text
//!   firn history DIR ─────► a child process ─────┤                ▲
//!   hosts of the backing ─► a child process ─────┘         keys, size
//! ```
//!
//! Parts
//! * [`sampler`] asks each source in a separate thread or child process, so that a slow answer never delays the
//!   screen. It stores the last answer of each source.
//! * [`View`] is the state that the screen shows: a copy of the answers, and the user's selection. Its functions use
//!   neither I/O nor a clock.
//! * [`screen`] draws a view on a terminal or into a buffer.
//! * [`terminal`] reads keys, and restores the terminal in every case.

pub mod sampler;
pub mod screen;
pub mod terminal;

use std::cmp::Reverse;
use std::collections::VecDeque;

use firn_protocol::{HostReport, Status};

use crate::job::{Host, Job, Trouble};
use crate::verb::history::CheckpointEntry;

/// User id for a [`HostReport`] that is made from a status. The texts that are derived from the report do not contain
/// it.
const UNUSED_USER_ID: u32 = 0;
/// Maximum number of samples for a sparkline: as many as a wide terminal has columns.
const HISTORY_MAX: usize = 240;

/// Rates of the last samples in bytes per second, with the newest last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Bytes per second from programs, one value per sample.
    pub ingest: VecDeque<u64>,
    /// Bytes per second to the backing, one value per sample.
    pub drain: VecDeque<u64>,
}

impl Rates {
    /// Adds a sample, and drops the oldest one if the history is full.
    pub fn push(&mut self, ingest: f64, drain: f64) {
        push_sample(&mut self.ingest, ingest);
        push_sample(&mut self.drain, drain);
    }
}

fn push_sample(history: &mut VecDeque<u64>, bytes_per_second: f64) {
    history.push_back(bytes_per_second.max(0.0) as u64);
    if history.len() > HISTORY_MAX {
        history.pop_front();
    }
}

/// A mount of this host.
#[derive(Clone, Debug)]
pub struct MountView {
    /// Mount point as it is shown, with special characters escaped.
    pub mount_point: String,
    /// The last status from its firnd. `None` means that none has arrived yet.
    pub status: Option<Box<Status>>,
    /// Why its firnd does not answer. `None` means that it answers.
    pub silence: Option<FirndSilence>,
    /// Rates of the mount.
    pub rates: Rates,
}

/// The failure of a firnd to answer.
#[derive(Clone, Debug)]
pub struct FirndSilence {
    /// Error of the last question.
    pub error: String,
    /// Seconds since the last answer.
    pub seconds: f64,
}

impl MountView {
    /// Returns sentences about what its programs and lanes (I/O servers) wait for.
    pub fn waits(&self) -> Vec<String> {
        let Some(status) = &self.status else {
            return Vec::new();
        };
        crate::job::describe_waits(&HostReport::from_status(status, UNUSED_USER_ID))
    }

    fn held_bytes(&self) -> u64 {
        self.status.as_ref().map_or(0, |status| status.held_bytes)
    }

    /// Returns how much attention the mount needs.
    pub fn trouble(&self) -> Trouble {
        if self.silence.is_some() {
            return Trouble::NoAnswer;
        }
        match &self.status {
            Some(status) if !status.errors.is_empty() => Trouble::MountErrors,
            Some(_) if !self.waits().is_empty() => Trouble::Waits,
            Some(_) | None => Trouble::Healthy,
        }
    }
}

/// What is known of the checkpoints of a directory.
#[derive(Clone, Debug, Default)]
pub enum Checkpoints {
    /// No answer has arrived yet.
    #[default]
    Loading,
    /// The checkpoints, with the newest first.
    Listed(Vec<CheckpointEntry>),
    /// Why the checkpoints are unknown.
    Unknown(String),
}

/// The job whose hosts are shown.
#[derive(Clone, Debug)]
pub struct JobView {
    /// The job, or why it is unknown. `None` means that no answer has arrived yet.
    pub answer: Option<Result<Job, String>>,
    /// Rates of all hosts of the job together.
    pub rates: Rates,
}

/// The table in which keys move the selection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    /// The table of mounts or hosts.
    #[default]
    Upper,
    /// The table of checkpoints.
    Lower,
}

/// The state that the screen shows: the answers of the sampler, and the user's selection.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Name of this host.
    pub host: String,
    /// Seconds between two samples.
    pub interval_s: f64,
    /// Whether samples are paused.
    pub is_paused: bool,
    /// Whether the help covers the screen.
    pub shows_help: bool,
    /// Whether the screen has colours.
    pub has_colour: bool,
    /// The mounts of this host, in the order of their mount points.
    pub mounts: Vec<MountView>,
    /// Number of mounts that are not shown, because the sockets of their firnds are in another runtime directory.
    pub unreachable_mounts: usize,
    /// Why the mounts cannot be listed.
    pub list_error: Option<String>,
    /// Checkpoints of the selected mount, or of the job's mount on this host.
    pub checkpoints: Checkpoints,
    /// The job. `None` means that this host's mounts are shown.
    pub job: Option<JobView>,
    /// The table in which keys move the selection.
    pub pane: Pane,
    /// Index of the selected row in the table of mounts or hosts.
    pub upper_row: usize,
    /// Index of the selected row in the table of checkpoints.
    pub lower_row: usize,
    /// Name of the mount or host that the user selected, because rows change their order. `None` means the first row.
    pub selected_name: Option<String>,
}

impl View {
    /// Returns the mounts, ordered by trouble and then by held bytes.
    pub fn ordered_mounts(&self) -> Vec<&MountView> {
        let mut mounts: Vec<&MountView> = self.mounts.iter().collect();
        mounts.sort_by(|a, b| {
            let order = |mount: &MountView| (mount.trouble(), Reverse(mount.held_bytes()));
            order(a)
                .cmp(&order(b))
                .then_with(|| a.mount_point.cmp(&b.mount_point))
        });
        mounts
    }

    /// Returns the hosts of the job that are shown. Those with the worst problems come first.
    pub fn hosts(&self) -> Vec<&Host> {
        match self.job.as_ref().and_then(|job| job.answer.as_ref()) {
            Some(Ok(job)) => job.hosts.iter().filter(|host| !host.is_gone()).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the number of rows in the table of mounts or hosts.
    fn upper_row_count(&self) -> usize {
        match self.job {
            Some(_) => self.hosts().len(),
            None => self.mounts.len(),
        }
    }

    /// Returns the number of rows in the table of checkpoints.
    fn lower_row_count(&self) -> usize {
        match &self.checkpoints {
            Checkpoints::Listed(list) => list.len(),
            _ => 0,
        }
    }

    /// Moves the choice by `rows` in the table that the keys control. The choice stops at the first and the last row.
    pub fn move_choice(&mut self, rows: isize) {
        let (row_count, selected_row) = match self.pane {
            Pane::Upper => (self.upper_row_count(), &mut self.upper_row),
            Pane::Lower => (self.lower_row_count(), &mut self.lower_row),
        };
        let last_row = row_count.saturating_sub(1);
        *selected_row = selected_row.saturating_add_signed(rows).min(last_row);
        if self.pane == Pane::Upper {
            self.selected_name = self.names_in_upper_table().into_iter().nth(self.upper_row);
        }
    }

    /// Returns the mount points or host names in the order of the upper table.
    fn names_in_upper_table(&self) -> Vec<String> {
        match self.job {
            Some(_) => self.hosts().iter().map(|host| host.name.clone()).collect(),
            None => self
                .ordered_mounts()
                .iter()
                .map(|mount| mount.mount_point.clone())
                .collect(),
        }
    }

    /// Updates the selected rows after new answers. In the upper table the selection follows the selected name, or goes
    /// to the first row if that name is gone. In the lower table it stays, unless there are fewer rows now.
    pub fn update_selected_rows(&mut self) {
        self.upper_row = self
            .names_in_upper_table()
            .iter()
            .position(|name| Some(name) == self.selected_name.as_ref())
            .unwrap_or(0);
        let last_lower_row = self.lower_row_count().saturating_sub(1);
        self.lower_row = self.lower_row.min(last_lower_row);
    }
}
