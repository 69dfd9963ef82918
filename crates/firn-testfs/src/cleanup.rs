//! Removes what a test or benchmark set up (mounts, directories, networks), however the program ends.
//!
//! A *leftover* is an object that outlives its process unless a program removes it. Its *guard* removes it when
//! dropped.
//!
//! Promises
//! * A [`Leftover`] is removed when its [`Guard`] is dropped: on return, error or panic.
//! * The guard is made *before* the object. So it is no error if there is nothing to remove.
//! * A program may write its leftovers to a list ([`keep_list`]). Then another process removes what is still in the
//!   list ([`remove_listed`]), also if the program was killed. That process must end all processes of the program
//!   first.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::{run, run_quietly, unmount_lazily};

/// Longest wait for the end of killed processes, which usually takes milliseconds.
const END_MAX: Duration = Duration::from_secs(20);

/// An object that outlives the process that made it, and how it is found again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leftover {
    /// The mount at this mount point.
    Mount(PathBuf),
    /// A directory with its content.
    Dir(PathBuf),
    /// A file.
    File(PathBuf),
    /// A network namespace with all processes in it.
    Namespace(String),
    /// A network device.
    Link(String),
    /// The loop devices of a file.
    LoopDevices(PathBuf),
    /// A cgroup that no process is in any more.
    Cgroup(PathBuf),
    /// A changed setting of the kernel, and the text that restores it.
    Setting {
        /// The file of the setting, in /sys or /proc.
        file: PathBuf,
        /// The text that is written to the file.
        text: String,
    },
}

/// Removes a leftover when dropped.
#[must_use = "it removes at once what it was made for"]
pub struct Guard {
    id: u64,
    leftover: Leftover,
}

/// A line of the list.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry {
    Expected(u64, Leftover),
    Removed(u64),
}

/// The list of this process, if it keeps one.
static LIST: OnceLock<File> = OnceLock::new();

/// Announces an object that is about to be made, and returns the guard that removes it.
///
/// If this process keeps a list, the object is written there first. Panics if the list cannot be written.
pub fn expect(leftover: Leftover) -> Guard {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let noted = note(&Entry::Expected(id, leftover.clone()));
    noted.expect("the list of what is to be removed cannot be written");
    Guard { id, leftover }
}

/// Makes this process write its leftovers to the file `path` from now on.
pub fn keep_list(path: &Path) -> anyhow::Result<()> {
    let file = OpenOptions::new().append(true).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let _ = LIST.set(file);
    Ok(())
}

/// Removes the leftovers in the list of a process that has ended, the newest first.
pub fn remove_listed(path: &Path) -> anyhow::Result<()> {
    for leftover in listed(BufReader::new(File::open(path)?)).into_iter().rev() {
        leftover.remove();
    }
    Ok(())
}

/// Returns the leftovers that a list announces and does not report as removed, in the order of the list.
fn listed(list: impl BufRead) -> Vec<Leftover> {
    let mut left: Vec<(u64, Leftover)> = Vec::new();
    // An incomplete line is skipped: its writer was killed before it made the object.
    let entries = list.lines().map_while(Result::ok);
    for entry in entries.filter_map(|line| serde_json::from_str(&line).ok()) {
        match entry {
            Entry::Expected(id, leftover) => left.push((id, leftover)),
            Entry::Removed(id) => left.retain(|(other, _)| *other != id),
        }
    }
    left.into_iter().map(|(_, leftover)| leftover).collect()
}

/// Appends an entry to the list of this process. Does nothing if there is no list.
fn note(entry: &Entry) -> std::io::Result<()> {
    let Some(mut list) = LIST.get() else {
        return Ok(());
    };
    let line = serde_json::to_string(entry)? + "\n";
    list.write_all(line.as_bytes())
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.leftover.remove();
        // If this fails, the process that reads the list removes the object once more, which does no harm.
        let _ = note(&Entry::Removed(self.id));
    }
}

impl Leftover {
    /// Removes the object, or does nothing if there is none. Errors are ignored, because other leftovers follow.
    fn remove(&self) {
        match self {
            Self::Mount(point) if is_mount_point(point) => unmount_lazily(point),
            Self::Mount(_) => {}
            Self::Dir(path) => drop(std::fs::remove_dir_all(path)),
            Self::File(path) => drop(std::fs::remove_file(path)),
            Self::Namespace(name) => {
                // Servers are daemons, so neither their process group nor a closed connection ends them. The namespace
                // belongs to this run alone, so all processes in it do too.
                end_all_in(name);
                run_quietly("ip", &["netns", "del", name]);
            }
            Self::Link(name) => run_quietly("ip", &["link", "del", name]),
            Self::LoopDevices(image) => detach_all(image),
            Self::Cgroup(path) => drop(std::fs::remove_dir(path)),
            Self::Setting { file, text } => drop(std::fs::write(file, text)),
        }
    }
}

