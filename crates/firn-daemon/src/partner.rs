//! The partner of this host, another host with copies of its held files: what agents report of it, and waits for its
//! copies.
//!
//! An *agent* is the process (`firn agent`) that copies files between hosts. Its connection to the control socket is a
//! *speaker* once it has reported something.
//!
//! Promises
//! * A file counts as `partnered` only by the report of a connection that has named a partner, and only while that
//!   connection exists. If the agent or its connection to the partner ends, all its files lose that level. While one
//!   partner takes over from another there may be two connections; the remaining one reports its files again.
//! * Only callers that ask for a wait are delayed by a partner.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_backing::backoff::Backoff;
use firn_config::{Options, Partner};
use firn_engine::{Engine, PartnerFigures};
use firn_format::quantity::{bytes, count};
use firn_protocol::path::BytePath;
use firn_protocol::{PartnerStatus, Reply};
use parking_lot::{Condvar, Mutex};

use crate::error::AttachError;
use crate::host_name::host_name;
use crate::store::Store;

/// Pauses between two checks of a wait.
const CHECK_AGAIN: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));

/// The reports about the partner of a mount. Only a mount with the option `partner` has a board.
pub(crate) struct PartnerState {
    engine: Arc<Engine<Store>>,
    option: String,
    this_host: String,
    domains: Option<PathBuf>,
    reports: Mutex<SpeakerReports>,
    /// Signals that a file was marked as copied.
    marked: Condvar,
}

/// What the speakers of a mount have reported.
#[derive(Default)]
struct SpeakerReports {
    last_number: u64,
    by_speaker: BTreeMap<u64, SpeakerReport>,
    /// The speakers that have named a partner. Files are marked for them; the highest number is the newest speaker.
    naming_speakers: BTreeSet<u64>,
    /// Number of marks since the mount.
    marks: u64,
}

struct SpeakerReport {
    host: Option<String>,
    note: String,
}

/// The right of one connection to report. Its drop withdraws what the connection has reported.
pub(crate) struct PartnerReporter {
    board: Arc<PartnerState>,
    number: u64,
}

impl PartnerState {
    /// Returns the board; `None` if the options name no partner.
    pub(crate) fn new(
        engine: &Arc<Engine<Store>>,
        options: &Options,
    ) -> Result<Option<Arc<Self>>, AttachError> {
        let option = match &options.partner {
            Partner::None => return Ok(None),
            Partner::Next => "next".to_owned(),
            Partner::Host(name) => name.clone(),
        };
        let this_host = host_name(options)?;
        Ok(Some(Arc::new(Self {
            engine: Arc::clone(engine),
            option,
            this_host,
            domains: options.partner_domains.clone(),
            reports: Mutex::default(),
            marked: Condvar::new(),
        })))
    }

    /// Returns the partner's part of the status.
    pub(crate) fn status(&self) -> PartnerStatus {
        let figures = self
            .engine
            .durability
            .partner_figures(b"")
            .unwrap_or_default();
        let PartnerFigures {
            copied_files,
            copied_bytes,
            left_files,
            left_bytes,
            oldest_left,
        } = figures;
        let (host, note) = self.partner_and_note();
        PartnerStatus {
            wanted: self.option.clone(),
            this_host: self.this_host.clone(),
            domains: self.domains.as_deref().map(BytePath::from),
            present: host.is_some(),
            host,
            note,
            copied_files,
            copied_bytes,
            left_files,
            left_bytes,
            lag_seconds: oldest_left.map_or(0.0, |age| age.as_secs_f64()),
        }
    }

    /// Returns the name of the partner, if there is one, and a note for the user.
    fn partner_and_note(&self) -> (Option<String>, String) {
        let reports = self.reports.lock();
        let speaker = reports.naming_speakers.last();
        let speaker = speaker.and_then(|number| reports.by_speaker.get(number));
        let notes = reports.by_speaker.values().rev().map(|word| &word.note);
        let note = notes.into_iter().find(|note| !note.is_empty());
        let note = match (reports.by_speaker.is_empty(), note) {
            (_, Some(note)) => note.clone(),
            (true, None) => "no `firn agent` runs for this mount".to_owned(),
            (false, None) => String::new(),
        };
        (speaker.and_then(|word| word.host.clone()), note)
    }

