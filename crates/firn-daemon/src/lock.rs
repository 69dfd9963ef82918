//! The locks that give a backing and an arena one firnd (the process that serves a mount) on this host. The backing is
//! the directory that is served; the arena is shared memory with the bytes that are not there yet. Locks of programs on
//! files are in [`crate::file_locks`].
//!
//! Promise: while [`Locks`] exist, no other firnd or `firn recover` of this host works on the same backing or arena.
//! The kernel releases the locks when the process ends, in whatever way. The locks of a mount with a keeper, which
//! starts the next firnd, outlive a firnd that dies: the keeper has copies of the locked descriptors. So no other
//! process gets in before the next firnd continues.
//!
//! Both locks concern processes of this host only, so a lock in this host's kernel is sufficient. NFS and
//! FUSE file systems may keep flock(2) of the backing directory on the host, and the arena is in the host's memory. The
//! lease of [`crate::host_lease`] excludes other hosts.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_client::paths::RuntimeFiles;
use firn_config::{Layout, Options, Participants, Partner, TokenService};
use firn_hosts::{LeaseUse, Terms};
use firn_protocol::{Reply, Request};
use firn_transact::Members;
use firn_trust::open_private_file;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;

use crate::error::AttachError;
use crate::host_lease::{HostLease, LeaseState};
use crate::keeper::{KeeperLink, Tag};
use crate::mountinfo;

/// How long a mount waits for a lock that a killed firnd may hold. The kernel releases the locks of a killed
/// process after it has freed the process's memory, which takes less time than this even for a large arena.
pub(crate) const ENDING_PROCESS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the answer of a firnd to the question where its mount is.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to take a lock.
const LOCK_RETRY_EVERY: Duration = Duration::from_millis(50);

/// Whether a firnd on another host may use the same backing at the same time. It matters where the file system shares
/// flock(2) among hosts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockSharing {
    /// The lock of the backing directory is exclusive.
    Exclusive,
    /// The lock of the backing directory is shared. Leases exclude a second firnd with the same host name.
    Shared,
}

impl LockSharing {
    /// Returns `Shared` if the options name other hosts, or imply them.
    pub(crate) fn from_options(options: &Options) -> Self {
        let is_alone = options.participants == Participants::Off
            && options.tokens == TokenService::None
            && options.partner == Partner::None
            && options.layout == Layout::Plain;
        if is_alone {
            Self::Exclusive
        } else {
            Self::Shared
        }
    }
}

/// The locks, and the lease of this host. The drop releases them.
#[derive(Debug)]
pub(crate) struct Locks {
    /// The locked backing directory.
    _backing: LockedFile,
    /// Reserves this host's name for this process, if the host shares something with others.
    host_lease: HostLease,
    /// The locked arena; `None` before [`Locks::lock_arena_file`].
    arena: Option<LockedFile>,
    /// The keeper of the mount, if there is one.
    link: Option<Arc<KeeperLink>>,
}

/// A locked file. The drop releases the lock.
#[derive(Debug)]
pub(crate) struct LockedFile {
    descriptor: OwnedFd,
    /// Where the keeper has a copy of the descriptor; `None` without a keeper.
    keeper_slot: Option<KeeperSlot>,
}

/// The place of a descriptor in the keeper, the process that starts the next firnd.
#[derive(Debug)]
struct KeeperSlot {
    link: Arc<KeeperLink>,
    /// The label of the descriptor.
    tag: Tag,
}

impl KeeperSlot {
    /// Returns the place with the label `tag`; `None` without a keeper.
    fn new(link: Option<&Arc<KeeperLink>>, tag: Tag) -> Option<Self> {
        let link = Arc::clone(link?);
        Some(Self { link, tag })
    }
}

impl LockedFile {
    /// Locks the file `opened`, or resumes the lock that an earlier serving process had when it died. The keeper, the
    /// process that starts the next one, has then kept the locked descriptor open.
    ///
    /// `keeper_slot` is the place where the keeper has or gets a copy of the descriptor. If another process has the
    /// lock, `wait_and_lock` is called; it returns once the file is locked, or fails.
    fn lock(
        opened: OwnedFd,
        sharing: LockSharing,
        keeper_slot: Option<KeeperSlot>,
        wait_and_lock: impl FnOnce(&OwnedFd) -> Result<(), AttachError>,
    ) -> Result<Self, AttachError> {
        // The earlier firnd's descriptor still has the lock, and a new one would wait for it.
        let earlier = match &keeper_slot {
            Some(slot) => find_kept_descriptor_of(&opened, &slot.link, slot.tag)?,
            None => None,
        };
        let descriptor = earlier.unwrap_or(opened);
        if !try_lock(&descriptor, sharing) {
            wait_and_lock(&descriptor)?;
        }
        if let Some(slot) = &keeper_slot
            && let Err(error) = slot.link.keep_descriptor(slot.tag, descriptor.as_fd())
        {
            tracing::warn!(%error, "the keeper, which restarts firnd, does not hold a lock of this mount: if firnd \
                dies, another process may take it first");
        }
        Ok(Self {
            descriptor,
            keeper_slot,
        })
    }
}

