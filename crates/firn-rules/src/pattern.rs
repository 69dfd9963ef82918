//! Patterns of paths, compiled to regular expressions over bytes.
//!
//! `*` any characters but `/`, `?` one of them, `[…]` a class, `**` any characters, `{name}` a capture, `|` alternatives.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use regex::bytes::Regex;

/// What a capture may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureKind {
    /// Any characters but `/`, as few as the pattern allows.
    Text,
    /// Digits.
    Integer,
    /// A number, also with a fraction or an exponent.
    Number,
}

/// What is wrong with a pattern, and where.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PatternError {
    /// Bytes before the fault.
    pub(crate) at: usize,
    pub(crate) message: String,
}

/// Values of the captures of a pattern, by their names.
pub(crate) type Captures = BTreeMap<String, Vec<u8>>;

/// Characters of a name.
const NAME: &str = "[^/]";

/// One alternative as a regular expression without anchors.
fn translate(
    text: &str,
    start: usize,
    kinds: &BTreeMap<String, CaptureKind>,
) -> Result<String, PatternError> {
    let mut regex = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let at = start + text.len() - rest.len();
        let fault = |message: &str| PatternError {
            at,
            message: message.to_owned(),
        };
        let mut len = first.len_utf8();
        match first {
            // Also no directory at all.
            '*' if rest.starts_with("**/") => {
                regex.push_str("(?:.*/)?");
                len = 3;
            }
            '*' if rest.starts_with("**") => {
                regex.push_str(".*");
                len = 2;
            }
            '*' => write!(regex, "{NAME}*").expect("a string takes all"),
            '?' => regex.push_str(NAME),
            '[' => {
                let end = rest
                    .find(']')
                    .ok_or_else(|| fault("expected `]` after `[`"))?;
                let class = &rest[1..end];
                let (sign, class) = match class.strip_prefix('!') {
                    Some(class) => ("^", class),
                    None => ("", class),
                };
                if class.is_empty() || class.contains(['[', '\\', '/', '&', '~']) {
                    return Err(fault(
                        "expected characters or ranges of characters in `[…]`",
                    ));
                }
                write!(regex, "[{sign}{class}]").expect("a string takes all");
                len = end + 1;
            }
            '{' => {
                let end = rest
                    .find('}')
                    .ok_or_else(|| fault("expected `}` after `{`"))?;
                let name = &rest[1..end];
                if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
                    return Err(fault("expected letters and digits in `{…}`"));
                }
                let group = format!("(?P<{name}>");
                if regex.contains(&group) {
                    return Err(fault("expected each capture once in a pattern"));
                }
                regex.push_str(&group);
                regex.push_str(match kinds.get(name) {
                    Some(CaptureKind::Integer) => "[0-9]+",
                    Some(CaptureKind::Number) => "[0-9]+(?:\\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
                    Some(CaptureKind::Text) | None => "[^/]+?",
                });
                regex.push(')');
                len = end + 1;
            }
            '}' | ']' => return Err(fault("expected an opening bracket before it")),
            other => regex.push_str(&regex::escape(&other.to_string())),
        }
        rest = &rest[len..];
    }
    Ok(regex)
}

fn compile(pattern: &str) -> Regex {
    let pattern = format!("(?s-u)\\A(?:{pattern})\\z");
    Regex::new(&pattern).expect("made of escaped parts")
}

/// Names of the captures in a text, in their order.
pub(crate) fn capture_names(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('{') {
        let Some((name, next)) = after.split_once('}') else {
            break;
        };
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
        rest = next;
    }
    names
}

/// A regular expression that matches what `expression` does, and captures nothing.
fn without_captures(expression: &str) -> String {
    let mut bare = String::new();
    let mut rest = expression;
    // A `(` of a pattern is escaped, so each of these begins a capture.
    while let Some((before, after)) = rest.split_once("(?P<") {
        bare.push_str(before);
        bare.push_str("(?:");
        rest = after.split_once('>').map_or("", |(_, rest)| rest);
    }
    bare.push_str(rest);
    bare
}

/// A set of alternatives, of which one matches a whole path.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    alternatives: Vec<Regex>,
    /// Names in each of them; 1 where `**` leaves that open.
    depths: Vec<usize>,
    /// One regular expression for all of them, without captures and anchors.
    any: String,
}

/// How a path matches a pattern.
pub(crate) struct PatternMatch {
    pub(crate) captures: Captures,
    /// Names in the alternative that matches.
    pub(crate) depth: usize,
}

impl Pattern {
    /// `prefix` and `suffix` are regular expressions.
    pub(crate) fn new(
        text: &str,
        kinds: &BTreeMap<String, CaptureKind>,
        (prefix, suffix): (&str, &str),
    ) -> Result<Self, PatternError> {
        let mut alternatives = Vec::new();
        let mut bare = Vec::new();
        let mut depths = Vec::new();
        let mut start = 0;
        for one in text.split('|') {
            if one.is_empty() {
                return Err(PatternError {
                    at: start,
                    message: "expected a pattern".to_owned(),
                });
            }
            let regex = translate(one.trim_end_matches('/'), start, kinds)?;
            let regex = format!("{prefix}{regex}{suffix}");
            alternatives.push(compile(&regex));
            bare.push(without_captures(&regex));
            let depth = one.trim_end_matches('/').split('/').count();
            depths.push(if one.contains("**") { 1 } else { depth });
            start += one.len() + 1;
        }
        Ok(Self {
            alternatives,
            depths,
            any: format!("(?:{})", bare.join("|")),
        })
    }

    /// As a part of a larger regular expression.
    pub(crate) fn expression(&self) -> &str {
        &self.any
    }

    /// Whether an alternative has more than one name.
    pub(crate) fn has_directories(&self) -> bool {
        self.depths.iter().any(|depth| *depth > 1)
    }

    pub(crate) fn matches(&self, path: &[u8]) -> bool {
        self.alternatives.iter().any(|one| one.is_match(path))
    }

    /// The captures of the first alternative that matches.
    pub(crate) fn captures(&self, path: &[u8]) -> Option<Captures> {
        self.find(path).map(|found| found.captures)
    }

    /// The first alternative that matches.
    pub(crate) fn find(&self, path: &[u8]) -> Option<PatternMatch> {
        let mut alternatives = self.alternatives.iter().zip(&self.depths);
        alternatives.find_map(|(one, depth)| {
            let found = one.captures(path)?;
            let names = one.capture_names().flatten();
            let values = names.filter_map(|name| {
                let value = found.name(name)?;
                Some((name.to_owned(), value.as_bytes().to_vec()))
            });
            Some(PatternMatch {
                captures: values.collect(),
                depth: *depth,
            })
        })
    }
}
