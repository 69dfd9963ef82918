//! One connection of an agent: requests and their answers, one after the other.
//!
//! Promises
//! * At most [`FILES_MAX`] files are held, and nothing after the end of the connection.
//! * A puller that sends nothing for [`IDLE_LIMIT`], or does not take an answer within [`ANSWER_LIMIT`], is let go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_client::OpenMount;
use firn_protocol::path::BytePath;

use crate::data_path::{DataPath, InLine};
use crate::error::WireError;
use crate::exposure::{Exposure, Offer};
use crate::holds::Holds;
use crate::link::Link;
use crate::message::{BLOCK_BYTES, Entry, ErrorKind, FRAME_BYTES_MAX, Reply, Request};
use crate::origin::{Origin, OriginFile};
use crate::partner::{Copies, PartnerService, Registration, Role};
use crate::server::{Level, Log};
use crate::source::{SendError, Source, SourceError, join};
use crate::transport::Transport;

/// Files that one connection holds at most.
const FILES_MAX: usize = 64;
/// How long a puller may ask nothing: as long as its disk may stand still.
const IDLE_LIMIT: Duration = Duration::from_secs(120);
/// Longest silence of a partner that follows. After it the partner counts as dead, and its copies do not count.
const FOLLOWER_IDLE_LIMIT: Duration = Duration::from_secs(10);
/// How long a puller may take for one answer, of [`BLOCK_BYTES`] at most: 9 KB/s.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Bytes of entries that go into one frame, by the longest that they can become as JSON.
const ENTRIES_BYTES: usize = FRAME_BYTES_MAX - 1024;

/// Bytes after which the status is told again how much was sent.
const REPORT_BYTES: u64 = 64 << 20;

/// What a connection did, for the log and the status.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// See the head of this file.
pub(crate) struct Session<'a, T> {
    link: Link<T>,
    /// The mount that the agent serves; none: the one that the first path is on.
    scope: Option<&'a Path>,
    holds: Option<&'a Arc<Holds>>,
    log: &'a Log,
    /// What the agent knows of partners; none where it serves one puller.
    service: Option<&'a Arc<PartnerService>>,
    /// What the puller reads by itself. Before [`Session::files`]: its right ends before what is held for it.
    exposure: Option<Exposure>,
    /// Before [`Session::origin`]: lists end before their connection.
    files: BTreeMap<u32, OriginFile>,
    origin: Option<Origin>,
    offer: Offer,
    following: Option<Following>,
    sent: Sent,
    /// The part of it that firnd knows of.
    reported: Sent,
}

/// The other side is the partner of this host, or was, and follows it.
struct Following {
    /// Before its connection to firnd ends.
    registration: Registration,
    /// Connection that marks files.
    source: Source,
    host: String,
    /// What a person should know of this partner, whatever it says itself; none: it is a former one, of which firnd
    /// does not hear.
    note: Option<String>,
    /// What was held at its last list, with the changes of which it has said since that it has copies.
    marks: BTreeMap<BytePath, Option<u64>>,
}

impl<'a, T: Transport> Session<'a, T> {
    /// Over a connection whose other end was found to be a puller.
    pub(crate) fn new(
        link: Link<T>,
        scope: Option<&'a Path>,
        holds: Option<&'a Arc<Holds>>,
        service: Option<&'a Arc<PartnerService>>,
        log: &'a Log,
    ) -> Self {
        Self {
            link,
            scope,
            holds,
            log,
            service,
            files: BTreeMap::new(),
            origin: None,
            offer: Offer::default(),
            exposure: None,
            following: None,
            sent: Sent::default(),
            reported: Sent::default(),
        }
    }

    /// Adds the offer of libfabric near an address of this host, as far as options allow it.
    pub(crate) fn offering(self, offer: Offer) -> Self {
        Self { offer, ..self }
    }