    /// Stores the report of a speaker. When a first partner is named, all older marks are dropped.
    fn store_report(&self, number: u64, host: Option<String>, note: String) {
        let mut reports = self.reports.lock();
        let names = host.is_some();
        reports
            .by_speaker
            .insert(number, SpeakerReport { host, note });
        let is_first_name = if names {
            reports.naming_speakers.insert(number) && reports.naming_speakers.len() == 1
        } else {
            reports.naming_speakers.remove(&number)
        };
        // The lock is released first: a thread that marks a file takes this lock while it holds the file's.
        drop(reports);
        if is_first_name {
            self.engine.durability.forget_partner();
        }
    }

    /// Waits until the partner has all data that is held at or below `path`, or until the deadline. `progress` gets the
    /// bytes and files that are left; if it returns false, the wait ends with ECANCELED.
    pub(crate) fn wait(
        &self,
        path: &BytePath,
        deadline: Option<Instant>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Reply {
        let mut waits = CHECK_AGAIN.start();
        loop {
            let marks = self.reports.lock().marks;
            let left = match self.engine.durability.partner_figures(path.as_bytes()) {
                Ok(figures) if figures.left_files == 0 => return Reply::Done,
                Ok(figures) => figures,
                Err(error) => return error_reply(error, &format!("{path}: {error}")),
            };
            if !progress(left.left_bytes, left.left_files) {
                return error_reply(Errno::CANCELED, "the wait was given up");
            }
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if rest == Some(Duration::ZERO) {
                return error_reply(Errno::TIMEDOUT, &self.describe_left(&left));
            }
            let pause = waits.next_wait();
            let mut reports = self.reports.lock();
            if reports.marks == marks {
                let pause = rest.map_or(pause, |rest| rest.min(pause));
                self.marked.wait_for(&mut reports, pause);
            }
        }
    }

    fn describe_left(&self, left: &PartnerFigures) -> String {
        let (host, note) = self.partner_and_note();
        let PartnerFigures {
            left_files,
            left_bytes,
            ..
        } = left;
        let who = host.map_or_else(
            || "there is no partner".to_owned(),
            |host| format!("the partner {host} does not have them yet"),
        );
        let why = if note.is_empty() {
            "files that are open for writing are copied when they are closed".to_owned()
        } else {
            note
        };
        format!(
            "timed out with {} in {} left: {who}; {why}",
            bytes(*left_bytes),
            count(*left_files, "file")
        )
    }
}

impl PartnerReporter {
    /// Stores a report of a connection. The first report makes the connection a speaker.
    pub(crate) fn store_report(
        speaker: &mut Option<Self>,
        board: &Arc<PartnerState>,
        host: Option<String>,
        note: String,
    ) -> Reply {
        let speaker = speaker.get_or_insert_with(|| {
            let mut reports = board.reports.lock();
            reports.last_number += 1;
            Self {
                board: Arc::clone(board),
                number: reports.last_number,
            }
        });
        board.store_report(speaker.number, host, note);
        Reply::Done
    }

    /// Marks a file as copied by the partner that this connection has named. `changes` is the state of the file that
    /// was copied.
    pub(crate) fn mark(speaker: Option<&Self>, path: &BytePath, changes: u64) -> Reply {
        let Some(Self { board, number }) = speaker else {
            return error_reply(Errno::INVAL, "this connection has named no partner");
        };
        let may_mark = || board.reports.lock().naming_speakers.contains(number);
        if !may_mark() {
            return error_reply(Errno::INVAL, "this connection has named no partner");
        }
        let marked = board
            .engine
            .durability
            .mark_partnered(path.as_bytes(), changes, may_mark);
        board.reports.lock().marks += 1;
        board.marked.notify_all();
        match marked {
            Ok(_) | Err(Errno::NOENT) => Reply::Done,
            Err(error) => error_reply(error, &format!("{path}: {error}")),
        }
    }
}

impl Drop for PartnerReporter {
    fn drop(&mut self) {
        self.board.store_report(self.number, None, String::new());
        self.board.reports.lock().by_speaker.remove(&self.number);
    }
}

/// Returns the reply to a request about copies on a mount without a partner.
pub(crate) fn without_partner() -> Reply {
    error_reply(
        Errno::OPNOTSUPP,
        "this mount has no partner: mount with partner=next, and run `firn agent` on each host",
    )
}

fn error_reply(errno: Errno, message: &str) -> Reply {
    Reply::Error {
        errno: errno.raw_os_error(),
        message: message.to_owned(),
    }
}
