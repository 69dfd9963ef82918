//! One firnd a backing on this host.
//!
//! Promise: while [`Locks`] live, no other firnd or `firn recover` of this host works on the same
//! backing or the same arena. The locks end with the process, however it ends.
//!
//! These two locks are about processes of this host only. So they may be of files whose locks only this host's kernel
//! keeps: flock(2) of the backing's directory, which NFS and FUSE file systems keep on the host, and of the arena,
//! which is in this host's memory. The lease of [`crate::host_lease`] keeps other hosts away.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
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
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;

use crate::error::AttachError;
use crate::host_lease::{HostLease, LeaseState};
use crate::mountinfo;

/// A killed firnd keeps its locks while the kernel takes down its memory; longer than this it does
/// not take even for large arenas.
pub(crate) const DYING: Duration = Duration::from_secs(5);
const ASK: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// Whether firnd of other hosts may have the same lock, where the file system keeps it for all of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    Alone,
    Shared,
}

impl Sharing {
    /// With the other hosts that the options speak of.
    pub(crate) fn of(options: &Options) -> Self {
        let is_alone = options.participants == Participants::Off
            && options.tokens == TokenService::None
            && options.partner == Partner::None
            && options.layout == Layout::Plain;
        if is_alone { Self::Alone } else { Self::Shared }
    }
}

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct Locks {
    _backing: OwnedFd,
    /// Keeps this host's name for this process, where it shares something with others.
    host: HostLease,
    arena: Option<OwnedFd>,
}

impl Locks {
    /// Locks the backing directory, or returns its holder. Hosts that know of each other share it, each under its own
    /// name.
    pub(crate) fn take(
        backing: &Path,
        files: &RuntimeFiles,
        members: Option<(&Members, &Terms)>,
        sharing: Sharing,
    ) -> Result<Self, AttachError> {
        let directory = lock_backing_dir(backing, files, sharing)?;
        let mut host = HostLease::on(backing);
        if let Some((members, terms)) = members {
            host.use_for(LeaseUse::Transactions, &members.host, terms)?;
        }
        Ok(Self {
            _backing: directory,
            host,
            arena: None,
        })
    }

    /// The lease of this host on the backing.
    pub(crate) fn host_lease(&mut self) -> &mut HostLease {
        &mut self.host
    }

    /// What becomes of this host's lease, where several hosts commit together.
    pub(crate) fn host_lease_state(&self) -> Option<Arc<LeaseState>> {
        self.host.state_of_transactions()
    }

    /// Locks the arena's file as well: a backing on NFS may not know flock(2), tmpfs does.
    pub(crate) fn add_arena(
        &mut self,
        arena: &Path,
        backing: &Path,
        files: &RuntimeFiles,
    ) -> Result<(), AttachError> {
        self.arena = Some(lock_arena(arena, backing, files)?);
        Ok(())
    }
}

/// Locks an arena, or returns its holder. The backing is only named, never looked at.
pub(crate) fn lock_arena(
    arena: &Path,
    backing: &Path,
    files: &RuntimeFiles,
) -> Result<OwnedFd, AttachError> {
    let file = open_private_file(CWD, arena, OFlags::RDWR)?;
    if !try_lock(&file, Sharing::Alone) {
        wait_for_the_dying(&file, Sharing::Alone, backing, files)?;
    }
    Ok(file)
}

/// Keeps other mounts and recoveries of the same backing on this host away. Only this host is meant, so a lock of a
/// directory will do. Where the file system refuses even that, the lock of the arena is left, which is one for each
/// user and backing.
fn lock_backing_dir(
    backing: &Path,
    files: &RuntimeFiles,
    sharing: Sharing,
) -> Result<OwnedFd, AttachError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        open(backing, flags, Mode::empty()).map_err(|e| AttachError::BackingUnusable {
            path: backing.into(),
            source: e.into(),
        })?;
    if !try_lock(&directory, sharing) {
        wait_for_the_dying(&directory, sharing, backing, files)?;
    }
    Ok(directory)
}

/// False: another process has it. File systems without flock count as locked: the arena's lock is left.
fn try_lock(fd: &impl std::os::fd::AsFd, sharing: Sharing) -> bool {
    let operation = match sharing {
        Sharing::Alone => FlockOperation::NonBlockingLockExclusive,
        Sharing::Shared => FlockOperation::NonBlockingLockShared,
    };
    match flock(fd, operation) {
        Err(Errno::WOULDBLOCK) => false,
        Err(error) => {
            tracing::warn!(%error, "the backing's file system has no flock(2); only the arena is locked");
            true
        }
        Ok(()) => true,
    }
}

fn wait_for_the_dying(
    fd: &impl std::os::fd::AsFd,
    sharing: Sharing,
    backing: &Path,
    files: &RuntimeFiles,
) -> Result<(), AttachError> {
    let deadline = Instant::now() + DYING;
    loop {
        let living = ask(&files.socket);
        if living.is_some() || Instant::now() >= deadline {
            let by = living.unwrap_or_else(|| seen(backing));
            return Err(AttachError::Held {
                backing: backing.into(),
                by,
            });
        }
        std::thread::sleep(PAUSE);
        if try_lock(fd, sharing) {
            return Ok(());
        }
    }
}

/// Asks a firnd of this user for its name.
fn ask(socket: &Path) -> Option<String> {
    let mut stream = UnixStream::connect(socket).ok()?;
    firn_trust::check_peer(&stream, rustix::process::geteuid().as_raw()).ok()?;
    stream.set_read_timeout(Some(ASK)).ok()?;
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

/// What the mount table tells of another user's firnd, or of one that does not answer.
fn seen(backing: &Path) -> String {
    match mountinfo::firn_mounts()
        .into_iter()
        .find(|mount| mount.backing == backing)
    {
        Some(mount) => format!(
            " at {}",
            firn_format::quote::quoted_path(&mount.mount_point)
        ),
        None => " (by a firnd or firn recover that does not answer)".into(),
    }
}

/// Whether a living firnd has `arena` open. Takes no lock that outlives the call.
pub(crate) fn is_held(arena: &Path) -> bool {
    open_private_file(CWD, arena, OFlags::RDONLY).is_ok_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    })
}
