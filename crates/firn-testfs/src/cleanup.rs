//! What must be removed, however a program ends.
//!
//! Promises
//! * A [`Leftover`] is removed when its [`Guard`] is dropped: on return, error or panic.
//! * It is named *before* it exists, so that removing it is content to find nothing.
//! * In a program that keeps a list ([`keep_list`]) another process removes what is left of it ([`remove_listed`]): also
//!   when the program was killed. That process ends all others first, so nothing is set up behind its back.

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

/// Far more than a process takes to end that was killed.
const END_MAX: Duration = Duration::from_secs(20);

/// Something that outlives its maker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leftover {
    /// What is mounted there.
    Mount(PathBuf),
    /// A directory with all that is in it.
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
    /// What a file of the kernel's was told; this takes it back.
    Setting {
        /// The file.
        file: PathBuf,
        /// What is written to it.
        text: String,
    },
}

/// Removes what it was made for when dropped.
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

/// Says that `leftover` is going to exist. Panics where that cannot be noted in the list.
pub fn expect(leftover: Leftover) -> Guard {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let noted = note(&Entry::Expected(id, leftover.clone()));
    noted.expect("the list of what is to be removed cannot be written");
    Guard { id, leftover }
}

/// From now on this process notes in `path`, a file, what it sets up.
pub fn keep_list(path: &Path) -> anyhow::Result<()> {
    let file = OpenOptions::new().append(true).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let _ = LIST.set(file);
    Ok(())
}

/// Removes what a process that has ended left behind by its list: what came last first.
pub fn remove_listed(path: &Path) -> anyhow::Result<()> {
    for leftover in listed(BufReader::new(File::open(path)?)).into_iter().rev() {
        leftover.remove();
    }
    Ok(())
}

/// What a list says was expected and not removed.
fn listed(list: impl BufRead) -> Vec<Leftover> {
    let mut left: Vec<(u64, Leftover)> = Vec::new();
    // A line that is no entry was not written to its end, so nothing came of it.
    let entries = list.lines().map_while(Result::ok);
    for entry in entries.filter_map(|line| serde_json::from_str(&line).ok()) {
        match entry {
            Entry::Expected(id, leftover) => left.push((id, leftover)),
            Entry::Removed(id) => left.retain(|(other, _)| *other != id),
        }
    }
    left.into_iter().map(|(_, leftover)| leftover).collect()
}

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
        // Else it is removed once more.
        let _ = note(&Entry::Removed(self.id));
    }
}

impl Leftover {
    fn remove(&self) {
        match self {
            Self::Mount(point) if is_mount_point(point) => unmount_lazily(point),
            Self::Mount(_) => {}
            Self::Dir(path) => drop(std::fs::remove_dir_all(path)),
            Self::File(path) => drop(std::fs::remove_file(path)),
            Self::Namespace(name) => {
                // Servers leave their process group and some survive the end of their connections. The namespace is the
                // run's own, so whatever is in it is too.
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

/// Whether something is mounted at `path`, also where its server has died.
fn is_mount_point(path: &Path) -> bool {
    let table = std::fs::read("/proc/self/mounts").unwrap_or_default();
    has_mount(&table, path)
}

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

/// Ends the processes of a network namespace. When it returns they write nothing any more to directories that are removed
/// next.
fn end_all_in(namespace: &str) {
    let begin = Instant::now();
    loop {
        // One of them may have been starting another.
        let pids = run("ip", &["netns", "pids", namespace]).unwrap_or_default();
        if pids.is_empty() || begin.elapsed() > END_MAX {
            return;
        }
        end_all(&pids);
    }
}

/// Ends the processes whose numbers stand in `pids`, one a line, and waits until they have ended.
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
        // It can be read from when the last thread has ended.
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
