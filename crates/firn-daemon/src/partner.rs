//! What agents say of this host's partner, and waits for its copies.
//!
//! Promises
//! * Files are `partnered` only by the word of a connection that has named a partner, and only as long as it is there.
//!   When the agent ends, or its connection to the partner does, all of them fall back. There may be two connections
//!   while one partner takes over from another: the one that stays says again what it has.
//! * Only callers that asked for a wait wait for a partner.

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

/// Between two looks of a wait.
const LOOK_AGAIN: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));

/// Of a mount whose option `partner` names one.
pub(crate) struct PartnerBoard {
    engine: Arc<Engine<Store>>,
    wanted: String,
    this_host: String,
    domains: Option<PathBuf>,
    words: Mutex<Words>,
    /// A file was marked.
    marked: Condvar,
}

/// What followers say now, by the number of the speaker.
#[derive(Default)]
struct Words {
    last: u64,
    by: BTreeMap<u64, Word>,
    /// Those that have named a partner, for whom files are marked. The last one has named it last.
    speakers: BTreeSet<u64>,
    /// How often a file was marked.
    marks: u64,
}

struct Word {
    host: Option<String>,
    note: String,
}

/// The right of one connection to speak. Dropped, what it said counts no more.
pub(crate) struct PartnerSpeaker {
    board: Arc<PartnerBoard>,
    number: u64,
}

impl PartnerBoard {
    /// None where no partner is wanted.
    pub(crate) fn new(
        engine: &Arc<Engine<Store>>,
        options: &Options,
    ) -> Result<Option<Arc<Self>>, AttachError> {
        let wanted = match &options.partner {
            Partner::None => return Ok(None),
            Partner::Next => "next".to_owned(),
            Partner::Host(name) => name.clone(),
        };
        let this_host = host_name(options)?;
        Ok(Some(Arc::new(Self {
            engine: Arc::clone(engine),
            wanted,
            this_host,
            domains: options.partner_domains.clone(),
            words: Mutex::default(),
            marked: Condvar::new(),
        })))
    }

    /// What the status says.
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
        let (host, note) = self.said();
        PartnerStatus {
            wanted: self.wanted.clone(),
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

    /// The partner, and what a person should know of it.
    fn said(&self) -> (Option<String>, String) {
        let words = self.words.lock();
        let speaker = words.speakers.last();
        let speaker = speaker.and_then(|number| words.by.get(number));
        let notes = words.by.values().rev().map(|word| &word.note);
        let note = notes.into_iter().find(|note| !note.is_empty());
        let note = match (words.by.is_empty(), note) {
            (_, Some(note)) => note.clone(),
            (true, None) => "no `firn agent` runs for this mount".to_owned(),
            (false, None) => String::new(),
        };
        (speaker.and_then(|word| word.host.clone()), note)
    }

    fn say(&self, number: u64, host: Option<String>, note: String) {
        let mut words = self.words.lock();
        let names = host.is_some();
        words.by.insert(number, Word { host, note });
        let forgets = if names {
            words.speakers.insert(number) && words.speakers.len() == 1
        } else {
            words.speakers.remove(&number)
        };
        // Before the files: a thread that marks one asks for the words while it has the file.
        drop(words);
        if forgets {
            self.engine.durability.forget_partner();
        }
    }

    /// Waits until the partner has all that is held at or below `path`. `progress` is told what is left, and ends the
    /// wait with false.
    pub(crate) fn wait(
        &self,
        path: &BytePath,
        deadline: Option<Instant>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Reply {
        let mut waits = LOOK_AGAIN.start();
        loop {
            let marks = self.words.lock().marks;
            let left = match self.engine.durability.partner_figures(path.as_bytes()) {
                Ok(figures) if figures.left_files == 0 => return Reply::Done,
                Ok(figures) => figures,
                Err(error) => return refused(error, &format!("{path}: {error}")),
            };
            if !progress(left.left_bytes, left.left_files) {
                return refused(Errno::CANCELED, "the wait was given up");
            }
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if rest == Some(Duration::ZERO) {
                return refused(Errno::TIMEDOUT, &self.describe_left(&left));
            }
            let pause = waits.next_wait();
            let mut words = self.words.lock();
            if words.marks == marks {
                let pause = rest.map_or(pause, |rest| rest.min(pause));
                self.marked.wait_for(&mut words, pause);
            }
        }
    }

    fn describe_left(&self, left: &PartnerFigures) -> String {
        let (host, note) = self.said();
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

impl PartnerSpeaker {
    /// Takes a word of a connection; the first one gives the right to say more.
    pub(crate) fn say(
        speaker: &mut Option<Self>,
        board: &Arc<PartnerBoard>,
        host: Option<String>,
        note: String,
    ) -> Reply {
        let speaker = speaker.get_or_insert_with(|| {
            let mut words = board.words.lock();
            words.last += 1;
            Self {
                board: Arc::clone(board),
                number: words.last,
            }
        });
        board.say(speaker.number, host, note);
        Reply::Done
    }

    /// The partner that this connection named has a file as it was at `changes`.
    pub(crate) fn mark(speaker: Option<&Self>, path: &BytePath, changes: u64) -> Reply {
        let Some(Self { board, number }) = speaker else {
            return refused(Errno::INVAL, "this connection has named no partner");
        };
        let counts = || board.words.lock().speakers.contains(number);
        if !counts() {
            return refused(Errno::INVAL, "this connection has named no partner");
        }
        let marked = board
            .engine
            .durability
            .mark_partnered(path.as_bytes(), changes, counts);
        board.words.lock().marks += 1;
        board.marked.notify_all();
        match marked {
            Ok(_) | Err(Errno::NOENT) => Reply::Done,
            Err(error) => refused(error, &format!("{path}: {error}")),
        }
    }
}

impl Drop for PartnerSpeaker {
    fn drop(&mut self) {
        self.board.say(self.number, None, String::new());
        self.board.words.lock().by.remove(&self.number);
    }
}

/// The reply to a question about a partner's copies where there are none.
pub(crate) fn without_partner() -> Reply {
    refused(
        Errno::OPNOTSUPP,
        "this mount has no partner: mount with partner=next, and run `firn agent` on each host",
    )
}

fn refused(errno: Errno, message: &str) -> Reply {
    Reply::Error {
        errno: errno.raw_os_error(),
        message: message.to_owned(),
    }
}
