//! Checks which operations the file system of the backing (the directory that is to be mounted) supports: sync, rename,
//! locks, holes and others.
//!
//! Each check tries the operations on files in a probe directory of its own ([`ProbeDir`]).

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use firn_backing::Volume;
use firn_format::quantity;
use firn_hosts::check_two_files;
use rustix::fs::{
    FallocateFlags, OFlags, RenameFlags, SeekFrom as RustixSeekFrom, XattrFlags, fallocate,
    fsetxattr, fsync, renameat, renameat_with, seek,
};
use rustix::io::Errno;

use crate::doctor::backing::canonical_backing;
use crate::doctor::probe::{ProbeDir, file_name};
use crate::doctor::{CheckSubject, Finding};

/// Duration above which a sync noticeably delays each program that waits for it.
const SLOW_SYNC: Duration = Duration::from_secs(1);
/// Seconds by which two clocks may differ. A larger difference confuses make, rsync and readers of timestamps.
const CLOCK_DIFFERENCE_MAX_S: f64 = 2.0;
/// Upper bound of a file system's block size, in bytes.
const BLOCK_BYTES: u64 = 1 << 20;

/// Runs `try_operations` with a new probe directory in the backing, and returns its findings. The directory is removed
/// afterwards.
///
/// If `try_operations` or the creation of the directory fails, the error is the finding. A read-only mount has no
/// findings, because nothing may be created for it.
fn with_probe(
    subject: &CheckSubject<'_>,
    try_operations: impl FnOnce(&ProbeDir) -> io::Result<Vec<Finding>>,
) -> Vec<Finding> {
    if subject.options.read_only {
        return Vec::new();
    }
    let backing = match canonical_backing(subject) {
        Ok(backing) => backing,
        Err(text) => return vec![Finding::refused(text)],
    };
    ProbeDir::create(&backing)
        .and_then(|probe| try_operations(&probe))
        .unwrap_or_else(|error| {
            let advice = "check the logs of the kernel and of the file server";
            vec![Finding::wrong(error.to_string(), advice)]
        })
}

/// Reports whether space and names (inodes) are free in the backing. The space is compared with the arena, the memory
/// of the mount: what it holds must fit into the backing.
pub(crate) fn check_room(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let backing = match canonical_backing(subject) {
        Ok(backing) => backing,
        Err(text) => return vec![Finding::refused(text)],
    };
    let space = match rustix::fs::statvfs(&backing) {
        Ok(space) => space,
        Err(errno) => return vec![Finding::refused(format!("statfs(2): {errno}"))],
    };
    // A file system without limits reports 0 inodes and 0 blocks.
    let has_inode_limit = space.f_files > 0;
    let has_space_limit = space.f_blocks > 0;
    let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
    let arena_bytes = subject.options.arena_bytes;
    let free = quantity::bytes(free_bytes);
    let advice = "remove files, or name another backing; this check does not see quotas";
    vec![if has_inode_limit && space.f_favail == 0 {
        Finding::wrong("no inode is free: no file can be made", advice)
    } else if has_space_limit && free_bytes == 0 {
        Finding::wrong("no space is free", advice)
    } else if has_space_limit && free_bytes < arena_bytes {
        let arena = quantity::bytes(arena_bytes);
        Finding::note(
            format!("{free} are free, less than the arena holds ({arena})"),
            advice,
        )
    } else {
        Finding::ok(format!("{free} are free (your quota may be lower)"))
    }]
}

/// Reports whether fsync(2) works for a file and for the directory that names it, and whether it is slow.
pub(crate) fn check_sync(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let mut file = probe.file("synced")?;
        file.write_all(b"firn")?;
        let failed_sync = |object: &str, errno: Errno| {
            Finding::wrong(
                format!("fsync(2) of a {object} fails: {errno}"),
                "nothing becomes durable here: name another backing",
            )
        };
        let start = Instant::now();
        if let Err(errno) = fsync(&file) {
            return Ok(vec![failed_sync("file", errno)]);
        }
        if let Err(errno) = fsync(probe.dir()) {
            return Ok(vec![failed_sync("directory", errno)]);
        }
        let duration = start.elapsed();
        let text = format!(
            "a file and its directory are synced in {:.1} ms",
            duration.as_secs_f64() * 1e3
        );
        Ok(vec![if duration > SLOW_SYNC {
            Finding::note(text, "mount with fsync=held for programs that sync often")
        } else {
            Finding::ok(text)
        }])
    })
}

/// Reports whether a rename replaces a file, and whether RENAME_NOREPLACE works. Commits of transactions need the
/// first, and the removal of checkpoints needs the second.
pub(crate) fn check_names(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let dir = probe.dir();
        probe.file("new")?.write_all(b"new")?;
        probe.file("old")?.write_all(b"old")?;
        let new_name = file_name("new");
        let old_name = file_name("old");
        renameat(dir, &new_name, dir, &old_name)?;
        if read_private_file(dir, Path::new(&old_name))? != "new" {
            return Ok(vec![Finding::wrong(
                "a rename over a file does not replace it",
                "name another backing",
            )]);
        }
        probe.file("other")?;
        let existing_name = file_name("other");
        // NFS and others refuse RENAME_NOREPLACE for any names. So the error for an existing name tells whether the
        // flag works.
        let renamed = renameat_with(dir, &old_name, dir, &existing_name, RenameFlags::NOREPLACE);
        Ok(vec![match renamed {
            Err(Errno::EXIST) => {
                Finding::ok("a rename replaces a file, and with RENAME_NOREPLACE it refuses to")
            }
            _ => Finding::note(
                "renames that must not replace a file (RENAME_NOREPLACE) do not work here",
                "do not use `firn prune` and mode=shadow on this backing; everything else works",
            ),
        }])
    })
}

