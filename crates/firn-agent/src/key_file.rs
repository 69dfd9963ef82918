//! How a puller finds an agent: `.firn/agent-HOST` in the backing, with an address and a key.
//!
//! Promises
//! * The file has mode 0600, in a directory with mode 0700: only the user and root can read it. A file of another
//!   owner, kind or mode is not believed ([`firn_hosts::own`]).
//! * It is put in its place whole; an agent removes only its own.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use firn_backing::{Backing, DirBacking, Volume};
use firn_format::quote::quoted_path;
use firn_hosts::OwnError;
use firn_hosts::own::{self, TOP};
use serde::{Deserialize, Serialize};

use crate::auth::Key;

/// Bytes of the longest file: what ours have, several times.
const FILE_BYTES_MAX: usize = 4096;
/// What the names of the files begin with.
const FILE_PREFIX: &str = "agent-";
/// What the name of a file ends with until it is whole (`firn_hosts::own::new_name`). A host that ends so would be taken
/// for the record of another one that is being written.
const UNFINISHED: &str = ".new";
/// Bytes of the longest name of a host (POSIX).
const HOST_BYTES_MAX: usize = 255;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// No agent has left one.
    #[error(
        "there is no {}: no agent runs on that host for this backing; start `firn agent` there",
        quoted_path(path)
    )]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// It is not as it must be, or cannot be read.
    #[error("{}: {why}", quoted_path(path))]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// No name for a file.
    #[error(
        "`{host}` is no name of a host: that has letters, digits, `.`, `-` and `_`, does not end in `.new`, and is not `.` or `..`"
    )]
    Host {
        /// As given.
        host: String,
    },
}

impl KeyFileError {
    /// Whether there may be one later.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// What is in a key file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    /// Where the agent listens, as `ADDRESS:PORT` or `NAME:PORT`.
    pub address: String,
    /// Its key.
    pub key: Key,
    /// The host that has copies of what that host holds, or had them when it was lost.
    pub partner: Option<String>,
    /// Hosts that were the partner before, as long as the partner may not have all that they have.
    pub formers: Vec<String>,
}

/// The stored form of the file.
#[derive(Serialize, Deserialize)]
struct Stored {
    address: String,
    key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partner: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    formers: Vec<String>,
}

/// Whether `host` may be the name of a file, or a part of it, and is not what a record is called until it is whole.
pub fn check_host(host: &str) -> Result<(), KeyFileError> {
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_name = firn_trust::is_component(host.as_bytes()) && host.len() <= HOST_BYTES_MAX;
    if !is_name || !host.chars().all(is_good) || host.ends_with(UNFINISHED) {
        return Err(KeyFileError::Host { host: host.into() });
    }
    Ok(())
}

fn file_name(host: &str) -> Result<String, KeyFileError> {
    check_host(host)?;
    Ok(format!("{FILE_PREFIX}{host}"))
}

impl KeyFile {
    /// Leaves it for pullers.
    pub fn store(&self, backing: &Path, host: &str) -> Result<(), KeyFileError> {
        let name = file_name(host)?;
        let stored = Stored {
            address: self.address.clone(),
            key: self.key.digits(),
            partner: self.partner.clone(),
            formers: self.formers.clone(),
        };
        let bytes = serde_json::to_vec(&stored).expect("it is plain JSON");
        let done = || -> Result<(), OwnError> {
            let base = open(backing)?;
            let top = own::dir(&base, &base.root(), TOP)?;
            Ok(own::store(&base, &top, &name, &bytes)?)
        };
        done().map_err(unusable(backing, &name))
    }

