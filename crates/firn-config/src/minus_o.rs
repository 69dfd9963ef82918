//! Parses the list `-o key=value,key,…` of `firn mount`, mount.firn and fstab.
//!
//! Keys are names of options, with hyphens or underscores. Other words in the list are `ro` and `rw`, flags of the
//! kernel, and words that mount(8) and systemd put there for themselves.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_format::quote::quoted;

use crate::error::ConfigError;
use crate::kernel::{KernelFlag, is_skipped};
use crate::suggest::nearest;
use crate::table::row;
use crate::unchecked_option::{Origin, UncheckedOption};
use crate::value::Kind;

/// The content of a list.
#[derive(Clone, Debug, Default)]
pub struct MinusO {
    /// Options, in the order of the list.
    pub options: Vec<UncheckedOption>,
    /// Flags of the kernel, in the order of the list.
    pub kernel_flags: Vec<KernelFlag>,
    /// Unknown words; filled only with [`Unknown::Tolerate`].
    pub tolerated: Vec<String>,
}

/// What to do with an unknown word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// Fail.
    Refuse,
    /// Note the word and skip it (`mount -s`).
    Tolerate,
}

/// Parses the list after `-o`: options of Firn (`key=value`), flags of the kernel, and words for mount(8) or systemd,
/// which are skipped. So are empty words, as in mount(8). `unknown` says whether any other word is an error.
pub fn parse_minus_o(text: impl AsRef<OsStr>, unknown: Unknown) -> Result<MinusO, ConfigError> {
    let mut parsed = MinusO::default();
    for word in text.as_ref().as_bytes().split(|byte| *byte == b',') {
        let word = word.trim_ascii();
        if word.is_empty() {
            continue;
        }
        // A word that is not UTF-8 can only be an option whose value is a path.
        let text = std::str::from_utf8(word).ok();
        if let Some(flag) = text.and_then(KernelFlag::parse) {
            parsed.kernel_flags.push(flag);
            continue;
        }
        let is_for_mount_or_systemd = text.is_some_and(is_skipped);
        if is_for_mount_or_systemd {
            continue;
        }
        match parse_option(word) {
            Ok(option) => parsed.options.push(option),
            Err(ConfigError::Unknown { .. }) if unknown == Unknown::Tolerate => {
                parsed.tolerated.push(quoted(word));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(parsed)
}

impl MinusO {
    /// Appends the list of a later `-o`.
    pub fn extend(&mut self, later: MinusO) {
        self.options.extend(later.options);
        self.kernel_flags.extend(later.kernel_flags);
        self.tolerated.extend(later.tolerated);
    }
}

/// Parses one word of the list after `-o` as an option: `key=value`, the `key` of a switch, `ro` or `rw`. Fails if the
/// table of all options has no row for the key, or if an option that is no switch lacks a value. The value itself is
/// checked later.
fn parse_option(word: &[u8]) -> Result<UncheckedOption, ConfigError> {
    let (key_bytes, value) = match word.iter().position(|byte| *byte == b'=') {
        Some(equals) => (
            &word[..equals],
            Some(OsStr::from_bytes(&word[equals + 1..])),
        ),
        None => (word, None),
    };
    // This makes a string of any bytes. It changes only unusual characters, which no option's name has.
    let key = quoted(key_bytes);
    let (name, value) = match (key.as_str(), value) {
        ("ro", None) => ("read-only", Some(OsStr::new("yes"))),
        ("rw", None) => ("read-only", Some(OsStr::new("no"))),
        (key, value) => (key, value),
    };
    let Some(option_row) = row(name) else {
        return Err(ConfigError::Unknown {
            origin: Origin::MinusO,
            name: name.to_owned(),
            nearest: nearest(name),
        });
    };
    let text = match (value, option_row.kind) {
        (Some(value), _) => value.to_owned(),
        (None, Kind::Switch) => "yes".into(),
        (None, kind) => {
            let why = format!(
                "lacks a value: write {}={}",
                option_row.name,
                kind.value_name()
            );
            return Err(ConfigError::Value {
                origin: Origin::MinusO,
                name: option_row.name,
                why,
            });
        }
    };
    Ok(UncheckedOption {
        row: option_row,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(parsed: &MinusO) -> Vec<(&str, &str)> {
        parsed
            .options
            .iter()
            .map(|option| (option.row.name, option.text.to_str().unwrap()))
            .collect()
    }

    #[test]
    fn a_list_keeps_its_order_and_takes_underscores() {
        let parsed =
            parse_minus_o("arena_size=1G, close=held,,allow_other", Unknown::Refuse).unwrap();
        assert_eq!(
            names(&parsed),
            [
                ("arena-size", "1G"),
                ("close", "held"),
                ("allow-other", "yes")
            ]
        );
    }

    #[test]
    fn words_of_fstab_are_accepted() {
        let line = "defaults,rw,_netdev,nofail,noauto,auto,user,users,owner,group,x-systemd.automount,\
                    x-systemd.device-timeout=5,nodev,nosuid,noexec,noatime,relatime,comment=mine";
        let parsed = parse_minus_o(line, Unknown::Refuse).unwrap();
        assert_eq!(names(&parsed), [("read-only", "no")]);
        assert_eq!(
            parsed.kernel_flags,
            [
                KernelFlag::NoDev,
                KernelFlag::NoSuid,
                KernelFlag::NoExec,
                KernelFlag::NoAtime
            ]
        );
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_nearest_name_or_tolerated() {
        let error = parse_minus_o("chunksize=4M", Unknown::Refuse).unwrap_err();
        assert_eq!(
            error.to_string(),
            "-o: unknown option `chunksize`, did you mean `chunk-size`?"
        );
        let error = parse_minus_o("qwertyuiop", Unknown::Refuse).unwrap_err();
        assert_eq!(
            error.to_string(),
            "-o: unknown option `qwertyuiop` (`firn config` lists the options)"
        );
        let parsed = parse_minus_o("qwertyuiop,ro", Unknown::Tolerate).unwrap();
        assert_eq!(parsed.tolerated, ["qwertyuiop"]);
        assert_eq!(names(&parsed), [("read-only", "yes")]);
    }

    #[test]
    fn a_path_is_taken_as_it_is_and_nothing_else_may_be_no_text() {
        let list = OsStr::from_bytes(b"spill=/disk/caf\xe9=1,ro");
        let parsed = parse_minus_o(list, Unknown::Refuse).unwrap();
        assert_eq!(parsed.options[0].text.as_bytes(), b"/disk/caf\xe9=1");
        let parse = |option: &str| row(option).unwrap().kind.parse(&parsed.options[0].text);
        let expected = std::path::PathBuf::from(OsStr::from_bytes(b"/disk/caf\xe9=1"));
        assert_eq!(parse("spill"), Ok(crate::value::Value::Directory(expected)));
        assert!(
            parse("host")
                .unwrap_err()
                .contains(r"`/disk/caf\xe9=1` is not"),
            "{:?}",
            parse("host")
        );
        let unknown = parse_minus_o(OsStr::from_bytes(b"\xff=1"), Unknown::Refuse).unwrap_err();
        assert!(
            unknown.to_string().contains(r"unknown option `\xff`"),
            "{unknown}"
        );
    }

    #[test]
    fn a_key_without_its_value_says_how_to_write_it() {
        let error = parse_minus_o("arena-size", Unknown::Refuse).unwrap_err();
        assert_eq!(
            error.to_string(),
            "-o: arena-size: lacks a value: write arena-size=SIZE"
        );
    }
}
