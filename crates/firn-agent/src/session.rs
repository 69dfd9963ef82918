//! One connection of an agent: receives requests and answers them one after the other.
//!
//! A puller's connection lists a path, and then opens, reads, checks and releases files of that list. A *following*
//! connection of a partner lists held files and marks those of which the partner has a copy.
//!
//! Promises
//! * A connection holds at most [`FILES_MAX`] files, and none after its end or after the next list.
//! * A puller that sends no request for [`IDLE_TIMEOUT`], or does not receive an answer within [`ANSWER_TIMEOUT`], is
//!   disconnected.

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

/// Maximum number of files that one connection holds.
const FILES_MAX: usize = 64;
/// Maximum time without a request of a puller. The puller's disk may stall for that time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time without a request of a partner. After that time the partner counts as dead, and its marks become void.
const FOLLOWER_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for one answer of at most [`BLOCK_BYTES`]: a puller must receive at least 9 KB/s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of a frame for entries. The remaining bytes are for the JSON around them.
const ENTRIES_BYTES: usize = FRAME_BYTES_MAX - 1024;
/// Maximum length of the JSON of an entry without its path and link target.
const ENTRY_JSON_BYTES: usize = 320;
/// Maximum length of the JSON of one byte of a path: a control character becomes `\u001b`, a byte that is not UTF-8
/// `\\xe9`.
const JSON_BYTES_PER_NAME_BYTE: usize = 6;

/// Number of sent bytes after which their count is reported to firnd again.
const REPORT_BYTES: u64 = 64 << 20;

/// Files and bytes that a connection has sent, for the log and the status.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// One connection of an agent; see the head of this file.
///
/// The order of the fields matters, because they are dropped in this order.
pub(crate) struct Session<'a, T> {
    link: Link<T>,
    /// Mount point of the mount that the agent serves. `None` for an agent of ssh, whose mount the listed path
    /// determines.
    scope: Option<&'a Path>,
    /// Bound of held bytes that all connections share; `None` for an agent of ssh.
    holds: Option<&'a Arc<Holds>>,
    log: &'a Log,
    /// Partners of this host and hosts whose partner it is; `None` for an agent of ssh.
    service: Option<&'a Arc<PartnerService>>,
    /// Memory that the puller may read by libfabric. It precedes `files`, because the right to read must end before the
    /// files are released.
    exposure: Option<Exposure>,
    /// Held files by their number. They precede `origin`, because a chunk list must end before its connection.
    files: BTreeMap<u32, OriginFile>,
    /// The origin from which files are opened; `None` before the first list.
    origin: Option<Origin>,
    offer: Offer,
    /// `Some` if the other side is a partner that follows this host.
    following: Option<Following>,
    sent: Sent,
    /// The part of `sent` that was already reported to firnd.
    reported: Sent,
}

/// State of a connection whose other side is the partner of this host, or a former partner.
struct Following {
    /// The right to be the follower. It precedes `source`, because it must end before the connection on which the marks
    /// depend.
    registration: Registration,
    /// The mount, over the connection on which files are marked.
    source: Source,
    /// Name of the partner.
    host: String,
    /// Note about this partner for the status, used if the partner itself sets none. `None` for a former partner, of
    /// which firnd is not notified.
    note: Option<String>,
    /// The held files of the last list, each with the number of changes that the partner has marked since.
    marks: BTreeMap<BytePath, Option<u64>>,
}

impl<'a, T: Transport> Session<'a, T> {
    /// Makes a session over a connection whose handshake is complete.
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

    /// Adds the offer of libfabric that a puller may accept.
    pub(crate) fn offering(self, offer: Offer) -> Self {
        Self { offer, ..self }
    }

    /// Answers requests until the connection ends.
    pub(crate) fn serve(&mut self) -> Result<(), WireError> {
        loop {
            let timeout = match self.following {
                Some(_) => FOLLOWER_IDLE_TIMEOUT,
                None => IDLE_TIMEOUT,
            };
            let deadline = Instant::now() + timeout;
            let request = match self.link.receive(FRAME_BYTES_MAX, deadline) {
                Err(WireError::Ended) => return Ok(()),
                request => request?,
            };
            if let Some(following) = &self.following
                && !following.registration.record_request()
            {
                return Err(WireError::OutOfTurn(
                    "the partner follows over another connection".into(),
                ));
            }
            self.answer(request)?;
        }
    }

    /// Files and bytes sent so far.
    pub(crate) fn sent(&self) -> Sent {
        self.sent
    }