    /// Answers until the connection ends.
    pub(crate) fn serve(&mut self) -> Result<(), WireError> {
        loop {
            let limit = match self.following {
                Some(_) => FOLLOWER_IDLE_LIMIT,
                None => IDLE_LIMIT,
            };
            let idle = Instant::now() + limit;
            let request = match self.link.receive(FRAME_BYTES_MAX, idle) {
                Err(WireError::Ended) => return Ok(()),
                request => request?,
            };
            if let Some(following) = &self.following
                && !following.registration.hear()
            {
                return Err(WireError::OutOfTurn(
                    "it follows by another connection".into(),
                ));
            }
            self.answer(request)?;
        }
    }

    pub(crate) fn sent(&self) -> Sent {
        self.sent
    }

    fn answer(&mut self, request: Request) -> Result<(), WireError> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let reply = match request {
            Request::List { path } => {
                let listed = self.list(&path);
                return self.answer_list(&path, listed);
            }
            Request::ListHeld { path } => {
                let listed = self.list_held(&path).map_err(|error| self.explain(error));
                return self.answer_list(&path, listed);
            }
            Request::Adopt { host } => self.adopt(&host),
            Request::Follow { host } => self.follow(host).map_err(|error| self.explain(error)),
            Request::Mark { path, changes } => self.mark(&path, changes),
            Request::Note { text } => self.note(&text),
            Request::Beat => Ok(Reply::Done),
            Request::Read {
                file,
                offset,
                bytes,
            } => return self.answer_read(file, offset, bytes, None, deadline),
            Request::Place {
                file,
                offset,
                bytes,
                buffer,
            } => return self.answer_read(file, offset, bytes, Some(buffer), deadline),
            Request::Expose { providers, sums } => self.expose(&providers, sums),
            Request::Open { file, path } => self.open(file, &path),
            Request::Sum {
                file,
                offset,
                bytes,
            } => self.sum(file, offset, bytes),
            Request::Check { file } => self.check(file),
            Request::Release { file } => Ok(self.release(file)),
            Request::Hello(_) | Request::Ready => {
                return Err(WireError::OutOfTurn("the handshake is over".into()));
            }
        };
        let reply = reply.unwrap_or_else(SourceError::into_reply);
        self.link.send(&reply, deadline)
    }

    // ---- requests ------------------------------------------------------------------------------

    fn answer_list(
        &mut self,
        path: &BytePath,
        listed: Result<(BytePath, Vec<Entry>), SourceError>,
    ) -> Result<(), WireError> {
        // A large tree takes its time; that is no fault.
        let deadline = Instant::now() + ANSWER_LIMIT;
        match listed {
            Ok((relative, entries)) => {
                self.log.say(Level::Step, || {
                    format!("(4) listed {} entries of {path}", entries.len())
                });
                for batch in batches(&entries) {
                    let entries = batch.to_vec();
                    self.link.send(&Reply::Entries { entries }, deadline)?;
                }
                self.link.send(&Reply::Listed { path: relative }, deadline)
            }
            Err(error) => self.link.send(&error.into_reply(), deadline),
        }
    }

    fn list(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        let is_copy = !path.is_empty() && !path.as_path().is_absolute();
        let listed = if is_copy {
            return self.list_copies(path);
        } else {
            self.list_mounted(path)
        };
        listed.map_err(|error| self.explain(error))
    }

    fn explain(&self, error: SourceError) -> SourceError {
        SourceError {
            // A firnd that was killed may be mounted again soon.
            kind: match self.scope {
                Some(scope) if firn_client::find(scope).is_err() => ErrorKind::Stale,
                _ => error.kind,
            },
            ..error
        }
    }

    /// `HOST/path`: what this host has of another one.
    fn list_copies(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        let copies = match self.service {
            Some(service) => Arc::clone(&service.copies),
            None => Arc::new(self.find_copies()?),
        };
        let entries = copies.list(path)?;
        self.forget_list();
        self.origin = Some(Origin::Copies(copies));
        Ok((path.clone(), entries))
    }

    /// Those beside the arena of the only mount.
    fn find_copies(&self) -> Result<Copies, SourceError> {
        let path = self.resolve(&BytePath::default())?;
        let region = OpenMount::open(&path)?.region().path.clone();
        Ok(Copies::new(Copies::beside(region.as_path()), 0))
    }

    fn list_held(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        if let Some(following) = &mut self.following {
            return Ok((path.clone(), following.list(path)?));
        }
        let source = self.open_source(&self.resolve(&BytePath::default())?)?;
        let entries = source.list_held(path)?;
        self.give(source);
        Ok((path.clone(), entries))
    }

    /// This connection is a puller's from now on, also for firnd.
    fn give(&mut self, source: Source) {
        source.report(0, 0);
        self.origin = Some(Origin::Mount(source));
    }

    /// Lets go of all that the last list gave a right to.
    fn forget_list(&mut self) {
        self.exposure = None;
        self.files.clear();
        self.origin = None;
    }

    /// A mount that was mounted anew since the last list is another one.
    fn open_source(&mut self, path: &Path) -> Result<Source, SourceError> {
        self.forget_list();
        let source = Source::open(self.scope.unwrap_or(path), self.holds)?;
        self.log
            .say(Level::Step, || "(2) mapped the data region".into());
        Ok(source)
    }

    fn list_mounted(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        let path = self.resolve(path)?;
        let source = self.open_source(&path)?;
        let relative = source.relative(&path)?;
        let entries = source.list(&relative)?;
        self.give(source);
        Ok((relative, entries))
    }

    /// The path of this host that a puller means.
    fn resolve(&self, path: &BytePath) -> Result<PathBuf, SourceError> {
        match (path.is_empty(), self.scope) {
            (true, Some(scope)) => Ok(scope.to_owned()),
            (true, None) => match firn_client::mounts()?.as_slice() {
                [mount] => Ok(mount.mount_point.clone()),
                mounts => Err(SourceError {
                    kind: ErrorKind::Refused,
                    message: format!(
                        "there are {} mounts of this user: name a path on one of them",
                        mounts.len()
                    ),
                }),
            },
            (false, _) if !path.as_path().is_absolute() => Err(SourceError {
                kind: ErrorKind::Refused,
                message: format!("{path} is not an absolute path"),
            }),
            (false, _) => Ok(path.clone().into()),
        }
    }

    fn open(&mut self, file: u32, path: &BytePath) -> Result<Reply, SourceError> {
        if self.files.len() >= FILES_MAX || self.files.contains_key(&file) {
            return Ok(Reply::Full);
        }
        let Some(held) = self.origin()?.open(path)? else {
            return Ok(Reply::Full);
        };
        let bytes = held.bytes();
        let changes = held.changes();
        self.log
            .say(Level::Step, || format!("(5) holds {path}, {bytes} bytes"));
        self.files.insert(file, held);
        Ok(Reply::Opened { bytes, changes })
    }

    /// Answers a read; with a staging buffer, by telling where the bytes are.
    fn answer_read(
        &mut self,
        file: u32,
        offset: u64,
        bytes: u64,
        buffer: Option<u32>,
        deadline: Instant,
    ) -> Result<(), WireError> {
        let Self {
            link,
            origin,
            files,
            exposure,
            ..
        } = self;
        let (Some(origin), Some(held)) = (origin, files.get_mut(&file)) else {
            return link.send(&not_held(file).into_reply(), deadline);
        };
        if let Err(error) = check_range(bytes) {
            return link.send(&error.into_reply(), deadline);
        }
        let hasher = link.block_hasher();
        let (mut in_line, mut told);
        let data: &mut dyn DataPath<T> = match buffer {
            None => {
                in_line = InLine::begin(hasher, deadline);
                &mut in_line
            }
            Some(buffer) => match exposure
                .as_mut()
                .and_then(|own| own.tell(buffer, hasher, deadline))
            {
                Some(begun) => {
                    told = begun;
                    &mut told
                }
                None => return link.send(&not_exposed(buffer).into_reply(), deadline),
            },
        };
        let count = bytes.min(held.bytes().saturating_sub(offset));
        match origin.send(held, offset, bytes, link, data) {
            Ok(()) => {
                if buffer.is_some() {
                    self.log.say(Level::Step, || {
                        format!("(5) told where {count} bytes of file {file} from {offset} on are")
                    });
                }
                self.sent.bytes += count;
                if self.sent.bytes - self.reported.bytes >= REPORT_BYTES {
                    self.report();
                }
                Ok(())
            }
            Err(SendError::Wire(error)) => Err(error),
            // The other side waits for bytes: nothing that could be said now would be understood.
            Err(SendError::Source(error)) => {
                Err(WireError::Io(std::io::Error::other(error.message)))
            }
        }
    }

    fn expose(&mut self, providers: &[String], sums: bool) -> Result<Reply, SourceError> {
        self.exposure = None;
        if self.link.is_encrypted() {
            return Err(refused(
                "the connection is encrypted, and libfabric encrypts nothing".into(),
            ));
        }
        let Origin::Mount(source) = self.origin()? else {
            return Err(refused(
                "copies of other hosts are sent over the connection only: use --transport tcp"
                    .into(),
            ));
        };
        let (exposure, exposed) = Exposure::open(&self.offer, source.mount(), providers, sums)?;
        self.log.say(Level::Step, || format!("(2) {exposure}"));
        self.exposure = Some(exposure);
        Ok(Reply::Exposed(exposed))
    }

    fn sum(&mut self, file: u32, offset: u64, bytes: u64) -> Result<Reply, SourceError> {
        check_range(bytes)?;
        let Self { origin, files, .. } = self;
        let (Some(origin), Some(held)) = (origin, files.get_mut(&file)) else {
            return Err(not_held(file));
        };
        let (bytes, sum) = origin.sum(held, offset, bytes)?;
        Ok(Reply::Sum {
            bytes,
            xxh3: format!("{sum:032x}"),
        })
    }

    fn check(&mut self, file: u32) -> Result<Reply, SourceError> {
        let held = self.files.get(&file).ok_or_else(|| not_held(file))?;
        if self.exposure.is_some() {
            self.log
                .say(Level::Step, || format!("(6) file {file} was read"));
        }
        let (changed, snapshot) = self.origin()?.check(held)?;
        self.log.say(Level::Step, || {
            format!("(7) checked file {file}: changed {changed}, snapshot {snapshot}")
        });
        Ok(Reply::Checked { changed, snapshot })
    }

    fn release(&mut self, file: u32) -> Reply {
        if self.files.remove(&file).is_some() {
            self.sent.files += 1;
            self.report();
        }
        self.log
            .say(Level::Step, || format!("(9) let go of file {file}"));
        Reply::Done
    }

    fn report(&mut self) {
        if let Some(Origin::Mount(source)) = &self.origin {
            source.report(
                self.sent.files - self.reported.files,
                self.sent.bytes - self.reported.bytes,
            );
            self.reported = self.sent;
        }
    }

    // ---- partners ------------------------------------------------------------------------------

    fn adopt(&self, host: &str) -> Result<Reply, SourceError> {
        let adopted = self.service()?.adopt(host);
        adopted.map(|()| Reply::Done).map_err(refused)
    }

    fn follow(&mut self, host: String) -> Result<Reply, SourceError> {
        let (registration, note) = self.service()?.register_follower(&host)?;
        let source = self.open_source(&self.resolve(&BytePath::default())?)?;
        if let Some(note) = &note {
            source.announce_partner(&host, note)?;
        }
        let (incarnation, arena) = source.identity()?;
        self.following = Some(Following {
            registration,
            source,
            host,
            note,
            marks: BTreeMap::new(),
        });
        Ok(Reply::Following { incarnation, arena })
    }

    fn mark(&mut self, path: &BytePath, changes: u64) -> Result<Reply, SourceError> {
        let following = self.following.as_mut().ok_or_else(not_following)?;
        if following.note.is_some() {
            following.source.mark_partnered(path, changes)?;
        }
        if let Some(mark) = following.marks.get_mut(path) {
            *mark = Some(changes);
        }
        Ok(Reply::Done)
    }

    fn note(&self, text: &str) -> Result<Reply, SourceError> {
        let following = self.following.as_ref().ok_or_else(not_following)?;
        let Some(own) = &following.note else {
            return Ok(Reply::Done);
        };
        let note = if text.is_empty() { own } else { text };
        let said = following.source.announce_partner(&following.host, note);
        said.map(|()| Reply::Done)
    }

    fn service(&self) -> Result<&'a Arc<PartnerService>, SourceError> {
        self.service
            .ok_or_else(|| refused("an agent of ssh has no partners".into()))
    }

    fn origin(&self) -> Result<&Origin, SourceError> {
        self.origin.as_ref().ok_or_else(|| SourceError {
            kind: ErrorKind::Refused,
            message: "a puller lists before it opens".into(),
        })
    }
}

