//! Measures the first large write of a process that has forked.
//!
//! After fork(2), parent and child share all private memory until one of them writes to it. A direct write pins the
//! pages of its buffer. Before the kernel pins a shared page, it copies the page. So the first write costs a page fault
//! and a copy for each page.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

/// The process that shares the written memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharing {
    /// No process, because the worker has not forked.
    None,
    /// A child process.
    Child,
    /// No process. The worker has a child, but the memory was excluded from the fork (MADV_DONTFORK).
    KeptApart,
}

/// Creates a file with one write of all its bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForkedWrite {
    /// The file.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// The process that shares the written memory.
    pub sharing: Sharing,
}

/// The memory to write, and the child that shares it.
pub(super) struct Prepared {
    at: *mut std::ffi::c_void,
    len: usize,
    child: Option<Pid>,
}

impl ForkedWrite {
    /// Allocates the memory, touches it, and forks a child if the task says so.
    pub(super) fn prepare(&self) -> anyhow::Result<Prepared> {
        let len = self.bytes as usize;
        // SAFETY: new private memory at an address of the kernel's choice; `Prepared` alone has it until it is
        // unmapped.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .context("no memory for the bytes to write")?;
        let mut prepared = Prepared {
            at,
            len,
            child: None,
        };
        prepared.bytes_mut().fill(0x5a);
        if self.sharing == Sharing::KeptApart {
            // SAFETY: the range is the whole mapping of `prepared`; the advice changes no byte of it in this process.
            unsafe { madvise(at, len, Advice::LinuxDontFork) }.context("MADV_DONTFORK")?;
        }
        if self.sharing != Sharing::None {
            prepared.child = Some(fork_sleeper()?);
        }
        Ok(prepared)
    }

    pub(super) fn run(&self, prepared: &mut Prepared) -> anyhow::Result<()> {
        write_file(&self.path, prepared.bytes_mut())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn write_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    File::create(path)?.write_all(bytes)
}

/// Forks a child that sleeps until its parent ends. Returns its process id.
fn fork_sleeper() -> anyhow::Result<Pid> {
    // SAFETY: a worker has one thread, so no lock is held by a thread that the child lacks; the child makes nothing
    // but system calls.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("fork"),
        0 => loop {
            // If the parent ended before this call, no signal comes, and the child has a new parent (process 1).
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            if rustix::process::getppid() == Some(Pid::INIT) {
                // SAFETY: ends the child at once, without what the parent registered to run at its own exit.
                unsafe { libc::_exit(0) }
            }
            std::thread::sleep(std::time::Duration::from_secs(1));
        },
        pid => Pid::from_raw(pid).context("fork gave no process"),
    }
}

impl Prepared {
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes are mapped at `at` for reading and writing as long as `self` lives, and only this value
        // knows them.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.len) }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if let Some(child) = self.child {
            let _ = rustix::process::kill_process(child, Signal::KILL);
            let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
        }
        // SAFETY: what `prepare` mapped, all of it, and no slice of it is left.
        let _ = unsafe { munmap(self.at, self.len) };
    }
}
