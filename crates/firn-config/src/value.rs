//! Kinds of options: how a value is written, which values are allowed, and the checked value.
//!
//! Each error says what is allowed, in the same words as the help.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use firn_format::quote::{quoted, quoted_path};

use crate::quantity::{duration_text, parse_duration_ms, parse_size, size_text};

/// The kind of an option, with its range.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A number of bytes, from `min` to `max`.
    Size {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
        /// Whether only powers of two are allowed.
        power_of_two: bool,
    },
    /// A time in milliseconds, from `min_ms` to `max_ms`.
    Duration {
        /// Smallest value.
        min_ms: u64,
        /// Largest value.
        max_ms: u64,
    },
    /// A count, from `min` to `max`.
    Count {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
        /// Word that means 0, if there is one.
        zero: Option<&'static str>,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// `yes` or `no`. The option without a value means `yes`.
    Switch,
    /// The absolute path of a directory.
    Directory,
    /// The absolute path of a file or directory.
    Path,
    /// The absolute path of a file or directory, or `off`.
    PathOrOff,
    /// Absolute paths of directories.
    Directories,
    /// Names that the file system below the mount gives its servers.
    Servers,
    /// Patterns for names of files.
    Patterns,
    /// Names of commit rules (they say what is one checkpoint), or absolute paths of files with rules.
    Rules,
    /// The name of one host.
    Host,
    /// A number of hosts, or the names of hosts.
    Hosts,
    /// Addresses of servers, each HOST:PORT.
    Endpoints,
}

/// A checked value: its [`Kind`] allows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Bytes, milliseconds or a count.
    Number(u64),
    /// The index of a word in [`Kind::Choice`].
    Choice(usize),
    /// `yes` or `no`.
    Switch(bool),
    /// The word `off` of [`Kind::PathOrOff`].
    Off,
    /// The path of a file or directory.
    Directory(PathBuf),
    /// Paths of directories, in the given order.
    Directories(Vec<PathBuf>),
    /// Names, addresses or patterns, in the given order.
    Names(Vec<String>),
}

impl Kind {
    /// Parses and checks a value. Only paths may contain bytes that are not UTF-8. The error says what is allowed.
    pub fn parse(&self, text: impl AsRef<OsStr>) -> Result<Value, String> {
        let text = text.as_ref();
        let refused = || format!("`{}` is not {}", quoted(text.as_bytes()), self.allowed());
        match self {
            Kind::PathOrOff if text == "off" => Ok(Value::Off),
            Kind::Directory | Kind::Path | Kind::PathOrOff => {
                if text.as_bytes().starts_with(b"/") {
                    Ok(Value::Directory(PathBuf::from(text)))
                } else {
                    Err(format!("{}: begin it with a slash", refused()))
                }
            }
            Kind::Directories => parse_directories(text).map(Value::Directories),
            _ => match text.to_str() {
                Some(text) => self.parse_text(text),
                None => Err(refused()),
            },
        }
    }

    /// Parses and checks a value that is not a path.
    fn parse_text(&self, text: &str) -> Result<Value, String> {
        match *self {
            Kind::Size {
                min,
                max,
                power_of_two,
            } => {
                let bytes = check_range(parse_size(text)?, min, max, text, size_text)?;
                if power_of_two && !bytes.is_power_of_two() {
                    return Err(format!(
                        "{text} is not a power of two: {} would be",
                        size_text(bytes.next_power_of_two().min(max))
                    ));
                }
                Ok(Value::Number(bytes))
            }
            Kind::Duration { min_ms, max_ms } => check_range(
                parse_duration_ms(text)?,
                min_ms,
                max_ms,
                text,
                duration_text,
            )
            .map(Value::Number),
            Kind::Count {
                zero: Some(word), ..
            } if word == text => Ok(Value::Number(0)),
            Kind::Count { min, max, .. } => {
                let number = text
                    .parse()
                    .map_err(|_| format!("`{text}` is not {}", self.allowed()))?;
                check_range(number, min, max, text, |number| number.to_string()).map(Value::Number)
            }
            Kind::Choice(words) => words
                .iter()
                .position(|word| *word == text)
                .map(Value::Choice)
                .ok_or_else(|| format!("`{text}` is not {}", self.allowed())),
            Kind::Switch => match text {
                "yes" | "true" | "on" | "1" => Ok(Value::Switch(true)),
                "no" | "false" | "off" | "0" => Ok(Value::Switch(false)),
                _ => Err(format!("`{text}` is not yes or no")),
            },
            Kind::Directory | Kind::Path | Kind::PathOrOff | Kind::Directories => {
                unreachable!("paths are not text")
            }
            Kind::Servers => parse_server_names(text).map(Value::Names),
            Kind::Patterns => parse_patterns(text).map(Value::Names),
            Kind::Rules => parse_rules(text).map(Value::Names),
            Kind::Host => check_host_name(text).map(|name| Value::Names(vec![name])),
            Kind::Endpoints => parse_endpoints(text).map(Value::Names),
            Kind::Hosts if text == "off" => Ok(Value::Number(0)),
            Kind::Hosts => match text.parse() {
                Ok(number) => check_range(number, 2, NODES_MAX, text, |number| number.to_string())
                    .map(Value::Number),
                Err(_) => parse_hosts(text).map(Value::Names),
            },
        }
    }