/// Returns the text of a file in the directory `dir`. Fails if the file does not belong to this user.
fn read_private_file(dir: &OwnedFd, name: &Path) -> io::Result<String> {
    let file =
        firn_trust::open_private_file(dir, name, OFlags::RDONLY).map_err(io::Error::other)?;
    let mut text = String::new();
    std::fs::File::from(file).read_to_string(&mut text)?;
    Ok(text)
}

/// Reports whether file locks work between two open files of this host. Hosts lock files to show that they are alive.
/// Whether locks reach other hosts cannot be tested here: that needs a second host.
pub(crate) fn check_locks(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let backing = probe.open_backing()?;
        let name = file_name("locked");
        let result = check_two_files(&backing, &backing.root(), &name, &mut std::thread::sleep);
        Ok(vec![match result {
            Ok(()) => Finding::ok(
                "file locks work on this host; whether they reach other hosts shows only when a second host mounts",
            ),
            Err(error) => Finding::note(
                format!("file locks do not work: {error}"),
                "mount the file system with locks, or do not use tokens=flock, participants and layout=log",
            ),
        }])
    })
}

/// Reports whether the backing has extended attributes and holes. Programs find them on a mount only if the backing
/// has them.
pub(crate) fn check_files(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let mut missing = Vec::new();
        let mut file = probe.file("attributes")?;
        if fsetxattr(&file, "user.firn-doctor", b"1", XattrFlags::empty()).is_err() {
            missing.push("extended attributes (user.*)");
        }
        file.write_all(&vec![1; 3 * BLOCK_BYTES as usize])?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(file.as_fd(), flags, 0, BLOCK_BYTES).is_err() {
            missing.push("punching holes");
        }
        let mut sparse = probe.file("sparse")?;
        sparse.seek(SeekFrom::Start(8 * BLOCK_BYTES))?;
        sparse.write_all(b"data")?;
        // The file begins with a hole. SEEK_DATA that does not find it returns offset 0.
        let data_offset = seek(&sparse, RustixSeekFrom::Data(0));
        if !data_offset.is_ok_and(|offset| offset > 0) {
            missing.push("finding data in sparse files (SEEK_DATA)");
        }
        Ok(vec![if missing.is_empty() {
            Finding::ok("extended attributes, holes and SEEK_DATA work")
        } else {
            Finding::note(
                format!("its file system lacks {}", missing.join(", ")),
                "nothing to do, if no program needs them: a mount has the features of its backing",
            )
        }])
    })
}

/// Reports by how much the clock of the file server differs from this host's.
pub(crate) fn check_clock(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let write_start = SystemTime::now();
        let mut file = probe.file("stamped")?;
        file.write_all(b"firn")?;
        file.sync_all()?;
        let server_time = file.metadata()?.modified()?;
        let write_end = SystemTime::now();
        let difference_s = seconds_outside(write_start..write_end, server_time);
        Ok(vec![judge_clock(difference_s)])
    })
}

/// Returns by how many seconds `time` lies after `span`. They are negative if `time` lies before the span, and 0 within
/// it.
fn seconds_outside(span: Range<SystemTime>, time: SystemTime) -> f64 {
    let seconds_after_span = time.duration_since(span.end).unwrap_or_default();
    let seconds_before_span = span.start.duration_since(time).unwrap_or_default();
    seconds_after_span.as_secs_f64() - seconds_before_span.as_secs_f64()
}

/// Judges a difference of clocks in seconds; a positive one means that the server's clock is ahead.
fn judge_clock(difference_s: f64) -> Finding {
    if difference_s.abs() <= CLOCK_DIFFERENCE_MAX_S {
        return Finding::ok("the clocks of this host and of the file system agree");
    }
    let relation = if difference_s > 0.0 {
        "ahead of"
    } else {
        "behind"
    };
    let seconds = difference_s.abs();
    Finding::note(
        format!(
            "the clock of the file system is {seconds:.1} s {relation} this host's: file times are misleading"
        ),
        "run chrony or another NTP client on both hosts",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_clock_that_is_off_is_told_with_its_direction() {
        let at = |s: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(s);
        assert_eq!(seconds_outside(at(10)..at(12), at(11)), 0.0);
        assert_eq!(seconds_outside(at(10)..at(12), at(17)), 5.0);
        assert_eq!(seconds_outside(at(10)..at(12), at(4)), -6.0);
        assert_eq!(judge_clock(-0.5).verdict, Verdict::Ok);
        assert!(judge_clock(5.0).text.contains("5.0 s ahead of"));
        assert!(judge_clock(-6.0).text.contains("6.0 s behind"));
    }
}
