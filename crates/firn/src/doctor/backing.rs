//! Checks of the backing, the directory that is to be mounted: on which file system it is, how that is mounted, and
//! whether this user may write there.
//!
//! They change nothing, except that the check `writable` creates and removes a probe directory.

use std::path::{Path, PathBuf};

use firn_config::{Layout, Options, Participants, Partner, TokenService};
use firn_format::mountinfo::{self, Entry, FIRN, holding};
use firn_format::quote::quoted_path;
use rustix::fs::{AtFlags, CWD, statat};

use crate::doctor::probe::{self, ProbeDir};
use crate::doctor::{CheckSubject, Finding, user_id};

/// Name of Firn's own directory at the top of a backing.
const OWN_DIR: &str = ".firn";

/// Returns the canonical path of the backing, as a mount would record it. The error says why it cannot be resolved.
pub(crate) fn canonical_backing(subject: &CheckSubject<'_>) -> Result<PathBuf, String> {
    let backing = subject.backing.unwrap_or(Path::new("."));
    firn_daemon::check_backing(backing, subject.options.read_only)
        .map_err(|error| error.to_string())
}

/// Reports the file system that the backing (the directory that is to be mounted) is on, and what the mount options of
/// that file system mean for Firn.
pub(crate) fn check_file_system(subject: &CheckSubject<'_>) -> Vec<Finding> {
    // Without a table of mounts, the check reports only that the backing is a directory.
    let mount_table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let entries = mountinfo::parse(&mount_table);
    let backing = match canonical_backing(subject) {
        Ok(backing) => backing,
        Err(text) => return vec![Finding::refused(text)],
    };
    let quoted_backing = quoted_path(&backing);
    // The entry of the mount on which the backing lies.
    let Some(entry) = holding(&entries, &backing) else {
        return vec![Finding::ok(format!("{quoted_backing} is a directory"))];
    };
    if entry.fs_type == FIRN {
        let backing_of_mount = quoted_path(&entry.source);
        return vec![Finding::wrong(
            format!(
                "{quoted_backing} is on the Firn mount of {backing_of_mount}: a mount whose backing is on a Firn mount can wait for itself"
            ),
            format!("name the backing: `firn doctor {backing_of_mount}`"),
        )];
    }
    let source = quoted_path(&entry.source);
    let mut findings = vec![Finding::ok(format!(
        "{quoted_backing} is on {} ({source})",
        entry.fs_type
    ))];
    findings.extend(judge_mount(entry, subject.options));
    findings.extend(judge_own_dir(&backing));
    findings
}

/// Returns whether, with these options, hosts rely on file locks in the backing.
fn relies_on_locks(options: &Options) -> bool {
    options.participants != Participants::Off
        || options.tokens == TokenService::Flock
        || options.partner != Partner::None
        || options.layout == Layout::Log
}

/// Judges the type and the mount options of the backing's file system. `options` are those of the Firn mount. Returns
/// no finding if nothing is known against it.
fn judge_mount(entry: &Entry, options: &Options) -> Vec<Finding> {
    let point = quoted_path(&entry.mount_point);
    match entry.fs_type.as_str() {
        "tmpfs" | "ramfs" => vec![Finding::note(
            "the backing is in memory: its files are lost with this host, even those that Firn reports as durable",
            "name a directory on a disk or on a network file system",
        )],
        "overlay" => vec![Finding::note(
            "the backing may be on the root of a container: then its files are lost with the container",
            "name a directory that is mounted into the container (`-v DIR:DIR`)",
        )],
        "nfs" | "nfs4" => judge_nfs(entry, options),
        "lustre" if !has_mount_flag(entry, "flock") => vec![local_locks_finding(
            options,
            "Lustre is mounted without flock, or with localflock",
            format!("mount {point} with `-o flock` on every host"),
        )],
        "beegfs" => vec![local_locks_finding(
            options,
            "BeeGFS keeps file locks local to this host unless tuneUseGlobalFileLocks is set, which this check cannot see",
            "set tuneUseGlobalFileLocks = true in beegfs-client.conf on every host".into(),
        )],
        "fuse.sshfs" => vec![local_locks_finding(
            options,
            "sshfs keeps file locks local to this host",
            "use tokens=etcd, or another file system".into(),
        )],
        _ => Vec::new(),
    }
}

/// Judges the mount options of a backing on NFS. `options` are those of the Firn mount.
fn judge_nfs(entry: &Entry, options: &Options) -> Vec<Finding> {
    let point = quoted_path(&entry.mount_point);
    let has_flag = |flag: &str| has_mount_flag(entry, flag);
    let mut findings = Vec::new();
    let has_local_locks = ["all", "flock", "posix"]
        .iter()
        .any(|kind| has_flag(&format!("local_lock={kind}")));
    if has_local_locks || has_flag("nolock") {
        findings.push(local_locks_finding(
            options,
            "NFS keeps file locks local to this host (nolock or local_lock)",
            format!("mount {point} without nolock, with `-o local_lock=none` or vers=4.2"),
        ));
    }
    if has_flag("soft") || has_flag("softerr") {
        findings.push(Finding::note(
            "NFS calls fail after a timeout (soft): writes fail while the server restarts",
            format!("mount {point} with `-o hard`"),
        ));
    }
    if has_flag("nocto") && options.layout == Layout::Log {
        findings.push(Finding::wrong(
            "with nocto hosts do not find each other's logs (layout=log)",
            format!("mount {point} without nocto, and with `-o lookupcache=positive`"),
        ));
    }
    findings.push(Finding::note(
        "this check cannot see whether the server writes before it answers: an `async` export loses synced files in a power loss",
        "on the server: `exportfs -v` must say sync for this export",
    ));
    findings
}