    fn answer(&mut self, request: Request) -> Result<(), WireError> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let reply = match request {
            Request::List { path } => {
                let listed = self.list(&path);
                return self.answer_list(&path, listed);
            }
            Request::ListHeld { path } => {
                let listed = self
                    .list_held(&path)
                    .map_err(|error| self.mark_stale_if_unmounted(error));
                return self.answer_list(&path, listed);
            }
            Request::Adopt { host } => self.adopt(&host),
            Request::Follow { host } => self
                .follow(host)
                .map_err(|error| self.mark_stale_if_unmounted(error)),
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
        // The deadline is set after the list was made, because listing a large tree may take longer than the timeout.
        let deadline = Instant::now() + ANSWER_TIMEOUT;
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

    /// Lists a path of the mount, or partner copies if the path is relative.
    fn list(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        let is_copy = !path.is_empty() && !path.as_path().is_absolute();
        if is_copy {
            return self.list_copies(path);
        }
        self.list_mounted(path)
            .map_err(|error| self.mark_stale_if_unmounted(error))
    }

    /// Makes an error stale if the mount of this agent is gone. The mount of a killed firnd may soon return, so the
    /// puller should try again.
    fn mark_stale_if_unmounted(&self, error: SourceError) -> SourceError {
        SourceError {
            kind: match self.scope {
                Some(scope) if firn_client::find(scope).is_err() => ErrorKind::Stale,
                _ => error.kind,
            },
            ..error
        }
    }

    /// Lists partner copies. `path` is `HOST/path`: the name of the host that held the files, and a path on that host.
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

    /// Returns the partner copies beside the arena of the only mount of this user.
    fn find_copies(&self) -> Result<Copies, SourceError> {
        let path = self.resolve(&BytePath::default())?;
        let region = OpenMount::open(&path)?.region().path.clone();
        Ok(Copies::new(Copies::beside(region.as_path()), 0))
    }

    /// Lists held files. For a partner, only the files that the partner must copy are listed as closed.
    fn list_held(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), SourceError> {
        if let Some(following) = &mut self.following {
            return Ok((path.clone(), following.list(path)?));
        }
        let source = self.open_source(&self.resolve(&BytePath::default())?)?;
        let entries = source.list_held(path)?;
        self.set_source(source);
        Ok((path.clone(), entries))
    }

    /// Makes a mount the origin of the files of this connection. firnd counts the connection as a puller from now on.
    fn set_source(&mut self, source: Source) {
        source.report(0, 0);
        self.origin = Some(Origin::Mount(source));
    }

    /// Releases the files of the last list, and the right to read memory.
    fn forget_list(&mut self) {
        self.exposure = None;
        self.files.clear();
        self.origin = None;
    }

    /// Opens the mount for a new list. It is opened for each list, because it may have been mounted again since the
    /// last one.
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
        self.set_source(source);
        Ok((relative, entries))
    }

    /// Returns the path on this host that corresponds to a puller's path. An empty path means the served mount; for an
    /// agent of ssh, the only mount of this user.
    fn resolve(&self, path: &BytePath) -> Result<PathBuf, SourceError> {
        if !path.is_empty() {
            if path.as_path().is_absolute() {
                return Ok(path.clone().into());
            }
            return Err(refused(format!("{path} is not an absolute path")));
        }
        if let Some(scope) = self.scope {
            return Ok(scope.to_owned());
        }
        match firn_client::mounts()?.as_slice() {
            [mount] => Ok(mount.mount_point.clone()),
            mounts => Err(refused(format!(
                "there are {} mounts of this user: name a path on one of them",
                mounts.len()
            ))),
        }
    }

    /// Holds a file under a number. The reply is `Full` in three cases: this connection holds the maximum number of
    /// files, the number is in use, or the agent holds the maximum number of bytes.
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

