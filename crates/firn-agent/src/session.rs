//! One connection of an *agent*, the process that serves the files of a mount to other hosts. Receives requests and
//! answers them one after the other.
//!
//! A *puller* copies files to another host. Its connection lists a path, and then opens, reads, checks and releases
//! files of that list. A *partner* is a host that keeps copies of the files that this host has in memory only. Its
//! *following* connection lists these files and marks those of which the partner has a copy.
//!
//! A connection *holds* each file from its opening to its release: the file's bytes in memory do not change meanwhile.
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

use crate::data_path::StreamAnswer;
use crate::error::WireError;
use crate::exposure::{Exposure, FabricOffer};
use crate::hold_budget::HoldBudget;
use crate::link::Link;
use crate::message::{
    BLOCK_BYTES, Entry, EntryList, ErrorKind, FRAME_BYTES_MAX, FirndIdentity, Reply, Request,
};
use crate::origin::{Origin, OriginFile};
use crate::partner::{CopyStore, PartnerService, RegisteredFollower, Registration, Role};
use crate::server::{Level, Log};
use crate::source::{FileCheck, SendError, Source, SourceError, join};
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

/// The state of an agent that its connections share. An agent that ssh has started has only a log.
pub(crate) struct SessionContext<'a> {
    /// Mount point of the mount that the agent serves. `None` for an agent of ssh, whose mount the listed path
    /// determines.
    pub(crate) mount_point: Option<&'a Path>,
    /// Budget of held bytes of all connections. `None` for an agent of ssh.
    pub(crate) hold_budget: Option<&'a Arc<HoldBudget>>,
    /// Partners of this host and hosts whose partner it is. `None` for an agent of ssh.
    pub(crate) service: Option<&'a Arc<PartnerService>>,
    pub(crate) log: &'a Log,
}

/// One connection of an agent; see the head of this file.
///
/// The order of the fields matters, because they are dropped in this order.
pub(crate) struct Session<'a, T> {
    link: Link<T>,
    context: SessionContext<'a>,
    /// Memory that the puller may read by libfabric. It precedes `files`, because the right to read must end before the
    /// files are released.
    exposure: Option<Exposure>,
    /// Held files by their number. They precede `origin`, because a chunk list must end before its connection.
    files: BTreeMap<u32, OriginFile>,
    /// The origin from which files are opened; `None` before the first list.
    origin: Option<Origin>,
    fabric_offer: FabricOffer,
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
    default_note: Option<String>,
    /// The held files of the last list. The value is the number of changes in the follower's mark of the file; `None`
    /// if the file is not marked.
    marked_changes: BTreeMap<BytePath, Option<u64>>,
}

/// The range of a held file that a request names.
#[derive(Clone, Copy)]
struct FileRange {
    /// Number of the file, chosen by the puller.
    file_number: u32,
    offset: u64,
    bytes: u64,
}

impl FileRange {
    fn new(file_number: u32, offset: u64, bytes: u64) -> Self {
        Self {
            file_number,
            offset,
            bytes,
        }
    }

    /// Returns the number of bytes of the range that a file of `file_bytes` has.
    fn bytes_within(&self, file_bytes: u64) -> u64 {
        self.bytes.min(file_bytes.saturating_sub(self.offset))
    }
}

impl<'a, T: Transport> Session<'a, T> {
    /// Makes a session over a connection whose handshake is complete.
    pub(crate) fn new(link: Link<T>, context: SessionContext<'a>) -> Self {
        Self {
            link,
            context,
            files: BTreeMap::new(),
            origin: None,
            fabric_offer: FabricOffer::default(),
            exposure: None,
            following: None,
            sent: Sent::default(),
            reported: Sent::default(),
        }
    }

    /// Adds the offer of libfabric that a puller may accept.
    pub(crate) fn with_fabric_offer(self, fabric_offer: FabricOffer) -> Self {
        Self {
            fabric_offer,
            ..self
        }
    }

