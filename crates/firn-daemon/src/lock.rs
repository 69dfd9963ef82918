//! One firnd a backing on this host.
//!
//! Promise: while [`Locks`] live, no other firnd or `firn recover` of this host works on the same
//! backing or the same arena. The locks end with the process, however it ends.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path};
use std::time::{Duration, Instant};

use firn_client::paths::RuntimeFiles;
use firn_protocol::{Reply, Request};
use firn_transact::Group;
use firn_trust::{TrustError, create_private_dir, open_private_dir, open_private_file};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;

use crate::error::DaemonError;
use crate::mountinfo;

/// A killed firnd keeps its locks while the kernel takes down its memory; longer than this it does
/// not take even for large arenas.
pub(crate) const DYING: Duration = Duration::from_secs(5);
const ASK: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// Whether others may have the same lock.
#[derive(Clone, Copy)]
enum How {
    Alone,
    Shared,
}

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct Locks {
    _backing: OwnedFd,
    /// Of one of several hosts: the directory of its transactions.
    _host: Option<OwnedFd>,
    arena: Option<OwnedFd>,
}

impl Locks {
    /// Locks the backing directory, or says who holds it. Hosts of a group share it, each under its own name.
    pub(crate) fn take(
        backing: &Path,
        files: &RuntimeFiles,
        group: Option<&Group>,
    ) -> Result<Self, DaemonError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            open(backing, flags, Mode::empty()).map_err(|e| DaemonError::BackingUnusable {
                path: backing.into(),
                source: e.into(),
            })?;
        let how = if group.is_some() {
            How::Shared
        } else {
            How::Alone
        };
        if !try_lock(&directory, how) {
            wait_for_the_dying(&directory, how, backing, files)?;
        }
        let host = group
            .map(|group| Self::of_host(backing, group, DYING))
            .transpose()?;
        Ok(Self {
            _backing: directory,
            _host: host,
            arena: None,
        })
    }

    /// Locks what a host of a group has in the backing; waits so long for one that ends.
    pub(crate) fn of_host(
        backing: &Path,
        group: &Group,
        patience: Duration,
    ) -> Result<OwnedFd, DaemonError> {
        let dir = host_dir(backing, group, |parent, name| {
            create_private_dir(parent, name)
        })?;
        let deadline = Instant::now() + patience;
        while !try_lock(&dir, How::Alone) {
            if Instant::now() >= deadline {
                return Err(DaemonError::HostHeld {
                    host: group.host.clone(),
                    backing: backing.into(),
                });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(dir)
    }

    /// Locks the arena's file as well: a backing on NFS may not know flock(2), tmpfs does.
    pub(crate) fn add_arena(
        &mut self,
        arena: &Path,
        backing: &Path,
        files: &RuntimeFiles,
    ) -> Result<(), DaemonError> {
        let file = open_private_file(CWD, arena, OFlags::RDWR)?;
        if !try_lock(&file, How::Alone) {
            wait_for_the_dying(&file, How::Alone, backing, files)?;
        }
        self.arena = Some(file);
        Ok(())
    }
}

/// Opens the directory of a host's transactions, and each one above it up to the backing, with `open`.
pub(crate) fn host_dir(
    backing: &Path,
    group: &Group,
    open_one: impl Fn(&OwnedFd, &Path) -> Result<OwnedFd, TrustError>,
) -> Result<OwnedFd, TrustError> {
    let mut path = backing.to_owned();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut dir = open(backing, flags, Mode::empty()).map_err(|errno| TrustError::Io {
        path: path.clone(),
        error: errno.into(),
    })?;
    for name in Path::new(&group.home())
        .components()
        .filter(|part| matches!(part, Component::Normal(_)))
    {
        path.push(name);
        dir = open_one(&dir, Path::new(name.as_os_str())).map_err(|error| error.at(&path))?;
    }
    Ok(dir)
}

/// False: somebody has it. File systems without flock count as locked: the arena's lock is left.
fn try_lock(fd: &impl std::os::fd::AsFd, how: How) -> bool {
    let operation = match how {
        How::Alone => FlockOperation::NonBlockingLockExclusive,
        How::Shared => FlockOperation::NonBlockingLockShared,
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
    how: How,
    backing: &Path,
    files: &RuntimeFiles,
) -> Result<(), DaemonError> {
    let deadline = Instant::now() + DYING;
    loop {
        let living = ask(&files.socket);
        if living.is_some() || Instant::now() >= deadline {
            let by = living.unwrap_or_else(|| seen(backing));
            return Err(DaemonError::Held {
                backing: backing.into(),
                by,
            });
        }
        std::thread::sleep(PAUSE);
        if try_lock(fd, how) {
            return Ok(());
        }
    }
}

/// Asks a firnd of this user who it is.
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

/// What the mount table tells of the firnd of another user, or of one that does not answer.
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

/// Whether a firnd serves this host of a group. Where the backing has no flock(2) none seems to.
pub(crate) fn is_living(backing: &Path, group: &Group) -> bool {
    let dir = host_dir(backing, group, |parent, name| {
        open_private_dir(parent, name)
    });
    dir.is_ok_and(|dir| !try_lock(&dir, How::Shared))
}

/// Whether a living firnd has `arena` open. Takes no lock that outlives the call.
pub(crate) fn is_held(arena: &Path) -> bool {
    open_private_file(CWD, arena, OFlags::RDONLY).is_ok_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    })
}
