//! The record of an agent: the file `.firn/agent-HOST` with the address, the key and the partners of the agent on HOST.
//!
//! An *agent* serves the files of a mount to other hosts. The record is in the *backing*, the directory that the mount
//! serves, which is often shared by all hosts. A *partner* is a host that keeps copies of files that HOST has in memory
//! only.
//!
//! Pullers, the processes that copy files from an agent, find the agent by this file. If the puller's host does not
//! have the backing, a user copies the file to that host.
//!
//! Promises
//! * The file has mode 0600, in a directory with mode 0700, so only the user and root can read it. A file of another
//!   owner, kind or mode is refused ([`firn_hosts::own`]).
//! * The file appears and changes by a rename, so a reader always sees a whole one.
//! * An agent removes only a file with its own key.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use firn_backing::{Backing, DirBacking, Volume};
use firn_format::quote::quoted_path;
use firn_hosts::OwnError;
use firn_hosts::own::{self, TOP};
use serde::{Deserialize, Serialize};

use crate::auth::Key;

/// Maximum number of bytes of a file that is read. The files that agents write are much shorter.
const FILE_BYTES_MAX: usize = 4096;
/// Prefix of the names of these files.
const FILE_PREFIX: &str = "agent-";
/// Suffix of the name of a file that is being written (`firn_hosts::own::new_name`). No host may have such a name,
/// because its file would look like an unfinished one.
const UNFINISHED_SUFFIX: &str = ".new";
/// Bytes of the longest name of a host (POSIX).
const HOST_BYTES_MAX: usize = 255;

/// The reason why a record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file does not exist.
    #[error(
        "there is no {}: no agent runs on that host for this backing; start `firn agent` there",
        quoted_path(path)
    )]
    Missing {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file has a wrong owner, kind, mode or content, or cannot be read.
    #[error("{}: {why}", quoted_path(path))]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        why: String,
    },
    /// The name of the host cannot be part of a file's name.
    #[error(
        "`{host}` is not a valid name of a host: such a name has letters, digits, `.`, `-` and `_`, does not end in `.new`, and is not `.` or `..`"
    )]
    Host {
        /// The refused name.
        host: String,
    },
}

impl KeyFileError {
    /// Whether the file does not exist. A later try may then find it.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// The content of an agent's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    /// Address of the agent, as `ADDRESS:PORT` or `NAME:PORT`.
    pub address: String,
    /// Key of the agent.
    pub key: Key,
    /// The partner: the host that has, or last had, copies of the files that the agent's host holds.
    pub partner: Option<String>,
    /// Former partners that may have copies which the partner does not have yet.
    pub formers: Vec<String>,
}

/// The content of the file as JSON.
#[derive(Serialize, Deserialize)]
struct Stored {
    address: String,
    /// The key as hexadecimal digits.
    key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    partner: Option<String>,
    /// Former partners that may still have copies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    formers: Vec<String>,
}

/// Checks whether the name of a host can be part of a file's name and does not look like an unfinished record.
pub fn check_host(host: &str) -> Result<(), KeyFileError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_name = firn_trust::is_component(host.as_bytes()) && host.len() <= HOST_BYTES_MAX;
    if !is_name || !host.chars().all(is_allowed) || host.ends_with(UNFINISHED_SUFFIX) {
        return Err(KeyFileError::Host { host: host.into() });
    }
    Ok(())
}

fn file_name(host: &str) -> Result<String, KeyFileError> {
    check_host(host)?;
    Ok(format!("{FILE_PREFIX}{host}"))
}

impl KeyFile {
    /// Writes the record of the agent on `host` to the directory `.firn` of the backing, the directory that the mount
    /// serves. Other hosts find the agent by its record. It replaces an earlier one by a rename.
    pub fn store(&self, backing: &Path, host: &str) -> Result<(), KeyFileError> {
        let name = file_name(host)?;
        let stored = Stored {
            address: self.address.clone(),
            key: self.key.digits(),
            partner: self.partner.clone(),
            formers: self.formers.clone(),
        };
        let json = serde_json::to_vec(&stored).expect("a record is plain JSON");
        // `own` has the functions for files that only this user may read.
        let write = || -> Result<(), OwnError> {
            let base = open_backing(backing)?;
            let firn_dir = own::make_dir(&base, &base.root(), TOP)?;
            Ok(own::replace_file(&base, &firn_dir, &name, &json)?)
        };
        write().map_err(unusable_error(backing, &name))
    }

    /// Reads the record of the agent on `host`, by which other hosts find it, from the backing, the directory that the
    /// mount serves. Fails with `Missing` if there is none: no agent runs there.
    ///
    /// Also fails if the file is not private to this user, or if it cannot be parsed.
    pub fn load(backing: &Path, host: &str) -> Result<Self, KeyFileError> {
        let name = file_name(host)?;
        let read = || -> Result<Option<Vec<u8>>, OwnError> {
            let base = open_backing(backing)?;
            match own::find_dir(&base, &base.root(), TOP)? {
                Some((firn_dir, _)) => own::read_file(&base, &firn_dir, &name),
                None => Ok(None),
            }
        };
        let json = read().map_err(unusable_error(backing, &name))?;
        let path = backing.join(TOP).join(&name);
        match json {
            Some(json) => Self::parse(&json).ok_or_else(|| invalid_record_error(&path)),
            None => Err(KeyFileError::Missing { path }),
        }
    }