    /// Answers requests until the connection ends. Returns `Ok` if the other side has closed it between two requests.
    ///
    /// Fails if no request comes in time. A partner, which keeps copies of this host's files, may have reconnected. Its
    /// older connection is then superseded, and fails too.
    pub(crate) fn serve(&mut self) -> Result<(), WireError> {
        loop {
            let idle_timeout = match self.following {
                Some(_) => FOLLOWER_IDLE_TIMEOUT,
                None => IDLE_TIMEOUT,
            };
            let deadline = Instant::now() + idle_timeout;
            let request = match self.link.receive(FRAME_BYTES_MAX, deadline) {
                Ok(request) => request,
                Err(WireError::Ended) => return Ok(()),
                Err(error) => return Err(error),
            };
            // A newer connection of the same partner has replaced this one.
            if let Some(following) = &self.following
                && !following.registration.is_current()
            {
                return Err(WireError::OutOfTurn(
                    "the partner has opened a newer connection and copies over that one".into(),
                ));
            }
            self.answer(request)?;
        }
    }

    /// Files and bytes sent so far.
    pub(crate) fn sent(&self) -> Sent {
        self.sent
    }

    /// Writes a line about a step of the protocol to the log, if such lines are enabled. The number in the text orders
    /// the steps of a pull: 1 connection, 2 mount and memory, 4 list, 5 open files, 6 and 7 checks, 9 release.
    fn log_step(&self, text: impl FnOnce() -> String) {
        self.context.log.say(Level::Step, text);
    }

