//! Words after `-o` that are not options of Firn: flags of the kernel, and words for other programs.
//!
//! One list in `/etc/fstab` has options for mount(8), for systemd, for the kernel and for the file system. mount(8)
//! passes most of them on. Flags of the kernel take effect ([`KernelFlag`]): to accept `noexec` without effect would be
//! wrong. Words for mount(8) and systemd are skipped.

use serde::{Deserialize, Serialize};

/// A flag of the mount that the kernel honours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "each is the mount(8) option of the same name")]
pub enum KernelFlag {
    Dev,
    NoDev,
    Suid,
    NoSuid,
    Exec,
    NoExec,
    Atime,
    NoAtime,
    Sync,
    Async,
    DirSync,
}

/// Words that are skipped: words for mount(8) or systemd, and words about access times, about which Firn promises
/// nothing.
const SKIPPED: [&str; 23] = [
    "defaults",
    "_netdev",
    "nofail",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "noowner",
    "group",
    "nogroup",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "diratime",
    "nodiratime",
    "silent",
    "loud",
    "nomand",
];

impl KernelFlag {
    /// Returns the flag of the kernel with this name in mount(8), or `None` if there is none.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "dev" => Self::Dev,
            "nodev" => Self::NoDev,
            "suid" => Self::Suid,
            "nosuid" => Self::NoSuid,
            "exec" => Self::Exec,
            "noexec" => Self::NoExec,
            "atime" => Self::Atime,
            "noatime" => Self::NoAtime,
            "sync" => Self::Sync,
            "async" => Self::Async,
            "dirsync" => Self::DirSync,
            _ => return None,
        })
    }

    /// Returns the flag that undoes this one, or `None` if none does.
    pub fn opposite(self) -> Option<Self> {
        Some(match self {
            Self::Dev => Self::NoDev,
            Self::NoDev => Self::Dev,
            Self::Suid => Self::NoSuid,
            Self::NoSuid => Self::Suid,
            Self::Exec => Self::NoExec,
            Self::NoExec => Self::Exec,
            Self::Atime => Self::NoAtime,
            Self::NoAtime => Self::Atime,
            Self::Sync => Self::Async,
            Self::Async => Self::Sync,
            Self::DirSync => return None,
        })
    }
}

/// Whether `word` is for mount(8) or systemd and has no meaning for Firn.
pub fn is_skipped(word: &str) -> bool {
    let key = word.split_once('=').map_or(word, |(key, _)| key);
    SKIPPED.contains(&word)
        || key.starts_with("x-")
        || key.starts_with("X-")
        || key == "comment"
        || key == "uhelper"
}
