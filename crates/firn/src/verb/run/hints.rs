//! The file of hints that turns off data sieving in ROMIO, the I/O layer of MPICH and other MPI libraries.
//!
//! With data sieving, ROMIO reads a range of a file, changes part of the range, and writes the whole range back. This
//! undoes what other hosts have written to the range in the meantime.

use std::io::Read;

use super::command::ROMIO_HINTS;
use crate::failure::{Failure, USAGE};

/// The hint that makes ROMIO write only the bytes that a program gave it.
const SIEVING_OFF_HINT: &str = "romio_ds_write disable";
/// The key in that hint.
const SIEVING_KEY: &str = "romio_ds_write";
/// Maximum size in bytes of a file with hints. Real files have some hundred bytes.
const HINTS_BYTES_MAX: u64 = 64 << 10;

/// Returns the user's hints, with the hint against data sieving added. Fails if the user's file cannot be read.
pub(super) fn hints_without_sieving() -> Result<String, Failure> {
    let mut hints = String::new();
    if let Some(file) = std::env::var_os(ROMIO_HINTS) {
        std::fs::File::open(&file)
            .and_then(|opened| opened.take(HINTS_BYTES_MAX).read_to_string(&mut hints))
            .map_err(|error| {
                let file = crate::text::path(file.as_ref());
                let text = format!("cannot read {file}, which {ROMIO_HINTS} names: {error}");
                Failure::new(USAGE, text)
            })?;
    }
    Ok(add_sieving_off(&hints))
}

/// Returns `hints` with the hint against data sieving added. If the user has set the key, the user's value remains,
/// even if it is wrong.
fn add_sieving_off(hints: &str) -> String {
    let sets_sieving = |line: &str| line.split_whitespace().next() == Some(SIEVING_KEY);
    let mut extended_hints = hints.trim_end().to_owned();
    if !hints.lines().any(sets_sieving) {
        if !extended_hints.is_empty() {
            extended_hints.push('\n');
        }
        extended_hints += SIEVING_OFF_HINT;
    }
    extended_hints + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_of_the_user_stay() {
        assert_eq!(add_sieving_off(""), "romio_ds_write disable\n");
        assert_eq!(
            add_sieving_off("cb_nodes 4\n\n"),
            "cb_nodes 4\nromio_ds_write disable\n"
        );
        let own = "romio_ds_write enable\n";
        assert_eq!(add_sieving_off(own), own);
    }
}