impl Following {
    /// What is held, as far as it is for this host.
    fn list(&mut self, path: &BytePath) -> Result<Vec<Entry>, SourceError> {
        let role = self.registration.role();
        let mut entries = match role {
            Role::Partner | Role::Former => self.source.list_held(path)?,
            Role::Dismissed => return Ok(vec![Entry::directory()]),
            Role::Over => {
                let host = &self.host;
                return Err(refused(format!("{host} is not the partner any more")));
            }
        };
        // One that was a former when it came follows anew: firnd hears of a partner, and takes its marks, from then on.
        if role == Role::Partner && self.note.is_none() {
            return Err(SourceError {
                kind: ErrorKind::Stale,
                message: format!("{} has become the partner", self.host),
            });
        }
        let mut marks = BTreeMap::new();
        for entry in &mut entries {
            let Some(held) = &mut entry.held else {
                continue;
            };
            let full = join(path, entry.path.as_path());
            let mark = self.marks.get(&full).copied().flatten();
            let is_marked = mark == Some(held.changes);
            marks.insert(full, mark.filter(|_| is_marked));
            // What another host has marked, this one marks as well.
            held.partnered &= is_marked;
            if role == Role::Former && !is_marked {
                // It copies what is closed, and this is for the partner to copy.
                entry.mark_open();
            }
        }
        self.marks = marks;
        if role == Role::Partner && self.marks.values().all(Option::is_some) {
            self.registration.settle();
        }
        Ok(entries)
    }
}