    /// Carries out a request of the other host and sends its answer. A refusal is an answer too. The variants of
    /// [`Request`] say what each request means.
    ///
    /// Lists and bytes have answers of several messages, so their functions send these themselves. For the other
    /// requests, this function sends the single reply.
    ///
    /// After an error the connection must end: it has failed, the request was out of turn, or an answer was broken off.
    fn answer(&mut self, request: Request) -> Result<(), WireError> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let result = match request {
            Request::List { path } => {
                let listed = self.list(&path);
                return self.answer_list(&path, listed);
            }
            // A partner tries again after a stale error, so a mount that is away for a moment does not end its work.
            Request::ListHeld { path } => {
                let listed = self.list_held(&path);
                let listed = listed.map_err(|error| self.mark_stale_if_unmounted(error));
                return self.answer_list(&path, listed);
            }
            // Requests of hosts that are partners of each other.
            Request::Adopt { host } => self.start_following(&host),
            Request::Follow { host } => {
                let followed = self.follow(host);
                followed.map_err(|error| self.mark_stale_if_unmounted(error))
            }
            Request::Mark { path, changes } => self.mark_copied(&path, changes),
            Request::Note { text } => self.set_partner_note(&text),
            // A heartbeat: the request itself shows that the partner is alive.
            Request::Beat => Ok(Reply::Done),
            // Requests of a puller about the bytes of open files.
            Request::Read {
                file,
                offset,
                bytes,
            } => {
                let range = FileRange::new(file, offset, bytes);
                return self.answer_read(range, deadline);
            }
            Request::Place {
                file,
                offset,
                bytes,
                buffer,
            } => {
                let range = FileRange::new(file, offset, bytes);
                return self.answer_addresses(range, buffer, deadline);
            }
            Request::Expose { providers, sums } => self.expose(&providers, sums),
            Request::Open { file, path } => self.open(file, &path),
            Request::Sum {
                file,
                offset,
                bytes,
            } => self.compute_checksum(FileRange::new(file, offset, bytes)),
            Request::Check { file } => self.check(file),
            Request::Release { file } => Ok(self.release(file)),
            Request::Hello(_) | Request::Ready => {
                return Err(WireError::OutOfTurn("the handshake is over".into()));
            }
        };
        let reply = result.unwrap_or_else(SourceError::into_reply);
        self.link.send(&reply, deadline)
    }

    // ---- lists ---------------------------------------------------------------------------------

    /// Sends a list of files in as many frames (messages) as it needs, or the error because of which there is none.
    /// `path` is the requested path. The last frame has the listed path, relative to the mount.
    fn answer_list(
        &mut self,
        path: &BytePath,
        listed: Result<EntryList, SourceError>,
    ) -> Result<(), WireError> {
        // The deadline is set after the list was made, because listing a large tree may take longer than the timeout.
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let EntryList { top, entries } = match listed {
            Ok(list) => list,
            Err(error) => return self.link.send(&error.into_reply(), deadline),
        };
        self.log_step(|| format!("(4) listed {} entries of {path}", entries.len()));
        for batch in batches(&entries) {
            let entries = batch.to_vec();
            self.link.send(&Reply::Entries { entries }, deadline)?;
        }
        self.link.send(&Reply::Listed { path: top }, deadline)
    }

    /// Lists a path of the mount, or partner copies if the path is relative.
    fn list(&mut self, path: &BytePath) -> Result<EntryList, SourceError> {
        let is_partner_copy = !path.is_empty() && !path.as_path().is_absolute();
        if is_partner_copy {
            return self.list_copies(path);
        }
        let listed = self.list_mounted(path);
        listed.map_err(|error| self.mark_stale_if_unmounted(error))
    }

    /// Makes an error stale if the mount of this agent is gone. The mount of a killed firnd may soon return, so the
    /// puller should try again.
    fn mark_stale_if_unmounted(&self, error: SourceError) -> SourceError {
        match self.context.mount_point {
            Some(mount_point) if firn_client::find(mount_point).is_err() => SourceError {
                kind: ErrorKind::Stale,
                ..error
            },
            _ => error,
        }
    }

    /// Lists partner copies. `path` is `HOST/path`: the name of the host that held the files, and a path on that host.
    fn list_copies(&mut self, path: &BytePath) -> Result<EntryList, SourceError> {
        let copies = match self.context.service {
            Some(service) => Arc::clone(&service.copies),
            None => Arc::new(self.find_copies()?),
        };
        let entries = copies.list(path)?;
        self.forget_list();
        self.origin = Some(Origin::Copies(copies));
        Ok(EntryList {
            top: path.clone(),
            entries,
        })
    }

    /// Returns the partner copies beside the arena of the only mount of this user.
    fn find_copies(&self) -> Result<CopyStore, SourceError> {
        let mount_point = self.resolve(&BytePath::default())?;
        let arena_path = OpenMount::open(&mount_point)?.region().path.clone();
        // Nothing is copied to this store, so it needs no space.
        let bytes_max = 0;
        Ok(CopyStore::new(
            CopyStore::path_beside_arena(arena_path.as_path()),
            bytes_max,
        ))
    }

    /// Lists held files. For a partner, only the files that the partner must copy are listed as closed.
    fn list_held(&mut self, path: &BytePath) -> Result<EntryList, SourceError> {
        let entries = match &mut self.following {
            Some(following) => following.list_and_dismiss(path)?,
            None => {
                let source = self.open_source(&self.resolve(&BytePath::default())?)?;
                let entries = source.list_held(path)?;
                self.set_source(source);
                entries
            }
        };
        Ok(EntryList {
            top: path.clone(),
            entries,
        })
    }

    fn list_mounted(&mut self, path: &BytePath) -> Result<EntryList, SourceError> {
        let host_path = self.resolve(path)?;
        let source = self.open_source(&host_path)?;
        let top = source.relative(&host_path)?;
        let entries = source.list(&top)?;
        self.set_source(source);
        Ok(EntryList { top, entries })
    }

    /// Makes a mount the origin of the files of this connection. firnd counts the connection as a puller from now on.
    fn set_source(&mut self, source: Source) {
        source.report_sent(0, 0);
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
        let path_on_mount = self.context.mount_point.unwrap_or(path);
        let source = Source::open(path_on_mount, self.context.hold_budget)?;
        self.log_step(|| "(2) mapped the data region".into());
        Ok(source)
    }

    /// Returns the path on this host that corresponds to a path in a request. An empty path means the mount that this
    /// agent serves. An agent that ssh has started serves the only mount of this user then.
    ///
    /// Fails if the path is relative, or if there is not exactly one such mount.
    fn resolve(&self, path: &BytePath) -> Result<PathBuf, SourceError> {
        if path.as_path().is_absolute() {
            return Ok(path.clone().into());
        }
        if !path.is_empty() {
            return Err(refused(format!("{path} is not an absolute path")));
        }
        if let Some(mount_point) = self.context.mount_point {
            return Ok(mount_point.to_owned());
        }
        match firn_client::mounts()?.as_slice() {
            [mount] => Ok(mount.mount_point.clone()),
            mounts => Err(refused(format!(
                "there are {} mounts of this user: name a path on one of them",
                mounts.len()
            ))),
        }
    }

    // ---- files ---------------------------------------------------------------------------------

    /// Holds a file under a number. The reply is `Full` in three cases: this connection holds the maximum number of
    /// files, the number is in use, or the agent holds the maximum number of bytes.
    fn open(&mut self, file_number: u32, path: &BytePath) -> Result<Reply, SourceError> {
        if self.files.len() >= FILES_MAX || self.files.contains_key(&file_number) {
            return Ok(Reply::Full);
        }
        let Some(file) = self.origin()?.open(path)? else {
            return Ok(Reply::Full);
        };
        let bytes = file.bytes();
        let changes = file.changes();
        self.log_step(|| format!("(5) holds {path}, {bytes} bytes"));
        self.files.insert(file_number, file);
        Ok(Reply::Opened { bytes, changes })
    }

    /// Answers `Read`: sends a range of a held file over the connection. A file is held from `Open` to `Release`: its
    /// bytes in memory do not change. If the file is not held, the answer is that error.
    fn answer_read(&mut self, range: FileRange, deadline: Instant) -> Result<(), WireError> {
        let Self {
            link,
            origin,
            files,
            ..
        } = self;
        let HeldRange { origin, file } = match HeldRange::find(origin, files, range) {
            Ok(held_range) => held_range,
            Err(error) => return link.send(&error.into_reply(), deadline),
        };
        let sent_bytes = range.bytes_within(file.bytes());
        let mut answer = StreamAnswer::begin(link.block_hasher(), deadline);
        origin
            .send(file, range.offset, range.bytes, link, &mut answer)
            .map_err(SendError::into_wire_error)?;
        self.count_sent(sent_bytes);
        Ok(())
    }

    /// Answers `Place`: sends the addresses at which the puller, the host that copies files, can read a range of a held
    /// file by libfabric (RDMA). A file is held from `Open` to `Release`: its bytes in memory do not change.
    ///
    /// Bytes that are not in memory are copied to the staging buffer that the puller has chosen. If the file is not
    /// held, or the puller has no such buffer, the answer is that error.
    fn answer_addresses(
        &mut self,
        range: FileRange,
        buffer_index: u32,
        deadline: Instant,
    ) -> Result<(), WireError> {
        let Self {
            link,
            origin,
            files,
            exposure,
            ..
        } = self;
        let HeldRange { origin, file } = match HeldRange::find(origin, files, range) {
            Ok(held_range) => held_range,
            Err(error) => return link.send(&error.into_reply(), deadline),
        };
        let hasher = link.block_hasher();
        let begun_answer = match exposure {
            Some(exposure) => exposure.begin_answer(buffer_index, hasher, deadline),
            None => None,
        };
        let Some(mut answer) = begun_answer else {
            return link.send(&buffer_not_exposed(buffer_index).into_reply(), deadline);
        };
        let sent_bytes = range.bytes_within(file.bytes());
        origin
            .send(file, range.offset, range.bytes, link, &mut answer)
            .map_err(SendError::into_wire_error)?;
        self.log_step(|| {
            format!(
                "(5) sent the addresses of {sent_bytes} bytes of file {} from {} on",
                range.file_number, range.offset
            )
        });
        self.count_sent(sent_bytes);
        Ok(())
    }

    /// Counts sent bytes, and reports them to firnd from time to time.
    fn count_sent(&mut self, bytes: u64) {
        self.sent.bytes += bytes;
        if self.sent.bytes - self.reported.bytes >= REPORT_BYTES {
            self.report_sent();
        }
    }

    /// Answers `Expose`: registers the memory of the mount with libfabric (RDMA), so that the puller, the host that
    /// copies files, can read it. Memory that was exposed before is not readable any more.
    ///
    /// Refused on an encrypted connection, because libfabric does not encrypt, and for files that are not of the mount.
    fn expose(&mut self, providers: &[String], wants_macs: bool) -> Result<Reply, SourceError> {
        // The earlier exposure ends first, even if the new one is refused.
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
        let (exposure, exposed) =
            Exposure::open(&self.fabric_offer, source.mount(), providers, wants_macs)?;
        self.log_step(|| format!("(2) {exposure}"));
        self.exposure = Some(exposure);
        Ok(Reply::Exposed(exposed))
    }

    /// Answers `Sum` with the checksum of a range of a held file. A range beyond the end of the file is clamped to it.
    fn compute_checksum(&mut self, range: FileRange) -> Result<Reply, SourceError> {
        check_range(range.bytes)?;
        let Self { origin, files, .. } = self;
        let (Some(origin), Some(file)) = (origin, files.get_mut(&range.file_number)) else {
            return Err(file_not_held(range.file_number));
        };
        let checksum = origin.checksum(file, range.offset, range.bytes)?;
        Ok(Reply::Sum {
            bytes: checksum.bytes,
            xxh3: format!("{:032x}", checksum.xxh3),
        })
    }

    /// Answers `Check`, which follows the last read of a held file: whether the file was changed since it was opened,
    /// and whether the reads nevertheless form a consistent snapshot.
    fn check(&mut self, file_number: u32) -> Result<Reply, SourceError> {
        let Some(file) = self.files.get(&file_number) else {
            return Err(file_not_held(file_number));
        };
        // By libfabric the puller reads without a request, so the log shows here that it has finished.
        if self.exposure.is_some() {
            self.log_step(|| format!("(6) file {file_number} was read"));
        }
        let FileCheck {
            has_changed,
            is_snapshot,
        } = self.origin()?.check(file)?;
        self.log_step(|| {
            format!("(7) checked file {file_number}: changed {has_changed}, snapshot {is_snapshot}")
        });
        Ok(Reply::Checked {
            changed: has_changed,
            snapshot: is_snapshot,
        })
    }

    /// Releases a file. Releasing a file that is not held has no effect.
    fn release(&mut self, file_number: u32) -> Reply {
        if self.files.remove(&file_number).is_some() {
            self.sent.files += 1;
            self.report_sent();
        }
        self.log_step(|| format!("(9) released file {file_number}"));
        Reply::Done
    }

    /// Reports to firnd what was sent since the last report.
    fn report_sent(&mut self) {
        if let Some(Origin::Mount(source)) = &self.origin {
            source.report_sent(
                self.sent.files - self.reported.files,
                self.sent.bytes - self.reported.bytes,
            );
            self.reported = self.sent;
        }
    }

    // ---- partners ------------------------------------------------------------------------------

    /// Answers `Adopt`: begins to keep copies of the files of `host`, which has chosen this host as its partner.
    fn start_following(&self, host: &str) -> Result<Reply, SourceError> {
        self.service()?.start_following(host).map_err(refused)?;
        Ok(Reply::Done)
    }

    /// Answers `Follow`: registers this connection as that of the host `host`, the current or a former partner. The
    /// partner keeps copies of this host's files. An earlier connection of the same host is replaced.
    ///
    /// Returns two identities, by which the partner detects a restart: that of firnd, the process that serves the
    /// mount, and that of its arena, the memory of the mount.
    fn follow(&mut self, host: String) -> Result<Reply, SourceError> {
        let RegisteredFollower {
            registration,
            default_note,
        } = self.service()?.register_follower(&host)?;
        let source = self.open_source(&self.resolve(&BytePath::default())?)?;
        // Only the current partner has a note. firnd shows it in its status, and is not notified of former partners.
        if let Some(note) = &default_note {
            source.announce_partner(&host, note)?;
        }
        let FirndIdentity { incarnation, arena } = source.identity()?;
        self.following = Some(Following {
            registration,
            source,
            host,
            default_note,
            marked_changes: BTreeMap::new(),
        });
        Ok(Reply::Following { incarnation, arena })
    }

    /// Records that the follower has a copy of a file. Only marks of the current partner are passed to firnd.
    fn mark_copied(&mut self, path: &BytePath, changes: u64) -> Result<Reply, SourceError> {
        let following = self.following.as_mut().ok_or_else(not_following)?;
        if following.is_partner() {
            following.source.mark_partnered(path, changes)?;
        }
        // Marks are kept only for held files of the last list.
        if let Some(marked_changes) = following.marked_changes.get_mut(path) {
            *marked_changes = Some(changes);
        }
        Ok(Reply::Done)
    }

    /// Sets the note about the partner in the status. An empty text restores this host's own note.
    fn set_partner_note(&self, text: &str) -> Result<Reply, SourceError> {
        let following = self.following.as_ref().ok_or_else(not_following)?;
        let Some(default_note) = &following.default_note else {
            // The status shows no note about a former partner.
            return Ok(Reply::Done);
        };
        let note = if text.is_empty() { default_note } else { text };
        following.source.announce_partner(&following.host, note)?;
        Ok(Reply::Done)
    }

    fn service(&self) -> Result<&'a Arc<PartnerService>, SourceError> {
        self.context
            .service
            .ok_or_else(|| refused("an agent that was started over ssh has no partners".into()))
    }

    fn origin(&self) -> Result<&Origin, SourceError> {
        self.origin
            .as_ref()
            .ok_or_else(|| refused("the request is not allowed before a list".into()))
    }
}

