//! Finds the step of a checkpoint in the name of its file or directory.
//!
//! A step is a number directly after a word for steps or checkpoints, such as in `step_100`, `checkpoint-500`,
//! `ckpt.0000100.h5` or `epoch=3-step=900.ckpt`. A name that is only a number is a step too.
//!
//! If there are several such numbers, the one after the word that comes first in `WORDS` counts. A name that marks an
//! unfinished checkpoint, such as `step_100.tmp`, has no step.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Words before a step, by rank, the most specific first. A longer word that ends in one of them counts as that word:
/// `global_step`, `timestep`.
const WORDS: [&[&str]; 4] = [
    &["step"],
    &["iter", "iteration", "cycle"],
    &[
        "checkpoint",
        "ckpt",
        "ckp",
        "chkpt",
        "chk",
        "cpt",
        "restart",
        "rst",
        "snapshot",
        "snap",
        "save",
        "state",
    ],
    &["epoch"],
];

/// Words in the names of checkpoints that are being written or were put aside.
const UNFINISHED_WORDS: [&str; 7] = [
    "tmp",
    "temp",
    "part",
    "partial",
    "incomplete",
    "bak",
    "pruned",
];

/// A number in a name after a word for steps or checkpoints.
#[derive(Clone, Copy)]
struct RankedStep {
    /// Rank of the word in [`WORDS`]. The lowest rank counts.
    rank: usize,
    step: u64,
}

/// Returns the step of a checkpoint with this name. Returns `None` if the name has no step, or marks the checkpoint as
/// unfinished or put aside.
pub fn step_of(name: &OsStr) -> Option<u64> {
    let name = name.as_bytes().to_ascii_lowercase();
    let words: Vec<&[u8]> = split_into_words(&name).collect();
    let is_unfinished = name.starts_with(b".")
        || name.ends_with(b"~")
        || words.iter().any(|word| is_unfinished_word(word));
    if is_unfinished {
        return None;
    }
    if name.iter().all(u8::is_ascii_digit) {
        return parse_number(&name);
    }
    let mut best: Option<RankedStep> = None;
    for pair in words.windows(2) {
        let (Some(rank), Some(step)) = (rank_of_word(pair[0]), parse_number(pair[1])) else {
            continue;
        };
        // If two words have the same rank, the last one counts.
        if best.is_none_or(|best| rank <= best.rank) {
            best = Some(RankedStep { rank, step });
        }
    }
    best.map(|ranked| ranked.step)
}

/// Returns the rank of a word for steps or checkpoints, or `None` if it is another word.
fn rank_of_word(word: &[u8]) -> Option<usize> {
    WORDS
        .iter()
        .position(|endings| ends_in_one_of(word, endings))
}

/// Returns whether a word marks a checkpoint as unfinished or put aside.
fn is_unfinished_word(word: &[u8]) -> bool {
    UNFINISHED_WORDS
        .iter()
        .any(|marker| marker.as_bytes() == word)
}

/// Returns the step of a checkpoint with this name, also if the name marks it as unfinished or put aside:
/// `step_100.tmp` becomes `step_100`.
pub fn step_of_unfinished(name: &OsStr) -> Option<u64> {
    let name = name.as_bytes().to_ascii_lowercase();
    let other_words: Vec<&[u8]> = split_into_words(&name)
        .filter(|word| !is_unfinished_word(word))
        .collect();
    step_of(OsStr::from_bytes(&other_words.join(&b'_')))
}

/// Splits a name into runs of letters and runs of digits. All other bytes separate words.
fn split_into_words(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    let kind = |byte: &u8| (byte.is_ascii_alphabetic(), byte.is_ascii_digit());
    name.chunk_by(move |a, b| kind(a) == kind(b))
        .filter(|run| run[0].is_ascii_alphanumeric())
}

/// Returns whether a word ends in one of `endings`.
fn ends_in_one_of(word: &[u8], endings: &[&str]) -> bool {
    endings
        .iter()
        .any(|ending| word.ends_with(ending.as_bytes()))
}

/// Parses decimal digits. Returns `None` if the number is too large.
fn parse_number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_is_read_from_names_that_programs_give() {
        for (name, step) in [
            ("step_100", Some(100)),
            ("step100", Some(100)),
            ("checkpoint-500", Some(500)),
            ("ckpt.0000100.h5", Some(100)),
            ("global_step20", Some(20)),
            ("globalstep20", Some(20)),
            ("epoch=3-step=900.ckpt", Some(900)),
            ("epoch=3-step=900-v1.ckpt", Some(900)),
            ("epoch_7.pt", Some(7)),
            ("iter_0001000", Some(1000)),
            ("restart.100", Some(100)),
            ("restart.100.0", Some(100)),
            ("chk00100", Some(100)),
            ("snapshot_010.hdf5", Some(10)),
            ("Checkpoint-7", Some(7)),
            ("model.ckpt-1200.index", Some(1200)),
            ("checkpoint_3_step_40", Some(40)),
            ("step_40_restart_3", Some(40)),
            ("1000", Some(1000)),
            ("18446744073709551615", Some(u64::MAX)),
            ("step_5\n", Some(5)),
        ] {
            assert_eq!(step_of(OsStr::new(name)), step, "{name:?}");
        }
        assert_eq!(step_of(OsStr::from_bytes(b"step_\xff9")), Some(9));
    }

    #[test]
    fn an_unfinished_checkpoint_has_the_step_that_it_will_have() {
        for (name, step) in [
            ("step_100.tmp", Some(100)),
            (".step_100.part", Some(100)),
            ("tmp-checkpoint-500", Some(500)),
            ("step_100", Some(100)),
            ("100", Some(100)),
            ("tmp", None),
            ("rank0", None),
        ] {
            assert_eq!(step_of_unfinished(OsStr::new(name)), step, "{name:?}");
        }
    }

    #[test]
    fn other_names_have_none() {
        for name in [
            "",
            "logs",
            "rank0",
            "run12",
            "v2",
            "best",
            "step",
            "steps",
            "h5",
            "18446744073709551616",
            "step_18446744073709551616",
            "step_100.tmp",
            "step_100.part",
            "tmp-checkpoint-500",
            "100.orbax-checkpoint-tmp-5",
            ".step_100",
            ".step_100.pruned",
            "step_100~",
            "mp_rank_00",
        ] {
            assert_eq!(step_of(OsStr::new(name)), None, "{name:?}");
        }
    }
}
