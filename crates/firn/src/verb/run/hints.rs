//! Hints for ROMIO, without which it writes back bytes of other hosts that it has read.

use std::io::Read;

use super::command::ROMIO_HINTS;
use crate::failure::{Failure, USAGE};

/// Writes nothing but the bytes that it was given.
const NO_SIEVES: &str = "romio_ds_write disable";
/// Its first word.
const SIEVES: &str = "romio_ds_write";
/// Bytes of a file with hints that is taken. Hints have some hundreds.
const HINTS_BYTES_MAX: u64 = 64 << 10;

/// The hints of the user, and that one.
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

/// The user's own choice stays, also a wrong one.
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