    /// Reads a copy of an agent's record, which has its address and key, from a path that the user has chosen. Fails if
    /// the file is not private to this user.
    pub fn load_from(path: &Path) -> Result<Self, KeyFileError> {
        let unusable = |why: String| KeyFileError::Unusable {
            path: path.into(),
            why,
        };
        let flags = rustix::fs::OFlags::RDONLY;
        let file = match firn_trust::open_private_file(rustix::fs::CWD, path, flags) {
            Ok(file) => file,
            Err(error) if error.is_missing() => {
                return Err(KeyFileError::Missing { path: path.into() });
            }
            Err(error) => return Err(unusable(error.to_string())),
        };
        let mut buffer = vec![0; FILE_BYTES_MAX];
        let file_bytes = match rustix::io::pread(&file, &mut buffer[..], 0) {
            Ok(file_bytes) => file_bytes,
            Err(errno) => return Err(unusable(errno.to_string())),
        };
        Self::parse(&buffer[..file_bytes]).ok_or_else(|| invalid_record_error(path))
    }

    /// Parses the content of an agent's record. Returns `None` if the content is invalid.
    fn parse(json: &[u8]) -> Option<Self> {
        // A file of this size or more may have been read only in part. Agents write shorter ones.
        if json.len() >= FILE_BYTES_MAX {
            return None;
        }
        let stored: Stored = serde_json::from_slice(json).ok()?;
        let mut partners_and_formers = stored.partner.iter().chain(&stored.formers);
        if partners_and_formers.any(|host| check_host(host).is_err()) {
            return None;
        }
        Some(Self {
            key: Key::from_digits(&stored.key)?,
            address: stored.address,
            partner: stored.partner,
            formers: stored.formers,
        })
    }

    /// Hosts that may have partner copies of this host's files. The first host has the newest copies.
    pub fn holders(&self) -> impl Iterator<Item = &String> {
        self.partner.iter().chain(&self.formers)
    }

    /// Lists the hosts that have an agent's record in a backing, a directory that mounts serve. Each record is named
    /// after its host, so no record is read. If the backing has no directory `.firn`, the list is empty.
    pub fn list_hosts(backing: &Path) -> Result<Vec<String>, KeyFileError> {
        let list = || -> Result<Vec<String>, OwnError> {
            let base = open_backing(backing)?;
            let Some((firn_dir, _)) = own::find_dir(&base, &base.root(), TOP)? else {
                return Ok(Vec::new());
            };
            let mut hosts = Vec::new();
            for (name, ..) in own::list(&base, &firn_dir)? {
                if let Some(host) = host_of_file(&name) {
                    hosts.push(host.to_owned());
                }
            }
            Ok(hosts)
        };
        // The empty name makes the error name the directory.
        list().map_err(unusable_error(backing, ""))
    }

    /// Removes the record of `host` if it has this key. If another agent has replaced the record, the record remains.
    pub fn remove(&self, backing: &Path, host: &str) -> Result<(), KeyFileError> {
        match Self::load(backing, host) {
            Ok(stored) if stored.key == self.key => {}
            _ => return Ok(()),
        }
        let name = file_name(host)?;
        let remove = || -> Result<(), OwnError> {
            let base = open_backing(backing)?;
            if let Some((firn_dir, _)) = own::find_dir(&base, &base.root(), TOP)? {
                base.unlink(&firn_dir, OsStr::new(&name))?;
            }
            Ok(())
        };
        remove().map_err(unusable_error(backing, &name))
    }
}

/// Returns the host whose record has this file name. Returns `None` if the file is no record.
fn host_of_file(name: &[u8]) -> Option<&str> {
    let host = std::str::from_utf8(name).ok()?.strip_prefix(FILE_PREFIX)?;
    check_host(host).ok()?;
    Some(host)
}

fn open_backing(backing: &Path) -> Result<DirBacking, firn_backing::Errno> {
    DirBacking::open(backing).map_err(|error| {
        firn_backing::Errno::from_io_error(&error).unwrap_or(firn_backing::Errno::IO)
    })
}

/// Returns a function that makes errors of the file `name` in the backing.
fn unusable_error<'a>(backing: &'a Path, name: &'a str) -> impl Fn(OwnError) -> KeyFileError + 'a {
    move |error| KeyFileError::Unusable {
        path: backing.join(TOP).join(name),
        why: error.to_string(),
    }
}

/// Makes the error of a file with content that no agent writes.
fn invalid_record_error(path: &Path) -> KeyFileError {
    KeyFileError::Unusable {
        path: path.into(),
        why: "this is not the record of an agent: start the agent again".into(),
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
        // The record with a partner replaces the one without.
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
    fn regression_an_unfinished_record_is_not_listed_as_a_host() {
        let backing = tempfile::tempdir().unwrap();
        key_file().store(backing.path(), "n1").unwrap();
        let finished = backing.path().join(".firn/agent-n1");
        let unfinished = backing.path().join(".firn").join(own::new_name("agent-n1"));
        std::fs::copy(finished, unfinished).unwrap();
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
    fn a_garbled_record_and_a_name_that_is_no_host_are_refused() {
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
