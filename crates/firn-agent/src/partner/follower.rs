//! The partner's side: copies of what one other host holds, as long as that host says that this is its partner.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_format::quote::quoted_path;
use firn_format::record::Ending;
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::message::{Entry, EntryKind, ErrorKind};
use crate::partner::desk::Desk;
use crate::partner::shelf::{Copy, Record, stored_bytes};
use crate::peer::{Peer, Route};
use crate::pull::{PullRequest, PullSource, first_component, is_same_file, pull};
use crate::server::Level;
use crate::source::join;
use crate::transport_choice::Carriage;

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The same while something is closed that was not so at the last look: it is copied if it is the same at the next one.
const SETTLE: Duration = Duration::from_millis(20);
/// A look that takes long is not made more often than this share of the time.
const LOOK_SHARE: u32 = 20;
const LOOK_EVERY_MAX: Duration = Duration::from_secs(5);
/// The source takes a partner that says nothing for longer for dead ([`crate::session`]).
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Between two tries to reach the source, and how long it is tried: the source calls again.
const RETRY_EVERY: Duration = Duration::from_millis(500);
const RETRY_FOR: Duration = Duration::from_secs(60);

/// What is held under one name of the mount.
type Units = BTreeMap<BytePath, Vec<Entry>>;

/// Follows until the source has another partner, or cannot be reached for long. Copies stay.
pub(crate) fn follow_source(desk: &Arc<Desk>, source: &str) {
    let mut told = String::new();
    let mut reached_at = Instant::now();
    loop {
        let mut follower = match Follower::connect(desk, source) {
            Ok(follower) => follower,
            Err(error) => {
                let text = error.to_string();
                let is_over = matches!(
                    error,
                    PullError::Remote {
                        kind: ErrorKind::Refused,
                        ..
                    }
                );
                if is_over || reached_at.elapsed() > RETRY_FOR {
                    desk.log.say(Level::Event, || {
                        format!("this host does not follow {source} any more: {text}")
                    });
                    return;
                }
                tell_once(desk, &mut told, source, text);
                std::thread::sleep(RETRY_EVERY);
                continue;
            }
        };
        told.clear();
        let Err(error) = follower.run();
        reached_at = Instant::now();
        tell_once(desk, &mut told, source, error.to_string());
        std::thread::sleep(RETRY_EVERY);
    }
}

fn tell_once(desk: &Desk, told: &mut String, source: &str, text: String) {
    if *told != text {
        desk.log
            .say(Level::Event, || format!("partner of {source}: {text}"));
        *told = text;
    }
}

/// One connection.
struct Follower<'a> {
    desk: &'a Arc<Desk>,
    source: &'a str,
    route: Route,
    peer: Peer,
    incarnation: String,
    arena: String,
    /// At the last look.
    seen: Units,
    /// Something is closed and not the same as at the last look.
    is_settling: bool,
    /// When this partner said something last while it was busy with something else.
    beaten_at: Instant,
    /// The note that the source has.
    noted: String,
    /// Copies of an earlier arena that were compared with the backing.
    compared: BTreeSet<BytePath>,
}

impl<'a> Follower<'a> {
    fn connect(desk: &'a Arc<Desk>, source: &'a str) -> Result<Self, PullError> {
        let route = desk.route();
        let mut peer = Peer::connect(source, &route)?;
        let (incarnation, arena) = peer.follow(&desk.host)?;
        desk.shelf.sweep(source)?;
        Ok(Self {
            desk,
            source,
            route,
            peer,
            incarnation,
            arena,
            seen: Units::new(),
            is_settling: false,
            beaten_at: Instant::now(),
            noted: String::new(),
            compared: BTreeSet::new(),
        })
    }

    fn run(&mut self) -> Result<std::convert::Infallible, PullError> {
        loop {
            let begun = Instant::now();
            let (_, entries) = self.peer.list_held(&BytePath::default())?;
            let now = group(&entries).map_err(|what| self.peer.implausible(what))?;
            let elapsed = begun.elapsed();
            self.is_settling = false;
            let mut note = String::new();
            for (unit, entries) in newest_first(&now) {
                note += &self.look_at(unit, entries)?;
            }
            self.remove_drained(&now)?;
            self.note(note)?;
            self.seen = now;
            let pause = if self.is_settling { SETTLE } else { LOOK_EVERY };
            self.pause((LOOK_SHARE * elapsed).clamp(pause, LOOK_EVERY_MAX))?;
        }
    }