/// Returns whether `flag`, such as `soft` or `local_lock=all`, is among the mount options of a file system.
fn has_mount_flag(entry: &Entry, flag: &str) -> bool {
    entry.options.split(',').any(|option| option == flag)
}

/// Reports a file system whose file locks do not reach other hosts. The finding is an error if the Firn mount relies on
/// the locks, else a note.
fn local_locks_finding(options: &Options, cause: &str, advice: String) -> Finding {
    let text = format!(
        "{cause}: tokens=flock, participants and layout=log need locks that reach the server"
    );
    if relies_on_locks(options) {
        Finding::wrong(text, advice)
    } else {
        Finding::note(text, advice)
    }
}

/// Judges Firn's own directory in the backing. Returns `None` if it does not exist, or is a directory to which only
/// this user has access. Mounts with transactions or logs refuse any other object at its path.
fn judge_own_dir(backing: &Path) -> Option<Finding> {
    let own_dir_stat = statat(CWD, backing.join(OWN_DIR), AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let distrust_reason = firn_trust::FileMetadata::from_stat(&own_dir_stat)
        .check(firn_trust::Expected::Directory, user_id())
        .err()?;
    Some(Finding::note(
        format!(
            "its directory {OWN_DIR} {distrust_reason}: transactions, layout=log, lanes and agents are refused"
        ),
        format!(
            "mount as the user that made it, or check its content and move it away: `ls -la {}`",
            quoted_path(&backing.join(OWN_DIR))
        ),
    ))
}

/// Reports whether files can be created at the top of the backing, the directory that is to be mounted. The check
/// creates and removes a probe directory there, unless the mount is to be read-only.
pub(crate) fn check_writable(subject: &CheckSubject<'_>) -> Vec<Finding> {
    if subject.options.read_only {
        return vec![Finding::ok("not needed: the mount is read-only")];
    }
    let Ok(backing) = canonical_backing(subject) else {
        // `check_file_system` reports this error already.
        return Vec::new();
    };
    let advice = format!(
        "`chown` or `chmod u+w {}` as its owner; or mount with -o ro",
        quoted_path(&backing)
    );
    if let Some(text) = firn_daemon::write_refusal(&backing) {
        return vec![Finding::wrong(text, advice)];
    }
    let probe = match ProbeDir::create(&backing) {
        Ok(probe) => probe,
        Err(error) => return vec![Finding::wrong(error.to_string(), advice)],
    };
    let removed_count = probe.remove_abandoned();
    // This removes the probe directory.
    drop(probe);
    let mut findings = vec![Finding::ok("files can be made and removed")];
    if removed_count > 0 {
        findings.push(Finding::ok(format!(
            "removed {removed_count} directories {}* of checks that were killed",
            probe::PREFIX
        )));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    fn judged(fs_type: &str, options: &str, mount: &Options) -> Vec<(Verdict, String)> {
        let line = format!("40 22 0:50 / /scratch rw - {fs_type} server:/export {options}\n");
        let entries = mountinfo::parse(line.as_bytes());
        let findings = judge_mount(&entries[0], mount);
        findings
            .into_iter()
            .map(|found| (found.verdict, found.text))
            .collect()
    }

    #[test]
    fn locks_that_stay_on_the_host_are_wrong_for_users_that_need_them() {
        let plain = Options::default();
        let logs = Options {
            layout: Layout::Log,
            ..Options::default()
        };
        let nfs = "rw,vers=3,hard,nolock,local_lock=all";
        for (fs_type, options) in [
            ("nfs", nfs),
            ("nfs", "rw,vers=3,hard,local_lock=flock"),
            ("lustre", "rw,localflock"),
            ("lustre", "rw,lazystatfs"),
            ("fuse.sshfs", "rw,user_id=0"),
        ] {
            assert_eq!(
                judged(fs_type, options, &plain)[0].0,
                Verdict::Note,
                "{options}"
            );
            assert_eq!(
                judged(fs_type, options, &logs)[0].0,
                Verdict::Wrong,
                "{options}"
            );
        }
        assert!(judged("lustre", "rw,flock", &logs).is_empty());
        let good = judged("nfs4", "rw,vers=4.2,hard,local_lock=none", &logs);
        assert!(
            good.len() == 1 && good[0].1.contains("`async` export"),
            "{good:?}"
        );
    }

    #[test]
    fn memory_and_soft_mounts_are_noted() {
        let options = Options::default();
        assert!(
            judged("tmpfs", "rw", &options)[0]
                .1
                .contains("is in memory")
        );
        let soft = judged("nfs4", "rw,vers=4.2,soft", &options);
        assert!(soft[0].1.contains("soft"), "{soft:?}");
        assert!(judged("ext4", "rw", &options).is_empty());
    }
}