    /// Returns the word that stands for the value in usage lines, such as `--arena-size SIZE`.
    pub fn value_name(&self) -> &'static str {
        match self {
            Kind::Size { .. } => "SIZE",
            Kind::Duration { .. } => "DURATION",
            Kind::Count { .. } => "COUNT",
            Kind::Choice(_) => "WORD",
            Kind::Switch => "yes|no",
            Kind::Directory => "DIR",
            Kind::Path | Kind::PathOrOff => "PATH",
            Kind::Directories => "DIR:DIR",
            Kind::Servers => "NAME:NAME",
            Kind::Patterns => "PATTERN:PATTERN",
            Kind::Rules => "RULE:RULE",
            Kind::Host => "NAME",
            Kind::Hosts => "COUNT|NAME:NAME",
            Kind::Endpoints => "HOST:PORT+HOST:PORT",
        }
    }

    /// Describes the allowed values, for help and errors.
    pub fn allowed(&self) -> String {
        match *self {
            Kind::Size {
                min,
                max,
                power_of_two,
            } => {
                let shape = if power_of_two {
                    "a power of two"
                } else {
                    "a size"
                };
                format!("{shape} from {} to {}", size_text(min), size_text(max))
            }
            Kind::Duration { min_ms, max_ms } => {
                format!(
                    "a duration from {} to {}",
                    duration_text(min_ms),
                    duration_text(max_ms)
                )
            }
            Kind::Count {
                min,
                max,
                zero: Some(word),
            } => {
                format!("`{word}` or a number from {} to {max}", min.max(1))
            }
            Kind::Count {
                min,
                max,
                zero: None,
            } => format!("a number from {min} to {max}"),
            Kind::Choice(words) => words
                .iter()
                .map(|word| format!("`{word}`"))
                .collect::<Vec<_>>()
                .join(" or "),
            Kind::Switch => "`yes` or `no`".to_owned(),
            Kind::Directory | Kind::Path => "an absolute path".to_owned(),
            Kind::PathOrOff => "an absolute path or `off`".to_owned(),
            Kind::Directories => {
                format!("up to {DIRECTORIES_MAX} absolute paths with colons between them")
            }
            Kind::Servers => format!(
                "up to {DIRECTORIES_MAX} names of up to {NAME_BYTES_MAX} letters, digits, `.`, `-` and `_`, with colons \
                 between them"
            ),
            Kind::Patterns => {
                format!("up to {PATTERNS_MAX} patterns of names with colons between them")
            }
            Kind::Rules => format!(
                "up to {PATTERNS_MAX} names of commit rules, or absolute paths of files of rules, with colons between them"
            ),
            Kind::Host => format!("up to {NAME_BYTES_MAX} letters, digits, `.`, `-` and `_`"),
            Kind::Hosts => {
                format!(
                    "`off`, a number from 2 to {NODES_MAX}, or the names of hosts with colons between them"
                )
            }
            Kind::Endpoints => {
                format!("up to {ENDPOINTS_MAX} of HOST:PORT with `+` between them")
            }
        }
    }
}