    /// Loads the file of the agent on `host`.
    pub fn load(backing: &Path, host: &str) -> Result<Self, KeyFileError> {
        let name = file_name(host)?;
        let read = || -> Result<Option<Vec<u8>>, OwnError> {
            let base = open(backing)?;
            match own::find_dir(&base, &base.root(), TOP)? {
                Some((top, _)) => own::load(&base, &top, &name),
                None => Ok(None),
            }
        };
        match read().map_err(unusable(backing, &name))? {
            Some(bytes) => {
                Self::parse(&bytes).ok_or_else(|| garbled(&backing.join(TOP).join(&name)))
            }
            None => Err(KeyFileError::Missing {
                path: backing.join(TOP).join(name),
            }),
        }
    }

    /// Loads a copy of the file from a path that the user chose.
    pub fn load_from(path: &Path) -> Result<Self, KeyFileError> {
        let flags = rustix::fs::OFlags::RDONLY;
        let file = match firn_trust::open_private_file(rustix::fs::CWD, path, flags) {
            Ok(file) => file,
            Err(error) if error.is_missing() => {
                return Err(KeyFileError::Missing { path: path.into() });
            }
            Err(error) => {
                return Err(KeyFileError::Unusable {
                    path: path.into(),
                    why: error.to_string(),
                });
            }
        };
        let mut bytes = vec![0; FILE_BYTES_MAX];
        let count = rustix::io::pread(&file, &mut bytes[..], 0).map_err(|errno| {
            KeyFileError::Unusable {
                path: path.into(),
                why: errno.to_string(),
            }
        })?;
        Self::parse(&bytes[..count]).ok_or_else(|| garbled(path))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() >= FILE_BYTES_MAX {
            return None;
        }
        let stored: Stored = serde_json::from_slice(bytes).ok()?;
        let mut named = stored.partner.iter().chain(&stored.formers);
        if named.any(|host| check_host(host).is_err()) {
            return None;
        }
        Some(Self {
            partner: stored.partner,
            formers: stored.formers,
            address: stored.address,
            key: Key::from_digits(&stored.key)?,
        })
    }

    /// Hosts that have copies of what that host holds, or may have: first the one that has the newest.
    pub fn holders(&self) -> impl Iterator<Item = &String> {
        self.partner.iter().chain(&self.formers)
    }

    /// Hosts with a record in a backing, believed or not.
    pub fn list_hosts(backing: &Path) -> Result<Vec<String>, KeyFileError> {
        let list = || -> Result<Vec<String>, OwnError> {
            let base = open(backing)?;
            let Some((top, _)) = own::find_dir(&base, &base.root(), TOP)? else {
                return Ok(Vec::new());
            };
            let names = own::list(&base, &top)?.into_iter();
            let hosts = names.filter_map(|(name, ..)| {
                let name = String::from_utf8(name).ok()?;
                let host = name.strip_prefix(FILE_PREFIX)?;
                check_host(host).is_ok().then(|| host.to_owned())
            });
            Ok(hosts.collect())
        };
        list().map_err(unusable(backing, ""))
    }

    /// Removes it, where it is still this one.
    pub fn remove(&self, backing: &Path, host: &str) -> Result<(), KeyFileError> {
        if !Self::load(backing, host).is_ok_and(|stored| stored.key == self.key) {
            return Ok(());
        }
        let name = file_name(host)?;
        let done = || -> Result<(), OwnError> {
            let base = open(backing)?;
            if let Some((top, _)) = own::find_dir(&base, &base.root(), TOP)? {
                base.unlink(&top, OsStr::new(&name))?;
            }
            Ok(())
        };
        done().map_err(unusable(backing, &name))
    }
}

fn open(backing: &Path) -> Result<DirBacking, firn_backing::Errno> {
    DirBacking::open(backing).map_err(|error| {
        firn_backing::Errno::from_io_error(&error).unwrap_or(firn_backing::Errno::IO)
    })
}

fn unusable<'a>(backing: &'a Path, name: &'a str) -> impl Fn(OwnError) -> KeyFileError + 'a {
    move |error| KeyFileError::Unusable {
        path: backing.join(TOP).join(name),
        why: error.to_string(),
    }
}

