//! Stores records of runs in the host's runtime directory and in `.firn/records` of the backing, and reads them. The
//! record of a run is a summary of one mount: figures over time, checkpoints and events.
//!
//! ```text
//!   .firn/records/HOST@TIME-ID.json    TIME: when firnd attached, in microseconds since 1970, 17 digits; ID: of this firnd
//! ```
//!
//! Promises
//! * A reader finds the complete old record or the complete new one.
//! * firnd removes what it stores: the last [`RECORDS_OF_HOST_MAX`] records of each host stay, and none is kept longer
//!   than [`AGE_MAX_US`].

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use firn_backing::{Backing as _, DirBacking, Volume as _};
use firn_hosts::own;
use firn_protocol::record::{RECORD_BYTES_MAX, RecordError, RunRecord};

use crate::error::AttachError;
use crate::host_lease::{open_backing, own_error};

/// Name of the directory in `.firn/`.
const RECORDS_DIR: &str = "records";
const RECORD_SUFFIX: &str = ".json";
/// Number of records of one host that stay in a backing.
const RECORDS_OF_HOST_MAX: usize = 8;
/// 90 days, in microseconds. Any host removes older records, so those of a host that never returns are removed too.
const AGE_MAX_US: u64 = 90 * 86_400 * 1_000_000;
/// Limit of records that are read from a backing: 8 records of 512 hosts.
const RECORDS_READ_MAX: usize = 4096;

/// Returns the name of a record in `.firn/records`.
pub(crate) fn record_name(host: &str, began_unix_us: u64, incarnation: &str) -> String {
    let id: String = incarnation
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(16)
        .collect();
    format!("{host}@{began_unix_us:017}-{id}{RECORD_SUFFIX}")
}

/// What the name of a record says.
struct RecordName<'a> {
    host: &'a str,
    began_unix_us: u64,
}

impl<'a> RecordName<'a> {
    /// Parses a name; `None` if it is not that of a record.
    fn parse(name: &'a str) -> Option<Self> {
        let (host, time_and_id) = name.strip_suffix(RECORD_SUFFIX)?.rsplit_once('@')?;
        let (time, _) = time_and_id.split_once('-')?;
        Some(Self {
            host,
            began_unix_us: time.parse().ok()?,
        })
    }
}

/// Returns the host in the name of a record; `None` if the name is not that of a record.
fn host_in_name(name: &str) -> Option<&str> {
    Some(RecordName::parse(name)?.host)
}

/// Stores a record in the runtime directory.
pub(crate) fn store_on_host(path: &Path, record: &[u8]) -> std::io::Result<()> {
    let new_path = path.with_extension("record.new");
    // A killed firnd may have left the file.
    let _ = std::fs::remove_file(&new_path);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&new_path)?;
    file.write_all(record)?;
    std::fs::rename(&new_path, path)
}

/// Stores the record of a run (a summary of one mount) in `.firn/records` of a backing, and removes old ones.
pub(crate) fn store_in_backing(
    backing: &Path,
    name: &str,
    now_unix_us: u64,
    record: &[u8],
) -> Result<(), AttachError> {
    let to_error = own_error(backing);
    let base = open_backing(backing)?;
    let firn_dir = own::make_dir(&base, &base.root(), own::TOP).map_err(&to_error)?;
    let dir = own::make_dir(&base, &firn_dir, RECORDS_DIR)
        .map_err(|error| to_error(error.below(own::TOP)))?;
    own::replace_file(&base, &dir, name, record).map_err(|errno| to_error(errno.into()))?;
    let entries = own::list(&base, &dir).map_err(|errno| to_error(errno.into()))?;
    let mut names: Vec<String> = entries
        .into_iter()
        .filter_map(|(name, ..)| String::from_utf8(name).ok())
        .collect();
    names.sort();
    for old_name in find_old_records(&names, name, now_unix_us) {
        // A failure is ignored, because another host may have removed the record meanwhile.
        let _ = base.unlink(&dir, OsStr::new(old_name));
    }
    Ok(())
}