impl AsFd for LockedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        if let Some(KeeperSlot { link, tag }) = &self.keeper_slot {
            // The close alone would not release a lock of which the keeper has a copy.
            if let Err(error) = flock(&self.descriptor, FlockOperation::Unlock) {
                tracing::warn!(%error, "cannot release a lock of the mount before its keeper, which restarts firnd, \
                    ends");
            }
            link.drop_descriptor((*tag).into());
        }
    }
}

/// Returns the locked descriptor of an earlier serving process that died, if it is of the same file as `opened`. The
/// keeper, the process at the other end of `link`, has kept it open under the tag `tag`.
///
/// Returns `None` if there is none. One of another file is dropped by the keeper.
fn find_kept_descriptor_of(
    opened: &OwnedFd,
    link: &KeeperLink,
    tag: Tag,
) -> Result<Option<OwnedFd>, AttachError> {
    let to_error = AttachError::io("look at a lock of the earlier firnd");
    let Some(kept) = link.copy_kept_descriptor(tag).map_err(to_error)? else {
        return Ok(None);
    };
    let device_and_inode = |file: &OwnedFd| fstat(file).map(|stat| (stat.st_dev, stat.st_ino));
    let kept_identity = device_and_inode(&kept);
    if kept_identity.is_ok() && kept_identity == device_and_inode(opened) {
        return Ok(Some(kept));
    }
    link.drop_descriptor(tag.into());
    Ok(None)
}

impl Locks {
    /// Locks the backing directory for a verb without a mount. The error names the process that has the lock.
    pub(crate) fn acquire_unmounted(
        backing: &Path,
        files: &RuntimeFiles,
        sharing: LockSharing,
    ) -> Result<Self, AttachError> {
        let members = None;
        let keeper_link = None;
        Self::acquire(backing, files, members, sharing, keeper_link)
    }

    /// Locks the backing directory against other processes of this host. The error names the process that has the lock.
    ///
    /// If this host commits transactions together with other hosts (`members`), it also takes this host's lease: a
    /// locked file in the backing, so that no process on any host acts in its name. `link` leads to the keeper, a
    /// process that holds the locks if this one dies. The arena (the mount's memory) is locked later.
    pub(crate) fn acquire(
        backing: &Path,
        files: &RuntimeFiles,
        members: Option<(&Members, &Terms)>,
        sharing: LockSharing,
        link: Option<&Arc<KeeperLink>>,
    ) -> Result<Self, AttachError> {
        let directory = lock_backing_dir(backing, files, sharing, link)?;
        let mut host_lease = HostLease::new(backing, link);
        if let Some((members, terms)) = members {
            host_lease.begin_use(LeaseUse::Transactions, &members.host, terms)?;
        }
        Ok(Self {
            _backing: directory,
            host_lease,
            arena: None,
            link: link.cloned(),
        })
    }

    /// Returns the lease of this host on the backing.
    pub(crate) fn host_lease(&mut self) -> &mut HostLease {
        &mut self.host_lease
    }

    /// Returns the state of the lease if several hosts commit together.
    pub(crate) fn transaction_lease_state(&self) -> Option<Arc<LeaseState>> {
        self.host_lease.transaction_lease_state()
    }

    /// Locks the arena's file too. A backing on NFS may not support flock(2), but tmpfs does.
    pub(crate) fn lock_arena_file(
        &mut self,
        arena: &Path,
        backing: &Path,
        files: &RuntimeFiles,
    ) -> Result<(), AttachError> {
        self.arena = Some(lock_arena(arena, backing, files, self.link.as_ref())?);
        Ok(())
    }
}

