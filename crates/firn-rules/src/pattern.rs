//! Patterns for paths in commit rules (which files are one checkpoint), compiled to regular expressions over bytes.
//!
//! The syntax: `*` matches any characters but `/`, `?` one such character, `[…]` a class of characters, and `**` any
//! characters. `{name}` is a capture, and `|` separates alternatives.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use regex::bytes::Regex;

/// The kind of text that a capture matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureKind {
    /// Any characters but `/`, as few as the pattern allows.
    Text,
    /// Decimal digits.
    Integer,
    /// A number, which may have a fraction or an exponent.
    Number,
}

/// An error in a pattern, with its position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PatternError {
    /// Number of bytes before the error.
    pub(crate) offset: usize,
    pub(crate) message: String,
}

/// Values of the captures of a pattern, by name.
pub(crate) type Captures = BTreeMap<String, Vec<u8>>;

/// Regular expression for one character of a file name.
const NAME_CHARACTER: &str = "[^/]";

/// Translates one alternative of a pattern for paths to a regular expression without anchors. `start` is the position
/// of the alternative in its pattern, for the positions of errors. `kinds` are the kinds of text that captures match.
fn translate_alternative(
    text: &str,
    start: usize,
    kinds: &BTreeMap<String, CaptureKind>,
) -> Result<String, PatternError> {
    let mut regex = String::new();
    let mut remaining = text;
    while let Some(first) = remaining.chars().next() {
        let offset = start + text.len() - remaining.len();
        let error = |message: &str| PatternError {
            offset,
            message: message.to_owned(),
        };
        let mut len = first.len_utf8();
        match first {
            // `**/` also matches the empty string: no directory at all.
            '*' if remaining.starts_with("**/") => {
                regex.push_str("(?:.*/)?");
                len = "**/".len();
            }
            '*' if remaining.starts_with("**") => {
                regex.push_str(".*");
                len = "**".len();
            }
            '*' => write!(regex, "{NAME_CHARACTER}*").expect("a string takes all"),
            '?' => regex.push_str(NAME_CHARACTER),
            '[' => {
                let end = remaining
                    .find(']')
                    .ok_or_else(|| error("expected `]` after `[`"))?;
                let class = translate_class(&remaining[1..end]).map_err(error)?;
                regex.push_str(&class);
                len = end + 1;
            }
            '{' => {
                let end = remaining
                    .find('}')
                    .ok_or_else(|| error("expected `}` after `{`"))?;
                let capture =
                    translate_capture(&remaining[1..end], &regex, kinds).map_err(error)?;
                regex.push_str(&capture);
                len = end + 1;
            }
            '}' | ']' => return Err(error("expected an opening bracket before it")),
            literal => regex.push_str(&regex::escape(&literal.to_string())),
        }
        remaining = &remaining[len..];
    }
    Ok(regex)
}

/// Translates the text between `[` and `]`, a class of characters. The error is a message.
fn translate_class(class: &str) -> Result<String, &'static str> {
    let (negation, characters) = match class.strip_prefix('!') {
        Some(characters) => ("^", characters),
        None => ("", class),
    };
    if characters.is_empty() || characters.contains(['[', '\\', '/', '&', '~']) {
        return Err("expected characters or ranges of characters in `[…]`");
    }
    Ok(format!("[{negation}{characters}]"))
}

/// Translates a capture of a pattern, `{name}`, to a group of a regular expression. `regex` is the expression before
/// the capture, and `kinds` says what text each capture matches. The error is a message.
fn translate_capture(
    name: &str,
    regex: &str,
    kinds: &BTreeMap<String, CaptureKind>,
) -> Result<String, &'static str> {
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err("expected letters and digits in `{…}`");
    }
    let group = format!("(?P<{name}>");
    if regex.contains(&group) {
        return Err("expected each capture once in a pattern");
    }
    let text = match kinds.get(name) {
        Some(CaptureKind::Integer) => "[0-9]+",
        Some(CaptureKind::Number) => "[0-9]+(?:\\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
        Some(CaptureKind::Text) | None => "[^/]+?",
    };
    Ok(format!("{group}{text})"))
}