/// Largest number of directories or servers in a list. Firn opens and asks each of them.
const DIRECTORIES_MAX: usize = 1024;
/// Largest number of patterns or rules in a list. Each new name is compared with all of them.
const PATTERNS_MAX: usize = 64;
/// Largest number of hosts that can commit together.
const NODES_MAX: u64 = 65536;
/// Largest number of addresses of servers in a list.
const ENDPOINTS_MAX: usize = 16;
/// Length of the longest name of a host or server, limited because it becomes a part of file names.
const NAME_BYTES_MAX: usize = 64;

/// Parses directories with colons between them; each must be absolute and occur once.
fn parse_directories(text: &OsStr) -> Result<Vec<PathBuf>, String> {
    let mut directories: Vec<PathBuf> = Vec::new();
    for path in text.as_bytes().split(|byte| *byte == b':') {
        if !path.starts_with(b"/") {
            return Err(format!(
                "`{}` is not an absolute path: begin each directory with a slash, with colons between them",
                quoted(path)
            ));
        }
        let path = PathBuf::from(OsStr::from_bytes(path));
        if directories.contains(&path) {
            return Err(format!("{} is in the list twice", quoted_path(&path)));
        }
        directories.push(path);
    }
    check_count(directories.len(), DIRECTORIES_MAX, "directories")?;
    Ok(directories)
}

/// Checks the length of a list. `noun` says what its items are.
fn check_count(count: usize, count_max: usize, noun: &str) -> Result<(), String> {
    if count > count_max {
        return Err(format!(
            "{count} {noun} are too many: at most {count_max} are allowed"
        ));
    }
    Ok(())
}

/// Parses names of servers with colons between them; each must occur once.
fn parse_server_names(text: &str) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    for name in text.split(':') {
        let name = check_name(name, "a server")?;
        if names.contains(&name) {
            return Err(format!("`{name}` is in the list twice"));
        }
        names.push(name);
    }
    check_count(names.len(), DIRECTORIES_MAX, "servers")?;
    Ok(names)
}

/// Parses patterns for names of files (globs), with colons between them, and checks that each can be compiled.
fn parse_patterns(text: &str) -> Result<Vec<String>, String> {
    let mut patterns: Vec<String> = Vec::new();
    for pattern in text.split(':') {
        if pattern.is_empty() {
            return Err(format!("`{text}` has an empty pattern"));
        }
        if pattern.contains('/') {
            return Err(format!(
                "`{pattern}` has a slash: patterns are compared with names, without directories"
            ));
        }
        globset::Glob::new(pattern).map_err(|error| format!("`{pattern}`: {}", error.kind()))?;
        patterns.push(pattern.to_owned());
    }
    check_count(patterns.len(), PATTERNS_MAX, "patterns")?;
    Ok(patterns)
}

/// Parses a list of commit rules with colons or commas between them: names, or absolute paths of files with rules.
/// Whether a rule of a name exists is checked later, at the mount.
fn parse_rules(text: &str) -> Result<Vec<String>, String> {
    let is_letter_of_name =
        |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
    let mut rules: Vec<String> = Vec::new();
    for word in text.split([':', ',']) {
        let is_file = word.starts_with('/');
        let is_name = !word.is_empty() && word.chars().all(is_letter_of_name);
        if !is_file && !is_name {
            return Err(format!(
                "`{word}` is neither the name of a rule nor the absolute path of a file of rules: `firn rules list` shows the names"
            ));
        }
        if rules.iter().any(|rule| rule == word) {
            return Err(format!("`{word}` is in the list twice"));
        }
        rules.push(word.to_owned());
    }
    check_count(rules.len(), PATTERNS_MAX, "rules")?;
    Ok(rules)
}

/// Checks the name of one host.
fn check_host_name(text: &str) -> Result<String, String> {
    check_name(text, "a host")
}

/// Checks a name that Firn will use in file names and in arguments of programs. `owner` is the noun for the error: what
/// kind of thing has the name.
fn check_name(text: &str, owner: &str) -> Result<String, String> {
    let is_allowed =
        |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.chars().all(is_allowed) {
        return Err(format!(
            "`{text}` is not the name of {owner}: a name has {}",
            Kind::Host.allowed()
        ));
    }
    Ok(text.to_owned())
}