/// Returns whether `path` is a mount point. This works even if the server of the mount has died.
fn is_mount_point(path: &Path) -> bool {
    let table = std::fs::read("/proc/self/mounts").unwrap_or_default();
    has_mount(&table, path)
}

/// Returns whether the kernel's table of mounts has the mount point `path`. In the table, special bytes are octal
/// escapes.
fn has_mount(table: &[u8], path: &Path) -> bool {
    let mut escaped = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => {
                escaped.extend(format!("\\{byte:03o}").into_bytes());
            }
            _ => escaped.push(byte),
        }
    }
    let mut lines = table.split(|&byte| byte == b'\n');
    lines.any(|line| line.split(|&byte| byte == b' ').nth(1) == Some(&escaped))
}

fn detach_all(image: &Path) {
    let devices = run("losetup", &["--associated", &image.to_string_lossy()]);
    let devices = devices.unwrap_or_default();
    for device in devices.lines().filter_map(|line| line.split(':').next()) {
        run_quietly("losetup", &["--detach", device]);
    }
}

/// Kills the processes of a network namespace, and waits for their end, at most [`END_MAX`]. Afterwards none of them
/// writes to the directories that are removed next.
fn end_all_in(namespace: &str) {
    let begin = Instant::now();
    loop {
        // A killed process may have started another one in the meantime, so the list is read again.
        let pids = run("ip", &["netns", "pids", namespace]).unwrap_or_default();
        if pids.is_empty() || begin.elapsed() > END_MAX {
            return;
        }
        end_all(&pids);
    }
}

/// Kills processes, and waits until they have ended, for each of them at most [`END_MAX`]. `pids` has one process id on
/// each line.
fn end_all(pids: &str) {
    let killed: Vec<OwnedFd> = pids
        .lines()
        .filter_map(|line| {
            let pid = Pid::from_raw(line.trim().parse().ok()?)?;
            let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            pidfd_send_signal(&process, Signal::KILL).ok()?;
            Some(process)
        })
        .collect();
    let limit = Timespec {
        tv_sec: END_MAX.as_secs() as i64,
        tv_nsec: 0,
    };
    for process in killed {
        // A pidfd becomes readable when the last thread of its process has ended.
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    #[test]
    fn a_list_says_what_is_left() {
        let dir = |name: &str| Leftover::Dir(name.into());
        let entries = [
            Entry::Expected(0, dir("a")),
            Entry::Expected(1, dir("b c")),
            Entry::Removed(0),
            Entry::Expected(2, Leftover::Link("d".into())),
        ];
        let mut list = String::new();
        for entry in &entries {
            list += &(serde_json::to_string(entry).unwrap() + "\n");
        }
        let wanted = [dir("b c"), Leftover::Link("d".into())];
        assert_eq!(listed(list.as_bytes()), wanted);
        // Its writer was killed while it wrote.
        list += "{\"expected\":[3,{\"dir\":\"/";
        assert_eq!(listed(list.as_bytes()), wanted);
    }

    #[test]
    fn a_mount_point_is_found_by_its_whole_name() {
        let table = b"firn /a/b fuse rw 0 0\nfirn /a/with\\040space fuse rw 0 0\n";
        for (path, wanted) in [
            ("/a/b", true),
            ("/a", false),
            ("/a/with space", true),
            ("firn", false),
        ] {
            assert_eq!(has_mount(table, Path::new(path)), wanted, "{path}");
        }
    }

    #[test]
    fn processes_have_ended_when_their_end_was_waited_for() {
        let start = |_| Command::new("sleep").arg("60").spawn().unwrap();
        let mut programs: Vec<Child> = (0..20).map(start).collect();
        let pids: Vec<String> = programs.iter().map(|one| one.id().to_string()).collect();
        end_all(&pids.join("\n"));
        for program in &mut programs {
            assert!(program.try_wait().unwrap().is_some(), "one lives");
        }
    }

    #[test]
    fn a_guard_removes_its_directory_also_when_it_is_not_empty() {
        let path = std::env::temp_dir().join(format!("firn-cleanup-{}", std::process::id()));
        let guard = expect(Leftover::Dir(path.clone()));
        std::fs::create_dir_all(path.join("below")).unwrap();
        drop(guard);
        assert!(!path.exists());
    }
}