/// Compiles a regular expression that matches whole paths.
fn compile(pattern: &str) -> Regex {
    let pattern = format!("(?s-u)\\A(?:{pattern})\\z");
    Regex::new(&pattern).expect("all parts are escaped")
}

/// Returns the names of the captures in a text, in their order.
pub(crate) fn capture_names(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut remaining = text;
    while let Some((_, from_name)) = remaining.split_once('{') {
        let Some((name, after_name)) = from_name.split_once('}') else {
            break;
        };
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
        remaining = after_name;
    }
    names
}

/// Returns a regular expression that matches the same as `expression` and captures nothing.
fn without_captures(expression: &str) -> String {
    let mut bare = String::new();
    let mut remaining = expression;
    // A literal `(` of a pattern is escaped, so each `(?P<` begins a capture.
    while let Some((before_capture, from_name)) = remaining.split_once("(?P<") {
        bare.push_str(before_capture);
        bare.push_str("(?:");
        remaining = from_name.split_once('>').map_or("", |(_name, after)| after);
    }
    bare.push_str(remaining);
    bare
}

/// A set of alternatives. A path matches if one alternative matches the whole path.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    alternatives: Vec<Regex>,
    /// Number of path components of each alternative. The value is 1 for an alternative with `**`, whose number is
    /// not fixed.
    depths: Vec<usize>,
    /// One regular expression for all alternatives, without captures and anchors.
    all_alternatives: String,
}

/// The match of a path with a pattern.
pub(crate) struct PatternMatch {
    pub(crate) captures: Captures,
    /// Number of path components in the alternative that matches.
    pub(crate) depth: usize,
}

impl Pattern {
    /// Compiles a pattern for paths to regular expressions: one for each of its alternatives, which `|` separates, and
    /// one without captures for all of them together.
    ///
    /// `prefix` is a regular expression that precedes each alternative. `kinds` says what text each capture `{name}`
    /// matches.
    pub(crate) fn new(
        text: &str,
        kinds: &BTreeMap<String, CaptureKind>,
        prefix: &str,
    ) -> Result<Self, PatternError> {
        let mut alternatives = Vec::new();
        let mut bare_expressions = Vec::new();
        let mut depths = Vec::new();
        let mut start = 0;
        for alternative in text.split('|') {
            if alternative.is_empty() {
                return Err(PatternError {
                    offset: start,
                    message: "expected a pattern".to_owned(),
                });
            }
            let path = alternative.trim_end_matches('/');
            let expression = format!("{prefix}{}", translate_alternative(path, start, kinds)?);
            alternatives.push(compile(&expression));
            bare_expressions.push(without_captures(&expression));
            // The number of path components that the alternative matches; 1 if it varies.
            depths.push(if alternative.contains("**") {
                1
            } else {
                path.split('/').count()
            });
            start += alternative.len() + 1;
        }
        Ok(Self {
            alternatives,
            depths,
            all_alternatives: format!("(?:{})", bare_expressions.join("|")),
        })
    }

    /// Returns the regular expression of the pattern, for use in a larger expression.
    pub(crate) fn expression(&self) -> &str {
        &self.all_alternatives
    }

    /// Returns whether an alternative has more than one path component.
    pub(crate) fn has_directories(&self) -> bool {
        self.depths.iter().any(|depth| *depth > 1)
    }

    pub(crate) fn matches(&self, path: &[u8]) -> bool {
        self.alternatives
            .iter()
            .any(|alternative| alternative.is_match(path))
    }

    /// Returns the captures of the first alternative that matches.
    pub(crate) fn captures(&self, path: &[u8]) -> Option<Captures> {
        self.find(path).map(|found| found.captures)
    }

    /// Returns the first alternative that matches, with its captures.
    pub(crate) fn find(&self, path: &[u8]) -> Option<PatternMatch> {
        for (alternative, &depth) in self.alternatives.iter().zip(&self.depths) {
            let Some(groups) = alternative.captures(path) else {
                continue;
            };
            let mut captures = Captures::new();
            for name in alternative.capture_names().flatten() {
                if let Some(value) = groups.name(name) {
                    captures.insert(name.to_owned(), value.as_bytes().to_vec());
                }
            }
            return Some(PatternMatch { captures, depth });
        }
        None
    }
}