/// Parses two or more names of hosts with colons between them; each must occur once.
fn parse_hosts(text: &str) -> Result<Vec<String>, String> {
    let names: Vec<String> = text
        .split(':')
        .map(check_host_name)
        .collect::<Result<_, _>>()?;
    for (index, name) in names.iter().enumerate() {
        if names[..index].contains(name) {
            return Err(format!("`{text}` has {name} twice"));
        }
    }
    if names.len() < 2 {
        return Err(format!(
            "`{text}` is only one host: name two or more, or write off"
        ));
    }
    Ok(names)
}

/// Parses addresses of servers with `+` between them.
fn parse_endpoints(text: &str) -> Result<Vec<String>, String> {
    let endpoints: Vec<String> = text
        .split('+')
        .map(parse_endpoint)
        .collect::<Result<_, _>>()?;
    check_count(endpoints.len(), ENDPOINTS_MAX, "endpoints")?;
    Ok(endpoints)
}

/// Parses one address, HOST:PORT. A scheme `http://` before it and slashes after it are removed.
fn parse_endpoint(text: &str) -> Result<String, String> {
    if text.starts_with("https://") {
        return Err(format!(
            "`{text}` is HTTPS, which Firn cannot use: give the address of a proxy on this host"
        ));
    }
    let without_scheme = text.strip_prefix("http://").unwrap_or(text);
    let address = without_scheme.trim_end_matches('/');
    if has_host_and_port(address) {
        Ok(address.to_owned())
    } else {
        Err(format!("`{text}` is not HOST:PORT"))
    }
}

/// Whether an address has the form HOST:PORT, with a port other than 0.
fn has_host_and_port(address: &str) -> bool {
    let is_allowed = |letter: char| {
        letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_' | ':' | '[' | ']')
    };
    let Some((host, port)) = address.rsplit_once(':') else {
        return false;
    };
    let has_valid_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    !host.is_empty() && has_valid_port && address.chars().all(is_allowed)
}

/// Returns `number` if it is from `min` to `max`. For the error, `text` is the number as the user wrote it, and
/// `format_bound` formats the bounds.
fn check_range(
    number: u64,
    min: u64,
    max: u64,
    text: &str,
    format_bound: fn(u64) -> String,
) -> Result<u64, String> {
    if (min..=max).contains(&number) {
        return Ok(number);
    }
    Err(format!(
        "{text} is out of range: it may be {} to {}",
        format_bound(min),
        format_bound(max)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_of_names_and_can_be_read() {
        let parsed = Kind::Patterns.parse("*.h5:ckpt_[0-9]*:{a,b}?");
        let expected = ["*.h5", "ckpt_[0-9]*", "{a,b}?"];
        assert_eq!(parsed, Ok(Value::Names(expected.map(str::to_owned).into())));
        for (text, why) in [
            ("", "empty"),
            ("*.h5:", "empty"),
            ("out/*.h5", "slash"),
            ("[a", "unclosed"),
            ("{a", "alternate"),
        ] {
            let error = Kind::Patterns.parse(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
        let many = ["a"; 65].join(":");
        assert!(Kind::Patterns.parse(&many).is_err());
    }

    #[test]
    fn endpoints_are_addresses_with_a_port() {
        let parsed = Kind::Endpoints.parse("http://etcd1:2379/+10.0.0.7:2379+[fd00::1]:2379");
        let expected = ["etcd1:2379", "10.0.0.7:2379", "[fd00::1]:2379"];
        assert_eq!(parsed, Ok(Value::Names(expected.map(str::to_owned).into())));
        for (text, why) in [
            ("https://etcd1:2379", "HTTPS"),
            ("etcd1", "HOST:PORT"),
            ("etcd1:0", "HOST:PORT"),
            ("etcd1:65536", "HOST:PORT"),
            (":2379", "HOST:PORT"),
            ("user@etcd1:2379", "HOST:PORT"),
            ("etcd1:2379/v3", "HOST:PORT"),
            ("etcd1:2379+", "HOST:PORT"),
            ("", "HOST:PORT"),
        ] {
            let error = Kind::Endpoints.parse(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
        let many = ["a:1"; 17].join("+");
        assert!(Kind::Endpoints.parse(&many).is_err());
    }
}