    /// Answers `Read` by sending bytes. With a staging buffer, answers `Place` by sending the addresses of the bytes.
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
            return link.send(&file_not_held(file).into_reply(), deadline);
        };
        if let Err(error) = check_range(bytes) {
            return link.send(&error.into_reply(), deadline);
        }
        let hasher = link.block_hasher();
        let (mut in_line, mut placed);
        let data: &mut dyn DataPath<T> = match buffer {
            None => {
                in_line = InLine::begin(hasher, deadline);
                &mut in_line
            }
            Some(buffer) => match exposure
                .as_mut()
                .and_then(|exposure| exposure.begin_answer(buffer, hasher, deadline))
            {
                Some(data_path) => {
                    placed = data_path;
                    &mut placed
                }
                None => return link.send(&buffer_not_exposed(buffer).into_reply(), deadline),
            },
        };
        let count = bytes.min(held.bytes().saturating_sub(offset));
        match origin.send(held, offset, bytes, link, data) {
            Ok(()) => {
                if buffer.is_some() {
                    self.log.say(Level::Step, || {
                        format!("(5) sent the addresses of {count} bytes of file {file} from {offset} on")
                    });
                }
                self.sent.bytes += count;
                if self.sent.bytes - self.reported.bytes >= REPORT_BYTES {
                    self.report();
                }
                Ok(())
            }
            Err(SendError::Wire(error)) => Err(error),
            // A part of the answer may already be sent, so the puller would take an error message for the next part.
            Err(SendError::Source(error)) => {
                Err(WireError::Io(std::io::Error::other(error.message)))
            }
        }
    }

    /// Registers memory with libfabric, so that the puller can read it.
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

    /// Computes the checksum of a range of a held file.
    fn sum(&mut self, file: u32, offset: u64, bytes: u64) -> Result<Reply, SourceError> {
        check_range(bytes)?;
        let Self { origin, files, .. } = self;
        let (Some(origin), Some(held)) = (origin, files.get_mut(&file)) else {
            return Err(file_not_held(file));
        };
        let (bytes, sum) = origin.sum(held, offset, bytes)?;
        Ok(Reply::Sum {
            bytes,
            xxh3: format!("{sum:032x}"),
        })
    }

    /// Checks whether the bytes that were read of a file are one state of the file.
    fn check(&mut self, file: u32) -> Result<Reply, SourceError> {
        let held = self.files.get(&file).ok_or_else(|| file_not_held(file))?;
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
            .say(Level::Step, || format!("(9) released file {file}"));
        Reply::Done
    }

    /// Reports to firnd what was sent since the last report.
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

    /// Begins to follow a host that requests this host as its partner.
    fn adopt(&self, host: &str) -> Result<Reply, SourceError> {
        let adopted = self.service()?.adopt(host);
        adopted.map(|()| Reply::Done).map_err(refused)
    }

    /// Makes this connection that of the partner `host`. Returns the incarnation of the followed firnd, and its arena.
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

    /// Records that the follower has a copy of a file. Only marks of the current partner are passed to firnd.
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

    /// Sets the note about the partner in the status. An empty text restores this host's own note.
    fn note(&self, text: &str) -> Result<Reply, SourceError> {
        let following = self.following.as_ref().ok_or_else(not_following)?;
        let Some(default_note) = &following.note else {
            return Ok(Reply::Done);
        };
        let note = if text.is_empty() { default_note } else { text };
        let announced = following.source.announce_partner(&following.host, note);
        announced.map(|()| Reply::Done)
    }

    fn service(&self) -> Result<&'a Arc<PartnerService>, SourceError> {
        self.service
            .ok_or_else(|| refused("an agent of ssh has no partners".into()))
    }

    fn origin(&self) -> Result<&Origin, SourceError> {
        self.origin.as_ref().ok_or_else(|| SourceError {
            kind: ErrorKind::Refused,
            message: "the request is not allowed before a list".into(),
        })
    }
}

impl Following {
    /// Lists held files for the follower, and adjusts the list to its role.
    ///
    /// A former partner sees unmarked files as open, so that only the current partner copies them. A dismissed partner
    /// sees an empty mount, and then drops its copies.
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
        // A former partner that has become the partner must follow again. Only then does firnd know of it and accept
        // its marks.
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
            let full_path = join(path, entry.path.as_path());
            let mark = self.marks.get(&full_path).copied().flatten();
            let is_marked = mark == Some(held.changes);
            marks.insert(full_path, mark.filter(|_| is_marked));
            // The mark of another host does not count for this follower, which must mark the file itself.
            held.partnered &= is_marked;
            if role == Role::Former && !is_marked {
                // Followers copy only closed files. This file must be copied by the current partner.
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

/// Makes the error of a request that is only allowed after `Follow`.
fn not_following() -> SourceError {
    refused("this connection is not one of a partner".into())
}

fn refused(message: String) -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message,
    }
}

fn file_not_held(file: u32) -> SourceError {
    refused(format!("this connection holds no file {file}"))
}

fn buffer_not_exposed(buffer: u32) -> SourceError {
    refused(format!(
        "this connection exposes no staging buffer {buffer}"
    ))
}

/// Refuses a request for zero bytes, or for more than a block.
fn check_range(bytes: u64) -> Result<(), SourceError> {
    if (1..=BLOCK_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(refused(format!(
        "a request for {bytes} bytes: 1 to {BLOCK_BYTES} are allowed"
    )))
}

/// Divides entries into batches that fit into a frame each.
fn batches(mut entries: &[Entry]) -> Vec<&[Entry]> {
    let mut batches = Vec::new();
    while !entries.is_empty() {
        let mut bytes = 0;
        let fits = entries.iter().take_while(|entry| {
            bytes += json_bytes_max(entry);
            bytes <= ENTRIES_BYTES
        });
        // A single entry always fits.
        let count = fits.count().max(1);
        let (batch, rest) = entries.split_at(count);
        batches.push(batch);
        entries = rest;
    }
    batches
}

/// Returns an upper bound of the length of an entry as JSON.
fn json_bytes_max(entry: &Entry) -> usize {
    ENTRY_JSON_BYTES + JSON_BYTES_PER_NAME_BYTE * entry.name_bytes()
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
