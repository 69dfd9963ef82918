//! Writers on several hosts that write every n-th record of one file and remember what was acknowledged, and the check
//! that all of it is there.
//!
//! A writer logs each write outside of the mount before it begins and after it returned, as those of [`crate::ack`] do.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rand::RngExt;

use crate::ack::{Log, Op, read_log};
use crate::random::{bytes, generator};

/// Bytes of a record: neighbours are another host's, and share pages with it.
const RECORD_BYTES: u64 = 4097;
/// Records of each writer.
const RECORDS: u64 = 150;

/// Writes records `which`, `which + writers`, ... of `file`, again and again, until the first error (firnd was killed).
pub fn write_until_error(file: &Path, log: &Path, seed: u64, which: u64, writers: u64) {
    let mut rng = generator(seed);
    let mut log = Log::create(log);
    // Made once: where firnd was killed the name may lead to the directory below the mount.
    let open = |may_create: bool| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(may_create);
        options.open(file)
    };
    let mut write = || -> std::io::Result<()> {
        let mut opened = open(true)?;
        loop {
            match rng.random_range(0..100) {
                0..6 => opened.sync_all()?,
                6..10 => {
                    crate::fsops::close(opened)?;
                    opened = open(false)?;
                }
                _ => {
                    let number = rng.random_range(0..RECORDS) * writers + which;
                    let key = rng.random();
                    let offset = number * RECORD_BYTES;
                    let write = Op::Write {
                        file: 0,
                        offset,
                        len: RECORD_BYTES,
                        key,
                    };
                    log.during(write, || {
                        opened.write_all_at(&bytes(key, RECORD_BYTES as usize), offset)
                    })?;
                }
            }
        }
    };
    if let Err(error) = write() {
        println!("the writer of host {which} ends: {error}");
    }
}

/// Compares a plain file with what the logs of its writers say. How many writes had returned.
#[track_caller]
pub fn verify(file: &Path, logs: &[PathBuf]) -> u64 {
    let found = std::fs::read(file).expect("read");
    let mut before = Vec::new();
    let mut after = Vec::new();
    let mut writes = 0;
    for log in logs {
        for (op, returned) in read_log(log) {
            let Op::Write {
                offset, len, key, ..
            } = op
            else {
                panic!("no other operation is logged: {op:?}");
            };
            let data = bytes(key, len as usize);
            put(&mut after, offset, &data);
            if returned {
                put(&mut before, offset, &data);
                writes += 1;
            }
        }
    }
    assert!(
        (before.len()..=after.len()).contains(&found.len()),
        "{} bytes, and {} to {} were written",
        found.len(),
        before.len(),
        after.len()
    );
    // What had begun and not returned is there, or not, or in part; of what was never written there are zeros.
    before.resize(after.len(), 0);
    for (at, byte) in found.iter().enumerate() {
        assert!(
            [before[at], after[at]].contains(byte),
            "byte {at} is {byte}, and {} was acknowledged\n{}",
            before[at],
            describe_writes(at as u64, *byte, logs)
        );
    }
    writes
}

/// The writes of a byte, for the search for the one that was lost.
fn describe_writes(at: u64, found: u8, logs: &[PathBuf]) -> String {
    let mut lines = String::new();
    for (host, log) in logs.iter().enumerate() {
        let operations = read_log(log);
        let count = operations.len();
        for (number, (operation, returned)) in operations.into_iter().enumerate() {
            let Op::Write {
                offset, len, key, ..
            } = operation
            else {
                continue;
            };
            if !(offset..offset + len).contains(&at) {
                continue;
            }
            let byte = bytes(key, len as usize)[(at - offset) as usize];
            let is_found = byte == found;
            lines += &format!(
                "host {host}, write {number} of {count}: {byte}, returned: {returned}, found: {is_found}\n"
            );
        }
    }
    lines
}

fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let end = offset as usize + data.len();
    bytes.resize(bytes.len().max(end), 0);
    bytes[offset as usize..end].copy_from_slice(data);
}
