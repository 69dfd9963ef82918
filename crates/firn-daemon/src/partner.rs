//! The partner of this host is another host that has copies of its held files. This file stores what agents report of
//! the partner, and lets programs wait for its copies. A *held* file has bytes in this host's memory that are not in
//! the backing yet.
//!
//! An *agent* is the process (`firn agent`) that copies files between hosts. Its connection to the control socket is a
//! *reporter* once it has reported something.
//!
//! Promises
//! * A file has the durability level `partnered` only by the report of a connection that has named a partner, and only
//!   while that connection exists. If the agent or its connection to the partner ends, all its files lose that level.
//!   While one partner takes over from another there may be two connections; the remaining one reports its files again.
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

/// The reports about the partner of a mount. Only a mount with the option `partner` has them.
pub(crate) struct PartnerState {
    engine: Arc<Engine<Store>>,
    /// The option `partner`: the name of a host, or `next`.
    wanted_partner: String,
    this_host: String,
    /// The option `partner-domains`.
    domains: Option<PathBuf>,
    reporters: Mutex<ReporterTable>,
    /// Signals that a file was marked as copied.
    copies_changed: Condvar,
}

/// What the reporters of a mount have reported.
#[derive(Default)]
struct ReporterTable {
    /// Number of the newest reporter.
    last_number: u64,
    /// The last report of each reporter, by its number.
    reports: BTreeMap<u64, PartnerReport>,
    /// The reporters that have named a partner. Files are marked for them; the highest number is the newest reporter.
    reporters_with_partner: BTreeSet<u64>,
    /// Number of marks since the mount.
    marks: u64,
}

/// What one reporter has reported.
#[derive(Clone)]
struct PartnerReport {
    /// The partner host; `None` if the agent has no connection to one.
    host: Option<String>,
    /// A text for the user; may be empty.
    note: String,
}

/// A connection that has reported about the partner. Its drop withdraws what the connection has reported.
pub(crate) struct PartnerReporter {
    partner: Arc<PartnerState>,
    number: u64,
}

impl PartnerState {
    /// Returns the state of the partner, the host with copies of this host's files, without reports so far. `None` if
    /// the options name no partner.
    pub(crate) fn new(
        engine: &Arc<Engine<Store>>,
        options: &Options,
    ) -> Result<Option<Arc<Self>>, AttachError> {
        let wanted_partner = match &options.partner {
            Partner::None => return Ok(None),
            Partner::Next => "next".to_owned(),
            Partner::Host(name) => name.clone(),
        };
        let this_host = host_name(options)?;
        Ok(Some(Arc::new(Self {
            engine: Arc::clone(engine),
            wanted_partner,
            this_host,
            domains: options.partner_domains.clone(),
            reporters: Mutex::default(),
            copies_changed: Condvar::new(),
        })))
    }

