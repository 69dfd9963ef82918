//! The modification time of a file whose container is on its way into the plain file.
//!
//! Flattening changes the plain file, and with it its time. So hosts say in the container what time the file has, in a
//! sequence of symbolic links, each put once:
//!
//! ```text
//! time-0       the time that the plain file had before it was flattened
//! time-1 …     times that programs have set since
//! time-N       `end`: the plain file has the time before it; later times are not recorded here
//! ```
//!
//! A host that gives the file a time sets it in the plain file, then looks whether the container is closing. If so, it
//! puts its time behind the last one and sets it in the plain file again. A host that flattens gives the plain file the
//! last time and then puts `end` behind it. Of two records with one number, the first one put counts. Either that is
//! the time, which is given to the plain file; or it is `end`, and the plain file gets the time afterwards. No clocks
//! are compared.

use std::ffi::OsStr;

use firn_backing::{Backing, Errno, Result, Time};
use firn_hosts::own::{self, own_caller};

/// Before the number of a record.
const PREFIX: &str = "time-";
/// The last record.
const END: &str = "end";

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The file has this time.
    Time(Time),
    /// The plain file has the right time.
    End,
}

impl Record {
    fn encode(self) -> String {
        match self {
            Self::Time(Time { sec, nsec }) => format!("{sec} {nsec:09}"),
            Self::End => END.to_owned(),
        }
    }

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

/// The last record among the names in a container.
pub(crate) fn last<'n>(names: impl Iterator<Item = &'n [u8]>) -> Option<u64> {
    names.filter_map(number_of).max()
}

fn number_of(name: &[u8]) -> Option<u64> {
    let number = std::str::from_utf8(name).ok()?.strip_prefix(PREFIX)?;
    number.parse().ok()
}

fn name_of(number: u64) -> String {
    format!("{PREFIX}{number}")
}

/// Reads a record; none if it is gone. One that cannot be read says nothing: the plain file keeps the time that it has.
pub(crate) fn load<B: Backing>(base: &B, dir: &B::Inode, number: u64) -> Result<Option<Record>> {
    let name = name_of(number);
    let text = own::load_link(base, dir, &name)?;
    Ok(text.map(|text| {
        Record::decode(&text).unwrap_or_else(|| {
            tracing::warn!(
                name,
                "the time of a file in logs cannot be read: it is not kept"
            );
            Record::End
        })
    }))
}

/// Puts a record; false if there is one of this number.
fn put<B: Backing>(base: &B, dir: &B::Inode, number: u64, record: Record) -> Result<bool> {
    let name = name_of(number);
    let text = record.encode();
    match base.symlink(&own_caller(), dir, OsStr::new(&name), OsStr::new(&text)) {
        Ok(_) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Records the time of the plain file, before any host begins to flatten it. Durable with the next sync of the
/// container.
pub(crate) fn begin<B: Backing>(base: &B, dir: &B::Inode, time: Time) -> Result<()> {
    put(base, dir, 0, Record::Time(time)).map(drop)
}

/// The last record that a host finds, or puts.
pub(crate) struct Last {
    pub(crate) number: u64,
    pub(crate) record: Record,
}

/// Records that the file was given a time, durably. `from` is a record that is there. Where the plain file has the
/// file's time already, that stays the last record: later changes of the time go to the plain file.
pub(crate) fn add<B: Backing>(
    base: &B,
    dir: &B::Inode,
    from: Option<u64>,
    time: Time,
) -> Result<Last> {
    let mut number = from.unwrap_or(0);
    let record = Record::Time(time);
    loop {
        if put(base, dir, number, record)? {
            base.sync_dir(dir)?;
            return Ok(Last { number, record });
        }
        match load(base, dir, number)?.ok_or(Errno::NOENT)? {
            Record::Time(_) => number += 1,
            record @ Record::End => return Ok(Last { number, record }),
        }
    }
}

/// Gives the plain file the last time of the container, and records that. `from` is a record that is there; `give`
/// gives the plain file a time, durably.
pub(crate) fn settle<B: Backing>(
    base: &B,
    dir: &B::Inode,
    from: u64,
    give: &dyn Fn(Time) -> Result<()>,
) -> Result<()> {
    let mut number = from;
    loop {
        let Some(Record::Time(time)) = load(base, dir, number)? else {
            return Ok(());
        };
        number += 1;
        // Where a later one is there, the plain file gets that next.
        give(time)?;
        if put(base, dir, number, Record::End)? {
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
        assert_eq!(last(names.iter().map(|name| name.as_bytes())), Some(10));
        assert_eq!(last([b"all".as_slice()].into_iter()), None);
    }
}