fn garbled(path: &Path) -> KeyFileError {
    KeyFileError::Unusable {
        path: path.into(),
        why: "it is not what an agent writes: start the agent again".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key_file() -> KeyFile {
        KeyFile {
            address: "10.0.0.1:4711".into(),
            key: Key::random().unwrap(),
            partner: None,
            formers: Vec::new(),
        }
    }

    #[test]
    fn a_key_file_is_private_and_only_its_own_agent_removes_it() {
        let backing = tempfile::tempdir().unwrap();
        let path = backing.path().join(".firn/agent-n1");
        let first = key_file();
        first.store(backing.path(), "n1").unwrap();
        assert_eq!(
            path.metadata().unwrap().permissions().mode() & 0o7777,
            0o600
        );
        assert_eq!(KeyFile::load(backing.path(), "n1").unwrap(), first);
        assert_eq!(KeyFile::load_from(&path).unwrap(), first);
        // A search for copies finds the partner; the record stays this agent's.
        let partnered = KeyFile {
            partner: Some("n2".into()),
            formers: vec!["n3".into()],
            ..first.clone()
        };
        partnered.store(backing.path(), "n1").unwrap();
        assert_eq!(KeyFile::load(backing.path(), "n1").unwrap(), partnered);
        assert_eq!(KeyFile::list_hosts(backing.path()).unwrap(), ["n1"]);
        let second = key_file();
        second.store(backing.path(), "n1").unwrap();
        first.remove(backing.path(), "n1").unwrap();
        assert_eq!(KeyFile::load(backing.path(), "n1").unwrap(), second);
        second.remove(backing.path(), "n1").unwrap();
        assert!(
            KeyFile::load(backing.path(), "n1")
                .unwrap_err()
                .is_missing()
        );
    }

    #[test]
    fn regression_a_record_that_is_not_whole_is_no_host() {
        let backing = tempfile::tempdir().unwrap();
        key_file().store(backing.path(), "n1").unwrap();
        let whole = backing.path().join(".firn/agent-n1");
        let unfinished = backing.path().join(".firn").join(own::new_name("agent-n1"));
        std::fs::copy(whole, unfinished).unwrap();
        assert_eq!(KeyFile::list_hosts(backing.path()).unwrap(), ["n1"]);
    }

    #[test]
    fn a_key_file_that_others_can_read_or_that_is_a_link_is_not_believed() {
        let backing = tempfile::tempdir().unwrap();
        let path = backing.path().join(".firn/agent-n1");
        key_file().store(backing.path(), "n1").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        for error in [
            KeyFile::load(backing.path(), "n1").unwrap_err(),
            KeyFile::load_from(&path).unwrap_err(),
        ] {
            assert!(error.to_string().contains("0640"), "{error}");
        }
        let elsewhere = backing.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        std::fs::set_permissions(&elsewhere, PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        let error = KeyFile::load(backing.path(), "n1").unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
    }

    #[test]
    fn garbage_is_no_key_file_and_a_path_no_host() {
        let backing = tempfile::tempdir().unwrap();
        key_file().store(backing.path(), "n1").unwrap();
        let path = backing.path().join(".firn/agent-n1");
        let long = vec![b' '; FILE_BYTES_MAX];
        for garbage in [
            &b""[..],
            b"{}",
            b"{\"address\":\"x\",\"key\":\"00\"}",
            &long,
        ] {
            std::fs::write(&path, garbage).unwrap();
            assert!(KeyFile::load(backing.path(), "n1").is_err());
            assert!(KeyFile::load_from(&path).is_err());
        }
        for host in ["", ".", "..", "a/b", "a b", "a\0", "n1.new"] {
            let refused = KeyFile::load(backing.path(), host).unwrap_err();
            assert!(
                matches!(refused, KeyFileError::Host { .. }),
                "{host:?}: {refused}"
            );
        }
    }
}
