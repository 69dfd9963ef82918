//! Checks which operations the backing's file system supports: sync, rename, locks, holes and others.
//!
//! Each check tries the operations on files in a probe directory of its own ([`ProbeDir`]).

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use firn_backing::Volume;
use firn_format::quantity;
use firn_hosts::check_two_files;
use rustix::fs::{
    FallocateFlags, RenameFlags, SeekFrom as Place, XattrFlags, fallocate, fsetxattr, fsync,
    renameat, renameat_with, seek,
};
use rustix::io::Errno;

use crate::doctor::backing::canonical;
use crate::doctor::probe::{ProbeDir, file_name};
use crate::doctor::{CheckSubject, Finding};

/// Duration above which a sync noticeably delays each program that waits for it.
const SLOW_SYNC: Duration = Duration::from_secs(1);
/// Seconds by which two clocks may differ. A larger difference confuses make, rsync and readers of timestamps.
const CLOCK_DIFFERENCE_MAX_S: f64 = 2.0;
/// Upper bound of a file system's block size, in bytes.
const BLOCK_BYTES: u64 = 1 << 20;

/// Runs `try_operations` with a new probe directory of the backing, and returns its findings.
///
/// An error, also one of `try_operations`, becomes a finding. Nothing runs for a read-only mount.
fn with_probe(
    subject: &CheckSubject<'_>,
    try_operations: impl FnOnce(&ProbeDir) -> io::Result<Vec<Finding>>,
) -> Vec<Finding> {
    if subject.options.read_only {
        return Vec::new();
    }
    let backing = match canonical(subject) {
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

/// Reports how much space and how many names (inodes) are free in the backing.
pub(crate) fn check_room(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let stat = canonical(subject).map(|backing| rustix::fs::statvfs(&backing));
    let stat = match stat {
        Ok(Ok(stat)) => stat,
        Ok(Err(errno)) => return vec![Finding::refused(format!("statfs(2): {errno}"))],
        Err(text) => return vec![Finding::refused(text)],
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let arena = subject.options.arena_bytes;
    let advice = "remove files, or name another backing; this check does not see quotas";
    vec![if stat.f_files > 0 && stat.f_favail == 0 {
        Finding::wrong("no inode is free: no file can be made", advice)
    } else if free == 0 && stat.f_blocks > 0 {
        Finding::wrong("no space is free", advice)
    } else if free < arena && stat.f_blocks > 0 {
        let free = quantity::bytes(free);
        let arena = quantity::bytes(arena);
        Finding::note(
            format!("{free} are free, less than the arena holds ({arena})"),
            advice,
        )
    } else {
        Finding::ok(format!(
            "{} are free (your quota may be lower)",
            quantity::bytes(free)
        ))
    }]
}

/// Reports whether fsync(2) works for a file and for the directory that names it, and whether it is slow.
pub(crate) fn check_sync(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let mut file = probe.file("synced")?;
        file.write_all(b"firn")?;
        let start = Instant::now();
        let refused = |what: &str, errno: Errno| {
            Finding::wrong(
                format!("fsync(2) of a {what} fails: {errno}"),
                "nothing becomes durable here: name another backing",
            )
        };
        if let Err(errno) = fsync(&file) {
            return Ok(vec![refused("file", errno)]);
        }
        if let Err(errno) = fsync(probe.dir()) {
            return Ok(vec![refused("directory", errno)]);
        }
        let took = start.elapsed();
        let text = format!(
            "a file and its directory are synced in {:.1} ms",
            took.as_secs_f64() * 1e3
        );
        Ok(vec![if took > SLOW_SYNC {
            Finding::note(text, "mount with fsync=held for programs that sync often")
        } else {
            Finding::ok(text)
        }])
    })
}

/// Reports whether a rename replaces a file, and whether RENAME_NOREPLACE works. Commits need the first, and the removal
/// of checkpoints needs the second.
pub(crate) fn check_names(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let dir = probe.dir();
        probe.file("new")?.write_all(b"new")?;
        probe.file("old")?.write_all(b"old")?;
        let [new, old, other] = ["new", "old", "other"].map(file_name);
        renameat(dir, &new, dir, &old)?;
        let mut text = String::new();
        let flags = rustix::fs::OFlags::RDONLY;
        let renamed = firn_trust::open_private_file(dir, Path::new(&old), flags);
        let renamed = renamed.map_err(io::Error::other)?;
        std::fs::File::from(renamed).read_to_string(&mut text)?;
        if text != "new" {
            return Ok(vec![Finding::wrong(
                "a rename over a file does not replace it",
                "name another backing",
            )]);
        }
        probe.file("other")?;
        // NFS and others refuse RENAME_NOREPLACE for any names. So the error for an existing name tells whether the
        // flag works.
        let refused = renameat_with(dir, &old, dir, &other, RenameFlags::NOREPLACE);
        Ok(vec![match refused {
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

/// Reports whether file locks work between two open files of this host. Only another live host could show whether they
/// reach other hosts.
pub(crate) fn check_locks(subject: &CheckSubject<'_>) -> Vec<Finding> {
    with_probe(subject, |probe| {
        let base = probe.open_backing()?;
        let name = file_name("locked");
        let checked = check_two_files(&base, &base.root(), &name, &mut std::thread::sleep);
        Ok(vec![match checked {
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
        let data = seek(&sparse, Place::Data(0));
        if !data.is_ok_and(|offset| offset > 0) {
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
        let before = SystemTime::now();
        let mut file = probe.file("stamped")?;
        file.write_all(b"firn")?;
        file.sync_all()?;
        let stamped = file.metadata()?.modified()?;
        let difference = difference_s(before, stamped, SystemTime::now());
        Ok(vec![judge_clock(difference)])
    })
}

/// Returns the seconds by which `stamped` lies after the span `before..after`. They are negative if `stamped` lies
/// before the span, and 0 within it.
fn difference_s(before: SystemTime, stamped: SystemTime, after: SystemTime) -> f64 {
    let seconds = |later: SystemTime, earlier: SystemTime| {
        let passed = later.duration_since(earlier).unwrap_or_default();
        passed.as_secs_f64()
    };
    seconds(stamped, after) - seconds(before, stamped)
}

/// Judges a difference of clocks in seconds; a positive one means that the server's clock is ahead.
fn judge_clock(difference_s: f64) -> Finding {
    if difference_s.abs() <= CLOCK_DIFFERENCE_MAX_S {
        return Finding::ok("the clocks of this host and of the file system agree");
    }
    let how = if difference_s > 0.0 {
        "ahead of"
    } else {
        "behind"
    };
    let seconds = difference_s.abs();
    Finding::note(
        format!(
            "the clock of the file system is {seconds:.1} s {how} this host's: file times are misleading"
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
        assert_eq!(difference_s(at(10), at(11), at(12)), 0.0);
        assert_eq!(difference_s(at(10), at(17), at(12)), 5.0);
        assert_eq!(difference_s(at(10), at(4), at(12)), -6.0);
        assert_eq!(judge_clock(-0.5).verdict, Verdict::Ok);
        assert!(judge_clock(5.0).text.contains("5.0 s ahead of"));
        assert!(judge_clock(-6.0).text.contains("6.0 s behind"));
    }
}