    /// Returns what the status shows of the partner, the host with copies of this host's files: its name, what it has
    /// copied, and what is left to copy.
    pub(crate) fn status(&self) -> PartnerStatus {
        let durability = &self.engine.durability;
        let PartnerFigures {
            copied_files,
            copied_bytes,
            left_files,
            left_bytes,
            oldest_left,
        } = durability.partner_figures(b"").unwrap_or_default();
        let PartnerReport { host, note } = self.newest_report();
        PartnerStatus {
            wanted: self.wanted_partner.clone(),
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

    /// Returns the newest partner (host with copies of this host's files) that a reporter has named, and the newest
    /// note for the user. A reporter is the connection of an agent, the process that copies files between hosts.
    fn newest_report(&self) -> PartnerReport {
        let table = self.reporters.lock();
        let host = match table.reporters_with_partner.last() {
            Some(number) => table
                .reports
                .get(number)
                .and_then(|report| report.host.clone()),
            None => None,
        };
        let mut newest_notes = table.reports.values().rev().map(|report| &report.note);
        let note = match newest_notes.find(|note| !note.is_empty()) {
            Some(note) => note.clone(),
            None if table.reports.is_empty() => "no `firn agent` runs for this mount".to_owned(),
            None => String::new(),
        };
        PartnerReport { host, note }
    }

    /// Stores the report of a reporter, which is the connection of an agent, a process that copies files between hosts.
    /// `host` is the partner that copies this host's files; `None` if the agent has no connection to one.
    ///
    /// A mark says that the partner has a file. All marks are dropped if no reporter had a partner before this report,
    /// or if this reporter has lost its partner.
    fn store_report(&self, number: u64, host: Option<String>, note: String) {
        let mut table = self.reporters.lock();
        let names_partner = host.is_some();
        table.reports.insert(number, PartnerReport { host, note });
        let must_drop_marks = if names_partner {
            let no_reporter_had_partner = table.reporters_with_partner.is_empty();
            table.reporters_with_partner.insert(number);
            no_reporter_had_partner
        } else {
            // True if this reporter had a partner.
            table.reporters_with_partner.remove(&number)
        };
        // The lock is released first: a thread that marks a file takes this lock while it holds the file's.
        drop(table);
        if must_drop_marks {
            self.engine.durability.forget_partner();
        }
    }

    /// Waits until the partner (the host with copies) has all data at or below `path` that is not in the backing yet,
    /// or until the deadline. Returns the reply for the client. `progress` gets the bytes and files that are left; if
    /// it returns false, the wait ends with ECANCELED.
    pub(crate) fn wait(
        &self,
        path: &BytePath,
        deadline: Option<Instant>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Reply {
        let mut backoff = CHECK_AGAIN.start();
        loop {
            // A mark that comes after this read ends the pause below at once.
            let marks_before = self.reporters.lock().marks;
            let figures = match self.engine.durability.partner_figures(path.as_bytes()) {
                Ok(figures) if figures.left_files == 0 => return Reply::Done,
                Ok(figures) => figures,
                Err(error) => return error_reply(error, &format!("{path}: {error}")),
            };
            if !progress(figures.left_bytes, figures.left_files) {
                return error_reply(Errno::CANCELED, "the wait was given up");
            }
            let mut pause = backoff.next_wait();
            if let Some(deadline) = deadline {
                let time_left = deadline.saturating_duration_since(Instant::now());
                if time_left.is_zero() {
                    return error_reply(Errno::TIMEDOUT, &self.describe_timeout(&figures));
                }
                pause = pause.min(time_left);
            }
            let mut table = self.reporters.lock();
            if table.marks == marks_before {
                self.copies_changed.wait_for(&mut table, pause);
            }
        }
    }

    /// Describes for an error message what the partner (the host with copies) does not have at the end of a wait, and
    /// why.
    fn describe_timeout(&self, figures: &PartnerFigures) -> String {
        let PartnerReport { host, note } = self.newest_report();
        let partner_state = match host {
            Some(host) => format!("the partner {host} does not have them yet"),
            None => "there is no partner".to_owned(),
        };
        let reason = if note.is_empty() {
            "files that are open for writing are copied when they are closed".to_owned()
        } else {
            note
        };
        format!(
            "timed out with {} in {} left to copy: {partner_state}; {reason}",
            bytes(figures.left_bytes),
            count(figures.left_files, "file")
        )
    }
}

impl PartnerReporter {
    /// Stores a report of an agent, the process that copies files to the partner host. The first report of its
    /// connection makes the connection a reporter, with a number.
    pub(crate) fn store_report(
        reporter: &mut Option<Self>,
        partner: &Arc<PartnerState>,
        host: Option<String>,
        note: String,
    ) -> Reply {
        let registered = reporter.get_or_insert_with(|| Self::register(partner));
        partner.store_report(registered.number, host, note);
        Reply::Done
    }

    /// Makes a reporter with the next number.
    fn register(partner: &Arc<PartnerState>) -> Self {
        let mut table = partner.reporters.lock();
        table.last_number += 1;
        Self {
            partner: Arc::clone(partner),
            number: table.last_number,
        }
    }

    /// Marks a file as copied by the partner that this connection has named. `changes` is the file's number of changes
    /// when it was copied. The reply is EINVAL if the connection has named no partner; a file that is gone is no error.
    pub(crate) fn mark(reporter: Option<&Self>, path: &BytePath, changes: u64) -> Reply {
        let Some(Self { partner, number }) = reporter else {
            return unnamed_partner_reply();
        };
        let may_mark = || {
            partner
                .reporters
                .lock()
                .reporters_with_partner
                .contains(number)
        };
        if !may_mark() {
            return unnamed_partner_reply();
        }
        let durability = &partner.engine.durability;
        // The connection may lose its partner meanwhile, so `may_mark` is called again under the file's lock.
        let mark_result = durability.mark_partnered(path.as_bytes(), changes, may_mark);
        // Threads that wait for copies count what is left again.
        partner.reporters.lock().marks += 1;
        partner.copies_changed.notify_all();
        match mark_result {
            Ok(_) | Err(Errno::NOENT) => Reply::Done,
            Err(error) => error_reply(error, &format!("{path}: {error}")),
        }
    }
}

impl Drop for PartnerReporter {
    fn drop(&mut self) {
        self.partner.store_report(self.number, None, String::new());
        self.partner.reporters.lock().reports.remove(&self.number);
    }
}

/// Returns the reply to a request about copies on a mount without a partner.
pub(crate) fn no_partner_reply() -> Reply {
    error_reply(
        Errno::OPNOTSUPP,
        "this mount has no partner: mount with partner=next, and run `firn agent` on each host",
    )
}

/// Returns the reply to a report of a copy on a connection that has not said which partner has it.
fn unnamed_partner_reply() -> Reply {
    error_reply(Errno::INVAL, "this connection has named no partner")
}

fn error_reply(errno: Errno, message: &str) -> Reply {
    Reply::Error {
        errno: errno.raw_os_error(),
        message: message.to_owned(),
    }
}