fn not_following() -> SourceError {
    refused("this connection does not follow".into())
}

fn refused(message: String) -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message,
    }
}

fn not_held(file: u32) -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: format!("this connection holds no file {file}"),
    }
}

fn not_exposed(buffer: u32) -> SourceError {
    refused(format!(
        "this connection exposes no staging buffer {buffer}"
    ))
}

fn check_range(bytes: u64) -> Result<(), SourceError> {
    if (1..=BLOCK_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(SourceError {
        kind: ErrorKind::Refused,
        message: format!("{bytes} bytes are not between 1 and {BLOCK_BYTES}"),
    })
}

/// Entries in groups that fit into a frame each.
fn batches(mut entries: &[Entry]) -> Vec<&[Entry]> {
    let mut batches = Vec::new();
    while !entries.is_empty() {
        let mut bytes = 0;
        let fits = entries.iter().take_while(|entry| {
            bytes += json_bytes_max(entry);
            bytes <= ENTRIES_BYTES
        });
        // One alone always fits.
        let count = fits.count().max(1);
        let (batch, rest) = entries.split_at(count);
        batches.push(batch);
        entries = rest;
    }
    batches
}

/// A byte of a path takes six at most: a control character is `\u001b`, a byte that is no UTF-8 `\\xe9`.
fn json_bytes_max(entry: &Entry) -> usize {
    320 + 6 * entry.name_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::EntryKind;

    #[test]
    fn every_batch_of_entries_fits_into_a_frame() {
        let entry = |bytes: usize, fill: u8| Entry {
            path: vec![fill; bytes].into(),
            kind: EntryKind::Link {
                target: vec![fill; bytes].into(),
            },
            mode: 0o7777,
            mtime_s: i64::MIN,
            mtime_ns: u32::MAX,
            held: None,
        };
        for fill in [b'a', 0x1b, 0xe9, b'\\', b'"'] {
            let entries: Vec<_> = [1, 4096, 0, 200, 4096, 4096, 4096, 3, 2000]
                .map(|bytes| entry(bytes, fill))
                .into();
            let batches = batches(&entries);
            assert_eq!(batches.concat(), entries);
            for batch in batches {
                let entries = batch.to_vec();
                let frame = serde_json::to_vec(&Reply::Entries { entries }).unwrap();
                assert!(frame.len() <= FRAME_BYTES_MAX, "{} bytes", frame.len());
            }
        }
    }
}
