//! Hints that turn off data sieving in ROMIO.
//!
//! Data sieving reads a range, changes a part, and writes the whole range back. So it would overwrite bytes that other
//! hosts have changed meanwhile.

use std::io::Read;

use super::command::ROMIO_HINTS;
use crate::failure::{Failure, USAGE};

/// The hint that makes ROMIO write only the bytes that a program gave it.
const NO_SIEVES: &str = "romio_ds_write disable";
/// Key of that hint.
const SIEVES: &str = "romio_ds_write";
/// Maximum size in bytes of a file with hints. Real files have some hundred bytes.
const HINTS_BYTES_MAX: u64 = 64 << 10;

/// Returns the user's hints, with the hint against data sieving added. Fails where the user's file cannot be read.
pub(super) fn without_sieving() -> Result<String, Failure> {
    let mut hints = String::new();
    if let Some(file) = std::env::var_os(ROMIO_HINTS) {
        std::fs::File::open(&file)
            .and_then(|opened| opened.take(HINTS_BYTES_MAX).read_to_string(&mut hints))
            .map_err(|error| {
                let shown = crate::text::path(file.as_ref());
                let why = format!("cannot read {shown}, which {ROMIO_HINTS} names: {error}");
                Failure::new(USAGE, why)
            })?;
    }
    Ok(with_own(&hints))
}

/// Adds the hint, unless the user has set that key. The user's own choice stays, even if it is wrong.
fn with_own(hints: &str) -> String {
    let is_sieves = |line: &str| line.split_whitespace().next() == Some(SIEVES);
    let mut all = hints.trim_end().to_owned();
    if !hints.lines().any(is_sieves) {
        if !all.is_empty() {
            all.push('\n');
        }
        all += NO_SIEVES;
    }
    all + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_of_the_user_stay() {
        assert_eq!(with_own(""), "romio_ds_write disable\n");
        assert_eq!(
            with_own("cb_nodes 4\n\n"),
            "cb_nodes 4\nromio_ds_write disable\n"
        );
        let own = "romio_ds_write enable\n";
        assert_eq!(with_own(own), own);
    }
}
