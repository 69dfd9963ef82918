//! The step of a checkpoint, from its name.
//!
//! A step is a number that directly follows a word for steps or checkpoints, such as `step_100`, `checkpoint-500`,
//! `ckpt.0000100.h5` or `epoch=3-step=900.ckpt`; or a name that is a number and nothing else. Where there are several,
//! the one after the word that comes first in `WORDS` counts. A name that says that it is not finished, as
//! `step_100.tmp`, has none.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// What stands before a step, the most exact words first. A longer word that ends in one of them counts like it:
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

/// Words in the name of what is still being written, or kept aside.
const UNFINISHED: [&str; 7] = [
    "tmp",
    "temp",
    "part",
    "partial",
    "incomplete",
    "bak",
    "pruned",
];

/// The step of a checkpoint of this name.
pub fn step_of(name: &OsStr) -> Option<u64> {
    let name = name.as_bytes().to_ascii_lowercase();
    let words: Vec<&[u8]> = split_into_words(&name).collect();
    let is_unfinished = |word: &&[u8]| UNFINISHED.iter().any(|other| other.as_bytes() == *word);
    if name.starts_with(b".") || name.ends_with(b"~") || words.iter().any(is_unfinished) {
        return None;
    }
    if name.iter().all(u8::is_ascii_digit) {
        return number(&name);
    }
    let numbered = words.windows(2).filter_map(|pair| {
        let rank = WORDS
            .iter()
            .position(|words| ends_in_one_of(pair[0], words));
        rank.zip(number(pair[1]))
    });
    // Of equal words the last one counts.
    let best = numbered.reduce(|best, other| if other.0 <= best.0 { other } else { best });
    best.map(|(_, step)| step)
}

/// The step of a checkpoint of this name, also if it is unfinished or kept aside: `step_100.tmp` is to become
/// `step_100`.
pub fn step_of_unfinished(name: &OsStr) -> Option<u64> {
    let name = name.as_bytes().to_ascii_lowercase();
    let words = split_into_words(&name);
    let is_finished = |word: &&[u8]| UNFINISHED.iter().all(|other| other.as_bytes() != *word);
    let left: Vec<&[u8]> = words.filter(is_finished).collect();
    step_of(OsStr::from_bytes(&left.join(&b'_')))
}

/// Runs of letters and runs of digits; all else separates.
fn split_into_words(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    let kind = |byte: &u8| (byte.is_ascii_alphabetic(), byte.is_ascii_digit());
    name.chunk_by(move |a, b| kind(a) == kind(b))
        .filter(|run| run[0].is_ascii_alphanumeric())
}

fn ends_in_one_of(word: &[u8], words: &[&str]) -> bool {
    words.iter().any(|other| word.ends_with(other.as_bytes()))
}

fn number(digits: &[u8]) -> Option<u64> {
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
