//! Keeps a file's modification time while its bytes are copied from logs into the file.
//!
//! The *plain file* is the ordinary file with the name. A *container* is a directory with the file's logs. To *flatten*
//! it is to copy the bytes of the logs to the plain file.
//!
//! These copies are writes, so they change the plain file's modification time. The right time is therefore recorded in
//! the container, and set when all bytes are copied. A record is a symbolic link whose text is the time. Links are used
//! because one call makes a link with its text, and fails if another host has made it:
//!
//! ```text
//! time-0       the time that the plain file had before it was flattened
//! time-1 …     times that programs have set since
//! time-N       `end`: the plain file has the time of record N-1; later times are not recorded here
//! ```
//!
//! Race: a program sets the time on one host while another host finishes the plain file.
//! * The first host sets the time of the plain file. If the container is closing (it accepts no new writers), it then
//!   adds the next record and sets the time of the plain file again.
//! * The flattening host sets the plain file's time to that of the last record, and then adds `end`.
//!
//! Both try to make a link with the same number, and the first one wins. If the time wins, the flattening host finds it
//! and sets it on the plain file. If `end` wins, the first host's second setting comes after the last one of the
//! flattening host. No clocks are compared.

use std::ffi::OsStr;

use firn_backing::{Backing, Errno, Result, Time};
use firn_hosts::own::{self, own_caller};

/// Prefix of the name of a record.
const PREFIX: &str = "time-";
/// Number of the record with the time that the plain file had before it was flattened.
pub(crate) const FIRST_NUMBER: u64 = 0;
/// Text of the last record.
const END: &str = "end";

/// The contents of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The file has this modification time.
    Time(Time),
    /// The plain file has the right time, and no record follows.
    End,
}

impl Record {
    fn encode(self) -> String {
        match self {
            Self::Time(Time { sec, nsec }) => format!("{sec} {nsec:09}"),
            Self::End => END.to_owned(),
        }
    }

    /// Decodes a record. Returns `None` if the bytes are no valid record.
    fn decode(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        if text == END {
            return Some(Self::End);
        }
        let (sec, nsec) = text.split_once(' ')?;
        let time = Time {
            sec: sec.parse().ok()?,
            nsec: nsec.parse().ok().filter(|nsec| *nsec < 1_000_000_000)?,
        };
        Some(Self::Time(time))
    }
}

/// Returns the number of the last record among the names in a container.
pub(crate) fn last_record_number<'n>(names: impl Iterator<Item = &'n [u8]>) -> Option<u64> {
    names.filter_map(number_of).max()
}

fn number_of(name: &[u8]) -> Option<u64> {
    let number = std::str::from_utf8(name).ok()?.strip_prefix(PREFIX)?;
    number.parse().ok()
}

fn name_of(number: u64) -> String {
    format!("{PREFIX}{number}")
}

/// Reads a record. Returns `None` if it is gone. A damaged record counts as `end`, so the plain file keeps its present
/// time.
pub(crate) fn load<B: Backing>(backing: &B, dir: &B::Inode, number: u64) -> Result<Option<Record>> {
    let name = name_of(number);
    let Some(text) = own::read_link(backing, dir, &name)? else {
        return Ok(None);
    };
    if let Some(record) = Record::decode(&text) {
        return Ok(Some(record));
    }
    tracing::warn!(
        name,
        "the recorded modification time of a logged file cannot be read: the plain file keeps its present time"
    );
    Ok(Some(Record::End))
}

/// Makes a record. Returns false if a record with this number exists.
fn create_record<B: Backing>(
    backing: &B,
    dir: &B::Inode,
    number: u64,
    record: Record,
) -> Result<bool> {
    let name = name_of(number);
    let text = record.encode();
    match backing.symlink(&own_caller(), dir, OsStr::new(&name), OsStr::new(&text)) {
        Ok(_) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the first time record in the container `dir`: the plain file's time before any host copies bytes into it. The
/// next sync of the directory makes the record durable.
pub(crate) fn record_first<B: Backing>(backing: &B, dir: &B::Inode, time: Time) -> Result<()> {
    // The record of another host may be there already, which counts.
    create_record(backing, dir, FIRST_NUMBER, Record::Time(time)).map(drop)
}

/// A record that is the last one a host found or made.
pub(crate) struct LastRecord {
    pub(crate) number: u64,
    pub(crate) record: Record,
}

/// Records durably that a program has set a file's modification time to `time`. A host that copies the file's logs into
/// it sets the last recorded time at the end. Returns the new record; or the record `end` if the copy is finished, in
/// which case nothing is recorded. Fails with ENOENT if the directory or a record is removed.
///
/// A record is a numbered link in `dir`, the directory with the file's logs. `known_number` is the number of a record
/// that exists, if the caller knows one; the search for the first free number begins there.
pub(crate) fn append_time<B: Backing>(
    backing: &B,
    dir: &B::Inode,
    known_number: Option<u64>,
    time: Time,
) -> Result<LastRecord> {
    let mut number = known_number.unwrap_or(FIRST_NUMBER);
    let record = Record::Time(time);
    loop {
        if create_record(backing, dir, number, record)? {
            backing.sync_dir(dir)?;
            return Ok(LastRecord { number, record });
        }
        match load(backing, dir, number)? {
            Some(Record::Time(_)) => number += 1,
            Some(Record::End) => {
                return Ok(LastRecord {
                    number,
                    record: Record::End,
                });
            }
            // Another host has removed the container.
            None => return Err(Errno::NOENT),
        }
    }
}

/// Gives a file its right modification time, after its logs were copied into it: calls `set_time` with the last
/// recorded time, and then records `end`. No time is recorded after that. `set_time` sets the file's time durably.
///
/// A record is a numbered link in `dir`, the directory with the file's logs. `known_number` is the number of a record
/// that exists.
pub(crate) fn finish<B: Backing>(
    backing: &B,
    dir: &B::Inode,
    known_number: u64,
    set_time: &dyn Fn(Time) -> Result<()>,
) -> Result<()> {
    let mut number = known_number;
    loop {
        // Another host has recorded `end`, or has removed the container.
        let Some(Record::Time(time)) = load(backing, dir, number)? else {
            return Ok(());
        };
        number += 1;
        // If another record gets this number before `end` does, the next iteration sets that time.
        set_time(time)?;
        if create_record(backing, dir, number, Record::End)? {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let times = [(0, 0), (-1, 999_999_999), (1 << 40, 7), (i64::MIN, 1)];
        let records = times.map(|(sec, nsec)| Record::Time(Time { sec, nsec }));
        for record in records.into_iter().chain([Record::End]) {
            assert_eq!(Record::decode(record.encode().as_bytes()), Some(record));
        }
        for text in ["", "1", "1 1000000000", "x 1", "1 2 3", "ende"] {
            assert_eq!(Record::decode(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_last_record_is_found_among_other_names() {
        let names = ["time-9", "head", "time-10", "time-x", "times-11"];
        assert_eq!(
            last_record_number(names.iter().map(|name| name.as_bytes())),
            Some(10)
        );
        assert_eq!(last_record_number([b"all".as_slice()].into_iter()), None);
    }
}