/// Returns the names of records to remove when `newest` is stored: those beyond the limit for its host, and those of
/// any host that are too old. `names` must be sorted, so that those of one host are in the order of their time.
fn find_old_records<'a>(names: &'a [String], newest: &str, now_unix_us: u64) -> Vec<&'a str> {
    let host = host_in_name(newest);
    let names_of_host: Vec<&String> = names
        .iter()
        .filter(|name| host_in_name(name) == host)
        .collect();
    let excess = names_of_host.len().saturating_sub(RECORDS_OF_HOST_MAX);
    let is_too_old = |name: &str| {
        RecordName::parse(name)
            .is_some_and(|name| name.began_unix_us.saturating_add(AGE_MAX_US) < now_unix_us)
    };
    let mut old_names = Vec::new();
    for name in &names_of_host[..excess] {
        old_names.push(name.as_str());
    }
    for name in names {
        if is_too_old(name) {
            old_names.push(name.as_str());
        }
    }
    old_names.retain(|name| *name != newest);
    old_names
}

/// The content of a record, or why it cannot be read.
pub type FoundRecord = Result<RunRecord, RecordError>;

/// Reads the records of runs (summaries of earlier mounts) in a backing, the newest first. `take` is called with each
/// record, or why it cannot be used, and its name before the next one is read.
pub fn read_in_backing(
    backing: &Path,
    take: &mut dyn FnMut(&str, FoundRecord),
) -> Result<(), AttachError> {
    let to_error = own_error(backing);
    let base: DirBacking = open_backing(backing)?;
    let Some((firn_dir, _)) = own::find_dir(&base, &base.root(), own::TOP).map_err(&to_error)?
    else {
        return Ok(());
    };
    let records_dir = own::find_dir(&base, &firn_dir, RECORDS_DIR)
        .map_err(|error| to_error(error.below(own::TOP)))?;
    let Some((dir, _)) = records_dir else {
        return Ok(());
    };
    let entries = own::list(&base, &dir).map_err(|errno| to_error(errno.into()))?;
    let mut names: Vec<String> = entries
        .into_iter()
        .filter_map(|(name, ..)| String::from_utf8(name).ok())
        .filter(|name| RecordName::parse(name).is_some())
        .collect();
    names.sort_by_key(|name| {
        std::cmp::Reverse(RecordName::parse(name).map(|name| name.began_unix_us))
    });
    names.truncate(RECORDS_READ_MAX);
    for name in names {
        let record = match own::read_file_at_most(&base, &dir, &name, RECORD_BYTES_MAX) {
            Ok(Some(bytes)) => RunRecord::parse(&bytes),
            // The record's host has removed it meanwhile.
            Ok(None) => continue,
            Err(own::OwnError::TooLong { bytes, .. }) => Err(RecordError::TooLong { bytes }),
            Err(error) => return Err(to_error(error)),
        };
        take(&name, record);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(backing: &Path) -> Vec<(String, FoundRecord)> {
        let mut found = Vec::new();
        read_in_backing(backing, &mut |name, record| {
            found.push((name.to_owned(), record));
        })
        .unwrap();
        found
    }

    #[test]
    fn records_of_each_host_are_bounded_in_number_and_age() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("backing")).unwrap();
        let backing = dir.path().join("backing");
        let day_us = 86_400_000_000;
        let old = record_name("gone", 5, "a-b");
        store_in_backing(&backing, &old, 5, b"{}").unwrap();
        for began in 0..20 {
            let began = 200 * day_us + began;
            let name = record_name("n1", began, "0f-1");
            store_in_backing(&backing, &name, began, b"{}").unwrap();
        }
        let other = record_name("n2", 200 * day_us, "0f");
        store_in_backing(&backing, &other, 200 * day_us, b"{}").unwrap();
        let found = read_all(&backing);
        let of = |host| {
            found
                .iter()
                .filter(|(name, _)| name.starts_with(host))
                .count()
        };
        assert_eq!(
            (of("n1"), of("n2"), of("gone")),
            (RECORDS_OF_HOST_MAX, 1, 0)
        );
        assert!(found[0].0.contains("@"), "{found:?}");
        // `{}` is a record without a version.
        assert!(found.iter().all(|(_, record)| record.is_err()));
    }

    #[test]
    fn a_record_that_is_too_long_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let name = record_name("n1", 1, "a");
        let long = vec![b'x'; RECORD_BYTES_MAX as usize + 1];
        store_in_backing(dir.path(), &name, 1, &long).unwrap();
        let found = read_all(dir.path());
        assert!(
            matches!(&found[..], [(_, Err(RecordError::TooLong { .. }))]),
            "{found:?}"
        );
    }
}