/// Locks an arena; the error names the holder. The backing is only named in that error, and not accessed.
pub(crate) fn lock_arena(
    arena: &Path,
    backing: &Path,
    files: &RuntimeFiles,
    link: Option<&Arc<KeeperLink>>,
) -> Result<LockedFile, AttachError> {
    let file = open_private_file(CWD, arena, OFlags::RDWR)?;
    let keeper_slot = KeeperSlot::new(link, Tag::ArenaLock);
    LockedFile::lock(file, LockSharing::Exclusive, keeper_slot, |file| {
        lock_when_holder_ends(file, LockSharing::Exclusive, backing, files)
    })
}

/// Locks the backing directory against other mounts and recoveries on this host. If the file system does not support
/// that, the lock of the arena (the mount's shared memory) remains, of which there is one for each user and backing.
fn lock_backing_dir(
    backing: &Path,
    files: &RuntimeFiles,
    sharing: LockSharing,
    link: Option<&Arc<KeeperLink>>,
) -> Result<LockedFile, AttachError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        open(backing, flags, Mode::empty()).map_err(|errno| AttachError::BackingUnusable {
            path: backing.into(),
            source: errno.into(),
        })?;
    let keeper_slot = KeeperSlot::new(link, Tag::BackingLock);
    LockedFile::lock(directory, sharing, keeper_slot, |directory| {
        lock_when_holder_ends(directory, sharing, backing, files)
    })
}

/// Takes a lock without waiting. Returns false if another process has the lock.
///
/// Returns true if the file system has no flock(2): the lock of the arena is sufficient then.
fn try_lock(fd: &impl AsFd, sharing: LockSharing) -> bool {
    let operation = match sharing {
        LockSharing::Exclusive => FlockOperation::NonBlockingLockExclusive,
        LockSharing::Shared => FlockOperation::NonBlockingLockShared,
    };
    match flock(fd, operation) {
        Err(Errno::WOULDBLOCK) => false,
        Err(error) => {
            tracing::warn!(%error, "cannot lock the backing, because its file system has no flock(2); only the arena \
                is locked");
            true
        }
        Ok(()) => true,
    }
}

/// Waits for the end of the process that has a lock, and then takes the lock. Fails with a description of that process
/// if it is a firnd that answers on its control socket, or if the lock is not free after [`ENDING_PROCESS_TIMEOUT`].
fn lock_when_holder_ends(
    fd: &impl AsFd,
    sharing: LockSharing,
    backing: &Path,
    files: &RuntimeFiles,
) -> Result<(), AttachError> {
    let deadline = Instant::now() + ENDING_PROCESS_TIMEOUT;
    loop {
        // The description follows the backing in the text of the error.
        let holder_description = match describe_answering_holder(&files.socket) {
            Some(description) => Some(description),
            None if Instant::now() >= deadline => Some(describe_mount_of(backing)),
            None => None,
        };
        if let Some(by) = holder_description {
            return Err(AttachError::Held {
                backing: backing.into(),
                by,
            });
        }
        std::thread::sleep(LOCK_RETRY_EVERY);
        if try_lock(fd, sharing) {
            return Ok(());
        }
    }
}

/// Describes the firnd behind a control socket for an error message, as ` at MOUNT_POINT by firnd with pid PID`. `None`
/// if no firnd of this user answers within a second, for any reason.
fn describe_answering_holder(socket: &Path) -> Option<String> {
    let mut stream = UnixStream::connect(socket).ok()?;
    firn_trust::check_peer(&stream, rustix::process::geteuid().as_raw()).ok()?;
    stream.set_read_timeout(Some(ASK_TIMEOUT)).ok()?;
    let mut line = serde_json::to_string(&Request::Status).ok()?;
    line.push('\n');
    stream.write_all(line.as_bytes()).ok()?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).ok()?;
    match serde_json::from_str(&answer).ok()? {
        Reply::Status(status) => Some(format!(
            " at {} by firnd with pid {}",
            status.mount_point, status.pid
        )),
        _ => None,
    }
}

/// Describes the mount of a backing by the mount table alone: for a firnd that does not answer, or belongs to another
/// user.
fn describe_mount_of(backing: &Path) -> String {
    let mount = mountinfo::firn_mounts()
        .into_iter()
        .find(|mount| mount.backing == backing);
    match mount {
        Some(mount) => format!(
            " at {}",
            firn_format::quote::quoted_path(&mount.mount_point)
        ),
        None => " (by a firnd or firn recover that does not answer)".into(),
    }
}

/// Returns whether a running firnd has `arena` open. The lock that this takes for the test is released at once.
pub(crate) fn is_arena_in_use(arena: &Path) -> bool {
    open_private_file(CWD, arena, OFlags::RDONLY).is_ok_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    })
}