    /// Copies what is complete, and marks what is copied. Gives what the source should know.
    fn look_at(&mut self, unit: &BytePath, entries: &[Entry]) -> Result<String, PullError> {
        let copy = self.desk.shelf.find(self.source, unit);
        if let Some(copy) = &copy
            && copy.record.covers(&self.incarnation, entries)
        {
            self.mark(unit, entries)?;
            return Ok(String::new());
        }
        let is_closed = |entry: &Entry| !matches!(entry.kind, EntryKind::File { ending, .. } if ending != Ending::Closed);
        if !entries.iter().all(is_closed) {
            return Ok(String::new());
        }
        let seen = self.seen.get(unit);
        if !seen.is_some_and(|seen| files_of(seen).eq(files_of(entries))) {
            self.is_settling = true;
            return Ok(String::new());
        }
        let Some(copy) = copy else {
            return self.copy(unit, entries);
        };
        if copy.record.arena != self.arena {
            return match self.is_needed(&copy, unit, entries)? {
                true => Ok(self.describe_needed(unit)),
                false => self.copy(unit, entries),
            };
        }
        match self.renew(&copy, unit) {
            Ok(Some(entries)) => self.mark(unit, &entries).map(|()| String::new()),
            Ok(None) => self.copy(unit, entries),
            Err(error @ PullError::Full { .. }) => Ok(error.to_string()),
            Err(error) => Err(error),
        }
    }

    /// Of a copy that an earlier firnd's files were made into: whether its bytes are those that this firnd holds. Then
    /// it is one of these. Gives what is held.
    fn renew(&mut self, copy: &Copy, unit: &BytePath) -> Result<Option<Vec<Entry>>, PullError> {
        if copy.record.incarnation == self.incarnation {
            return Ok(None);
        }
        let mut peer = Peer::connect(self.source, &self.route)?;
        let (top, entries) = match peer.list_held(unit) {
            Err(PullError::Remote {
                kind: ErrorKind::Missing,
                ..
            }) => return Ok(None),
            listed => listed?,
        };
        if !copy.record.may_be_of(&entries) {
            return Ok(None);
        }
        for entry in entries.iter().filter(|entry| entry.held.is_some()) {
            let Ok(here) = copy.open(entry.path.as_path()) else {
                return Ok(None);
            };
            if !is_same_file(&mut peer, &top, entry, &here, &mut || self.beat_if_due())? {
                return Ok(None);
            }
        }
        let record = copy.record.renewed(&self.incarnation, &entries);
        self.desk.shelf.renew(self.source, &record)?;
        self.desk.log.say(Level::Event, || {
            format!(
                "the copy of {unit} of {} is as it holds it: nothing is copied anew",
                self.source
            )
        });
        Ok(Some(entries))
    }

    /// Whether a copy has files of an arena that is lost which are nowhere else.
    fn is_needed(
        &mut self,
        copy: &Copy,
        unit: &BytePath,
        entries: &[Entry],
    ) -> Result<bool, PullError> {
        let others = copy.record.files_beside(entries);
        let path = self.desk.mount_point.join(unit);
        let is_there = copy.has_files_in(&others, &path, &mut || self.beat_if_due())?;
        Ok(!is_there)
    }

    fn describe_needed(&self, unit: &BytePath) -> String {
        let here = &self.desk.host;
        let source = self.source;
        let name = first_component(unit);
        format!(
            "{here} keeps what an arena that {source} lost had of {name} and copies nothing newer of that name: take it with `firn \
             pull {here}:{source}/{name}` or `firn run --restart {source}`"
        )
    }

    fn copy(&mut self, unit: &BytePath, entries: &[Entry]) -> Result<String, PullError> {
        let desk = Arc::clone(self.desk);
        let room = match desk.shelf.reserve(stored_bytes(entries)) {
            Ok(room) => room,
            Err((used, most)) => {
                return Ok(format!(
                    "{} has no room for {} bytes of {unit}: {used} of {most} bytes are in use (`firn agent --partner-size`)",
                    desk.host,
                    stored_bytes(entries)
                ));
            }
        };
        match self.pull(unit, room.bytes()) {
            Ok(Some(entries)) => self.mark(unit, &entries).map(|()| String::new()),
            Ok(None) => {
                desk.shelf.abandon(self.source, unit)?;
                Ok(String::new())
            }
            // Others pull from it: that is no reason to lose the connection, and with it what is marked.
            Err(error @ PullError::Full { .. }) => {
                desk.shelf.abandon(self.source, unit)?;
                Ok(error.to_string())
            }
            // The source's own failures end the connection; this host's are told.
            Err(error @ (PullError::Local { .. } | PullError::Trust(_))) => {
                desk.shelf.abandon(self.source, unit)?;
                Ok(format!("{} cannot copy {unit}: {error}", desk.host))
            }
            Err(error) => Err(error),
        }
    }