/// The held file of a range, and the origin from which the file was opened.
struct HeldRange<'a> {
    origin: &'a Origin,
    file: &'a mut OriginFile,
}

impl<'a> HeldRange<'a> {
    /// Finds the file of a range. Fails if the file is not held, or if the range has an invalid length.
    fn find(
        origin: &'a Option<Origin>,
        files: &'a mut BTreeMap<u32, OriginFile>,
        range: FileRange,
    ) -> Result<Self, SourceError> {
        let (Some(origin), Some(file)) = (origin, files.get_mut(&range.file_number)) else {
            return Err(file_not_held(range.file_number));
        };
        check_range(range.bytes)?;
        Ok(Self { origin, file })
    }
}

impl Following {
    /// Whether the host was the current partner, and not a former one, when it began to follow.
    fn is_partner(&self) -> bool {
        self.default_note.is_some()
    }

    /// Lists the files that this host has in memory only, for another host that keeps copies of them. That host *marks*
    /// a file once its copy is complete.
    ///
    /// The list depends on the role of the host:
    /// * The partner gets all files. Once it has marked all of them, the former partners are dismissed.
    /// * A former partner gets unmarked files as open, so that only the partner copies them.
    /// * A dismissed partner gets an empty mount, and therefore drops its copies. Its next list is refused.
    fn list_and_dismiss(&mut self, path: &BytePath) -> Result<Vec<Entry>, SourceError> {
        let role = self.registration.role();
        let mut entries = match role {
            Role::Partner | Role::Former => self.source.list_held(path)?,
            Role::Dismissed => return Ok(vec![Entry::directory()]),
            Role::Removed => {
                let host = &self.host;
                return Err(refused(format!("{host} is not the partner any more")));
            }
        };
        // A former partner that has become the partner must follow again. Only then does firnd know of it and accept
        // its marks.
        if role == Role::Partner && !self.is_partner() {
            return Err(SourceError {
                kind: ErrorKind::Stale,
                message: format!("{} has become the partner", self.host),
            });
        }
        self.apply_marks(path, &mut entries, role);
        let are_all_marked = self.marked_changes.values().all(Option::is_some);
        if role == Role::Partner && are_all_marked {
            // From now on former partners are dismissed.
            self.registration.record_all_marked();
        }
        Ok(entries)
    }

    /// Sets in each listed file whether the other host has a current copy. That host has sent a *mark* for each
    /// complete copy, with the file's number of changes at that time. A mark is current if the file still has that
    /// number.
    ///
    /// For a former partner, also changes files without a current mark to open ones. Forgets marks that are not
    /// current.
    fn apply_marks(&mut self, top: &BytePath, entries: &mut [Entry], role: Role) {
        let mut current_marks = BTreeMap::new();
        for entry in entries {
            let Some(held) = &mut entry.held else {
                continue;
            };
            let full_path = join(top, entry.path.as_path());
            // The map lacks a file that the last list did not have; it has `None` for an unmarked file.
            let last_mark = self.marked_changes.get(&full_path).copied().flatten();
            let has_current_mark = last_mark == Some(held.changes);
            // firnd also counts marks of another host. Here only those of this follower count.
            held.partnered = held.partnered && has_current_mark;
            let current_mark = last_mark.filter(|_| has_current_mark);
            current_marks.insert(full_path, current_mark);
            if role == Role::Former && !has_current_mark {
                // Followers copy only closed files. This file must be copied by the current partner.
                entry.mark_open();
            }
        }
        self.marked_changes = current_marks;
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

fn file_not_held(file_number: u32) -> SourceError {
    refused(format!("this connection holds no file {file_number}"))
}

fn buffer_not_exposed(buffer_index: u32) -> SourceError {
    refused(format!(
        "this connection exposes no staging buffer {buffer_index}"
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
fn batches(entries: &[Entry]) -> Vec<&[Entry]> {
    let mut batches = Vec::new();
    let mut unsent = entries;
    while !unsent.is_empty() {
        let (batch, later) = unsent.split_at(batch_len(unsent));
        batches.push(batch);
        unsent = later;
    }
    batches
}

/// Returns how many of the first entries fit into a frame. One entry always fits.
fn batch_len(entries: &[Entry]) -> usize {
    let mut json_bytes = 0;
    for (index, entry) in entries.iter().enumerate() {
        json_bytes += json_bytes_max(entry);
        if json_bytes > ENTRIES_BYTES {
            return index.max(1);
        }
    }
    entries.len()
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