    /// What a whole copy of at most so many bytes was made of; none: it changed meanwhile.
    fn pull(&mut self, unit: &BytePath, bytes_max: u64) -> Result<Option<Vec<Entry>>, PullError> {
        let begun = Instant::now();
        let desk = Arc::clone(self.desk);
        let shelf = &desk.shelf;
        let request = PullRequest {
            host: self.source.to_owned(),
            route: self.route.clone(),
            source: PullSource::Held(unit.clone()),
            // Each copy is a pull: to register the arena would take longer than most of them.
            carriage: Carriage::connection(),
            target: shelf.begin(self.source, unit)?,
            cut: false,
            patience: Duration::ZERO,
            bytes_max: Some(bytes_max),
        };
        let mut lost = None;
        let outcome = pull(&request, &mut |_| {
            if lost.is_none() {
                lost = self.beat_if_due().err();
            }
        });
        if let Some(error) = lost {
            return Err(error);
        }
        let outcome = match outcome {
            // It was written to, drained or removed since it was listed.
            Err(
                PullError::Incomplete { .. }
                | PullError::KeepsChanging { .. }
                | PullError::Outgrown { .. },
            ) => return Ok(None),
            Err(PullError::Remote {
                kind: ErrorKind::Missing,
                ..
            }) => return Ok(None),
            outcome => outcome?,
        };
        if !outcome.changed.is_empty() {
            return Ok(None);
        }
        let record = Record {
            unit: unit.clone(),
            arena: self.arena.clone(),
            incarnation: self.incarnation.clone(),
            entries: outcome.entries,
        };
        shelf.finish(self.source, &record)?;
        self.desk.log.say(Level::Event, || {
            let mib = outcome.bytes as f64 / f64::from(1 << 20);
            let seconds = begun.elapsed().as_secs_f64();
            format!(
                "copied {} of {}: {} files, {mib:.1} MiB in {seconds:.2} s",
                unit, self.source, outcome.files
            )
        });
        Ok(Some(record.entries))
    }

    /// Marks what is not marked yet.
    fn mark(&mut self, unit: &BytePath, entries: &[Entry]) -> Result<(), PullError> {
        for entry in entries {
            if let Some(held) = entry.held
                && !held.partnered
            {
                let path = join(unit, entry.path.as_path());
                self.peer.mark(&path, held.changes)?;
            }
        }
        Ok(())
    }

    /// What the source does not hold any more was drained or removed, if it has the same arena still. If it has
    /// another one it may have lost it: then the backing is asked, once.
    fn remove_drained(&mut self, now: &Units) -> Result<(), PullError> {
        let desk = Arc::clone(self.desk);
        let shelf = &desk.shelf;
        for copy in shelf.copies(self.source) {
            let unit = &copy.record.unit;
            if now.contains_key(unit) {
                continue;
            }
            let path = desk.mount_point.join(unit);
            let is_drained = copy.record.arena == self.arena
                || (self.compared.insert(unit.clone())
                    && copy.is_in(&path, &mut || self.beat_if_due())?);
            if is_drained {
                shelf.remove(self.source, unit)?;
                let shown = quoted_path(Path::new(unit.as_path()));
                self.desk.log.say(Level::Event, || {
                    format!(
                        "removed {shown} of {}: it does not hold it any more",
                        self.source
                    )
                });
            }
        }
        Ok(())
    }

    /// For what takes long: the source is to know that this partner lives.
    fn beat_if_due(&mut self) -> Result<(), PullError> {
        if self.beaten_at.elapsed() <= BEAT_EVERY {
            return Ok(());
        }
        self.beaten_at = Instant::now();
        self.peer.beat()
    }

    fn note(&mut self, note: String) -> Result<(), PullError> {
        if note != self.noted {
            self.peer.note(&note)?;
            if !note.is_empty() {
                self.desk.log.say(Level::Event, || note.clone());
            }
            self.noted = note;
        }
        Ok(())
    }

    fn pause(&mut self, pause: Duration) -> Result<(), PullError> {
        let until = Instant::now() + pause;
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            std::thread::sleep(rest.min(BEAT_EVERY));
            if rest <= BEAT_EVERY {
                return Ok(());
            }
            self.peer.beat()?;
        }
    }
}

/// What is held, by the first names of its paths, each list beginning with that itself.
fn group(entries: &[Entry]) -> Result<Units, String> {
    crate::pull::check_list(entries.to_vec())?;
    let mut units = Units::new();
    for entry in entries.iter().filter(|entry| !entry.path.is_empty()) {
        let unit = first_component(&entry.path);
        let below = entry.path.as_path().strip_prefix(unit.as_path());
        let below = below.expect("it begins with it");
        units.entry(unit).or_default().push(Entry {
            path: below.into(),
            ..entry.clone()
        });
    }
    Ok(units)
}

/// What tells whether files changed between two looks: directories do with the names of other hosts.
fn files_of(entries: &[Entry]) -> impl Iterator<Item = (&BytePath, &EntryKind, Option<u64>)> {
    let is_file = |entry: &&Entry| matches!(entry.kind, EntryKind::File { .. });
    let files = entries.iter().filter(is_file);
    files.map(|entry| (&entry.path, &entry.kind, entry.changes()))
}

/// The newest is what a restart wants.
fn newest_first(units: &Units) -> Vec<(&BytePath, &[Entry])> {
    let mut all: Vec<_> = units
        .iter()
        .map(|(unit, entries)| (unit, &entries[..]))
        .collect();
    let newest = |entries: &[Entry]| {
        entries
            .iter()
            .map(|entry| (entry.mtime_s, entry.mtime_ns))
            .max()
    };
    all.sort_by_key(|(unit, entries)| std::cmp::Reverse((newest(entries), *unit)));
    all
}
