//! Parser of commit rules, one rule on each line: which files are one checkpoint (the *scope*), which change completes
//! it (the *event*), and which files it needs.
//!
//! ```text
//! # name   scope          commit                       needs and other words
//! hf       checkpoint-*/  close:trainer_state.json     rng_state*.pth=writers
//! lammps   restart.{T}.*  next                         T=number *=same
//! ```
//!
//! An error message has the line, the column, the expected text and the nearest valid word.

use std::collections::BTreeMap;
use std::fmt;

use crate::pattern::{CaptureKind, Captures, Pattern, PatternError, PatternMatch, capture_names};

/// The event that makes a scope complete.
#[derive(Clone, Debug)]
pub(crate) enum RuleEvent {
    /// The last descriptor for writing of a file is closed.
    Close(EventTarget),
    /// A file or directory is renamed to a name.
    Rename(EventTarget),
    /// A name is removed.
    Unlink(EventTarget),
    /// The first change in another scope of the rule, or the successful end of all writers.
    Next,
    /// The last descriptor for writing in the scope is closed.
    Idle,
}

/// The subject of an event.
#[derive(Clone, Debug)]
pub(crate) enum EventTarget {
    /// The scope itself: its top is renamed.
    Itself,
    /// A path in the scope.
    Inside(Pattern),
    /// A name beside the scope.
    Beside(Pattern),
}

/// The number of files that a condition requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequiredCount {
    /// One file for each process that writes in the scope, or wrote in the previous scope.
    Writers,
    /// As many files as the previous scope had.
    Same,
    /// Every file that the scope had before it began must have been created or written again.
    Renewed,
    Number(usize),
}

/// A condition of a commit.
#[derive(Clone, Debug)]
pub(crate) struct Condition {
    pub(crate) text: String,
    pub(crate) files: Pattern,
    pub(crate) count: RequiredCount,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Name of the rule.
    pub name: String,
    /// Text of the rule in its source.
    pub text: String,
    pub(crate) scope: ScopePattern,
    pub(crate) event: RuleEvent,
    pub(crate) needs: Vec<Condition>,
    /// Number of complete checkpoints that are kept; `None` if all are kept.
    pub(crate) keep: Option<usize>,
}

/// Pattern of the paths that belong to a scope.
#[derive(Clone, Debug)]
pub(crate) struct ScopePattern {
    pub(crate) is_dir: bool,
    /// Pattern of the top names of scopes.
    tops: Pattern,
    has_captures: bool,
    /// For a scope that is a directory: the names in it that begin the scope; `None` if every name does.
    begins: Option<Pattern>,
}

/// The scope that contains a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundScope {
    /// The directory that contains the tops of the scope.
    pub(crate) dir: Vec<u8>,
    /// The top directory or file of the scope. The path is this top or lies in it.
    pub(crate) top: Vec<u8>,
    pub(crate) identity: ScopeIdentity,
}

/// Distinguishes the scopes of one rule in one directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ScopeIdentity {
    /// The path of the top.
    Path(Vec<u8>),
    /// The values of the captures.
    Captures(Captures),
}

impl FoundScope {
    /// Returns the step of the scope: the value of its only capture; otherwise the last number in its name.
    pub(crate) fn step(&self) -> Option<String> {
        if let ScopeIdentity::Captures(captures) = &self.identity
            && let [value] = captures.values().collect::<Vec<_>>()[..]
        {
            return Some(String::from_utf8_lossy(value).into_owned());
        }
        let name = relative(&self.top, parent_of(&self.top))?;
        let last_digit = name.iter().rposition(u8::is_ascii_digit)?;
        let up_to_digits = &name[..=last_digit];
        let start = match up_to_digits.iter().rposition(|byte| !byte.is_ascii_digit()) {
            Some(byte_before) => byte_before + 1,
            None => 0,
        };
        Some(String::from_utf8_lossy(&up_to_digits[start..]).into_owned())
    }
}

/// Returns the directory of a path. The result is empty for the root of the mount.
pub fn parent_of(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
    &path[..end]
}

/// Returns `path` relative to `dir`. Returns `None` if the path is not below the directory.
pub(crate) fn relative<'a>(path: &'a [u8], dir: &[u8]) -> Option<&'a [u8]> {
    if dir.is_empty() {
        return Some(path);
    }
    path.strip_prefix(dir)?.strip_prefix(b"/")
}

impl ScopePattern {
    /// Returns the scope (the files of one checkpoint) that contains `path`; `None` if the rule does not concern the
    /// path. If several scopes match, the outermost one is returned.
    ///
    /// For example, the pattern `step{T}/` assigns `step10/rank0.pt` to the scope with the name `step10`.
    pub(crate) fn find(&self, path: &[u8]) -> Option<FoundScope> {
        // With the option `begins=`, a directory is a scope only if it has a file that matches the option. The scope is
        // therefore found only from the path of such a file.
        if let Some(begins) = &self.begins {
            let top = parent_of(path);
            let name = relative(path, top)?;
            if top.is_empty() || !begins.matches(name) {
                return None;
            }
            return self.scope_with_top(top);
        }
        if !self.is_dir {
            return self.scope_with_top(path);
        }
        // The directories above the path, the outermost first, and the path itself.
        for (index, byte) in path.iter().enumerate() {
            if *byte == b'/'
                && let Some(scope) = self.scope_with_top(&path[..index])
            {
                return Some(scope);
            }
        }
        self.scope_with_top(path)
    }

    /// Returns a regular expression for each path for which [`ScopePattern::find`] returns a scope.
    fn expression(&self) -> String {
        let tops = self.tops.expression();
        match &self.begins {
            Some(begins) => format!("{tops}/{}", begins.expression()),
            None if self.is_dir => format!("{tops}(?:/.*)?"),
            None => tops.to_owned(),
        }
    }

    pub(crate) fn has_captures(&self) -> bool {
        self.has_captures
    }

    /// Returns whether one checkpoint may span several directories, as with `processor*/{T}/`.
    pub(crate) fn is_wide(&self) -> bool {
        self.has_captures && self.tops.has_directories()
    }

    /// Returns the scope (the files of one checkpoint) of this path, if the whole path matches the rule's pattern.
    /// Returns `None` otherwise.
    ///
    /// Without captures (variable parts such as `{N}`), each matching path is a scope. With captures, all paths with
    /// the same values are one scope, as `step{N}.model` and `step{N}.optimizer`. Such a scope has several tops (names
    /// in its directory).
    fn scope_with_top(&self, top: &[u8]) -> Option<FoundScope> {
        let PatternMatch { captures, depth } = self.tops.find(top)?;
        if !self.has_captures {
            return Some(FoundScope {
                dir: parent_of(top).to_vec(),
                top: top.to_vec(),
                identity: ScopeIdentity::Path(top.to_vec()),
            });
        }
        // The pattern may match several components (`depth`), as `step{N}/rank*`. The first of them is the top, so all
        // tops of a scope are in one directory.
        let parents_to_top = depth - 1;
        let top = (0..parents_to_top).fold(top, |path, _| parent_of(path));
        Some(FoundScope {
            dir: parent_of(top).to_vec(),
            top: top.to_vec(),
            identity: ScopeIdentity::Captures(captures),
        })
    }
}

impl Rule {
    /// Returns the number of complete checkpoints that are kept; `None` if all are kept.
    pub fn keep(&self) -> Option<usize> {
        self.keep
    }

    /// Returns the pattern of names beside a scope that the event concerns.
    pub(crate) fn marker(&self) -> Option<&Pattern> {
        match &self.event {
            RuleEvent::Close(EventTarget::Beside(names))
            | RuleEvent::Rename(EventTarget::Beside(names))
            | RuleEvent::Unlink(EventTarget::Beside(names)) => Some(names),
            _ => None,
        }
    }

    /// Returns a regular expression for all paths that the rule may concern.
    pub(crate) fn expression(&self) -> String {
        let scopes = self.scope.expression();
        match self.marker() {
            Some(names) => format!("{scopes}|(?:.*/)?{}", names.expression()),
            None => scopes,
        }
    }
}

/// An error in a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuleError {
    /// Name of the file, or a text that names the built-in rules.
    pub source_name: String,
    /// Line number, counted from 1.
    pub line: usize,
    /// Column in bytes, counted from 1.
    pub column: usize,
    /// The expected text and the text that was found.
    pub message: String,
    /// The nearest valid word. `None` if no word is near.
    pub nearest: Option<String>,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            source_name,
            line,
            column,
            message,
            nearest,
        } = self;
        write!(f, "{source_name}:{line}:{column}: {message}")?;
        match nearest {
            Some(word) => write!(f, "; did you mean `{word}`?"),
            None => Ok(()),
        }
    }
}

/// Returns the entry of `words` that is most similar to `word`; `None` if no entry is similar enough to be a
/// suggestion.
pub(crate) fn nearest<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let (distance, candidate) = words
        .into_iter()
        .map(|candidate| (strsim::levenshtein(word, candidate), candidate))
        .min_by_key(|(distance, _)| *distance)?;
    let distance_max = 1 + candidate.len() / 4;
    (distance <= distance_max).then(|| candidate.to_owned())
}

/// A word of a line.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    /// Number of bytes before the word in the line.
    offset: usize,
}

/// Parser for one line, with the position of the line for errors.
struct LineParser<'a> {
    source_name: &'a str,
    /// Line number, counted from 1.
    line: usize,
}

impl LineParser<'_> {
    /// Makes an error for the text that is `offset` bytes after the start of the line.
    fn error(
        &self,
        offset: usize,
        message: impl Into<String>,
        nearest: Option<String>,
    ) -> RuleError {
        RuleError {
            source_name: self.source_name.to_owned(),
            line: self.line,
            column: offset + 1,
            message: message.into(),
            nearest,
        }
    }

    /// Compiles the pattern in a word. `kinds` are the kinds of the scope's captures. `prefix` is the regular
    /// expression before the pattern.
    fn compile_pattern(
        &self,
        word: Word<'_>,
        kinds: &BTreeMap<String, CaptureKind>,
        prefix: &str,
    ) -> Result<Pattern, RuleError> {
        Pattern::new(word.text, kinds, prefix).map_err(|PatternError { offset, message }| {
            self.error(word.offset + offset, message, None)
        })
    }

    /// Parses a line of the rule language: name, scope, event and options. Returns `None` if the line has only a
    /// comment or nothing. An error names the position and what was expected.
    fn parse_rule(&self, line: &str) -> Result<Option<Rule>, RuleError> {
        let code = line.split_once('#').map_or(line, |(code, _)| code);
        let words: Vec<Word<'_>> = code
            .split_ascii_whitespace()
            .map(|text| Word {
                text,
                offset: text.as_ptr() as usize - line.as_ptr() as usize,
            })
            .collect();
        let Some((name, after_name)) = words.split_first() else {
            return Ok(None);
        };
        let end = code.trim_end().len();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if !name.text.chars().all(is_name) {
            return Err(self.error(
                name.offset,
                "expected a name of letters, digits, `-` and `_`",
                None,
            ));
        }
        let Some((scope, after_scope)) = after_name.split_first() else {
            return Err(self.error(end, "expected a scope, as `checkpoint-*/` or `*.pt`", None));
        };
        let Some((event, options)) = after_scope.split_first() else {
            return Err(self.error(end, format!("expected {EVENTS} after the scope"), None));
        };
        let kinds = self.capture_kinds(*scope, options)?;
        let scope_pattern = self.parse_scope(*scope, options, &kinds)?;
        let names = capture_names(scope.text);
        let event = self.parse_event(*event, scope_pattern.is_dir, &names, &kinds)?;
        let mut rule = Rule {
            name: name.text.to_owned(),
            text: code.trim().to_owned(),
            scope: scope_pattern,
            event,
            needs: Vec::new(),
            keep: None,
        };
        for option in options {
            self.parse_option(*option, &names, &mut rule)?;
        }
        Ok(Some(rule))
    }

    /// Parses the scope of a rule: the pattern of the files that are one checkpoint. `options` are the words after the
    /// event, of which `begins=` belongs to the scope.
    ///
    /// A capture is a variable part of a pattern, such as `{N}`. `kinds` says for each capture what it matches, such as
    /// a number.
    fn parse_scope(
        &self,
        scope: Word<'_>,
        options: &[Word<'_>],
        kinds: &BTreeMap<String, CaptureKind>,
    ) -> Result<ScopePattern, RuleError> {
        let is_dir = self.is_dir_scope(scope)?;
        let begins_word = self.begins_word(options, is_dir)?;
        // A pattern without a leading slash matches at any depth.
        let (text, prefix) = match scope.text.strip_prefix('/') {
            Some(text) => (text, NO_PREFIX),
            None => (scope.text, AT_ANY_DEPTH),
        };
        // Errors name positions in the line, so a removed slash shifts the offset.
        let slash_bytes = scope.text.len() - text.len();
        let tops_word = Word {
            text,
            offset: scope.offset + slash_bytes,
        };
        let tops = self.compile_pattern(tops_word, kinds, prefix)?;
        let begins = match begins_word {
            Some(word) => Some(self.compile_pattern(word, kinds, NO_PREFIX)?),
            None => None,
        };
        Ok(ScopePattern {
            is_dir,
            tops,
            has_captures: !capture_names(text).is_empty(),
            begins,
        })
    }

    /// Returns the value of the option `begins=`, a pattern for the files with which a checkpoint begins. Returns
    /// `None` if there is no such word. Fails unless the rule's scope is a directory.
    fn begins_word<'a>(
        &self,
        options: &[Word<'a>],
        is_dir: bool,
    ) -> Result<Option<Word<'a>>, RuleError> {
        for option in options {
            let Some(text) = option.text.strip_prefix("begins=") else {
                continue;
            };
            let offset = option.offset + "begins=".len();
            if !is_dir {
                let message = "expected `begins=` only where the scope is a directory";
                return Err(self.error(offset, message, None));
            }
            return Ok(Some(Word { text, offset }));
        }
        Ok(None)
    }

    /// Returns whether the scope consists of directories. Fails if some alternatives are directories and others are
    /// files.
    fn is_dir_scope(&self, scope: Word<'_>) -> Result<bool, RuleError> {
        let first = scope.text.split('|').next().unwrap_or_default();
        let is_dir = first.ends_with('/');
        let mut offset = scope.offset;
        for alternative in scope.text.split('|') {
            if alternative.ends_with('/') != is_dir {
                let message = "expected only directories (`name/`) or only files in one scope";
                return Err(self.error(offset, message, None));
            }
            offset += alternative.len() + 1;
        }
        Ok(is_dir)
    }

    /// Parses words such as `T=number`, which set the kind of text that the capture `{T}` in the scope's pattern
    /// matches. Returns the kind of each capture; without such a word it is `text`.
    fn capture_kinds(
        &self,
        scope: Word<'_>,
        options: &[Word<'_>],
    ) -> Result<BTreeMap<String, CaptureKind>, RuleError> {
        let mut kinds = BTreeMap::new();
        for name in capture_names(scope.text) {
            let kind_word = options.iter().find_map(|option| {
                let text = option.text.strip_prefix(&name)?.strip_prefix('=')?;
                let offset = option.offset + name.len() + 1;
                Some(Word { text, offset })
            });
            let kind = match kind_word {
                Some(word) => self.parse_capture_kind(word)?,
                None => CaptureKind::Text,
            };
            kinds.insert(name, kind);
        }
        Ok(kinds)
    }

    /// Parses the kind of a capture.
    fn parse_capture_kind(&self, word: Word<'_>) -> Result<CaptureKind, RuleError> {
        match word.text {
            "text" => Ok(CaptureKind::Text),
            "number" => Ok(CaptureKind::Number),
            "integer" => Ok(CaptureKind::Integer),
            unknown => {
                let message = format!("expected `integer`, `number` or `text`, found `{unknown}`");
                let valid = ["integer", "number", "text"];
                Err(self.error(word.offset, message, nearest(unknown, valid)))
            }
        }
    }

    /// Parses the event of a rule, the change that completes a checkpoint. `is_dir` says whether the scope is a
    /// directory.
    ///
    /// A capture is a variable part of a pattern, such as `{N}`. `names` are the captures of the scope, the only ones
    /// that the event may use. `kinds` says for each of them what it matches, such as a number.
    fn parse_event(
        &self,
        word: Word<'_>,
        is_dir: bool,
        names: &[String],
        kinds: &BTreeMap<String, CaptureKind>,
    ) -> Result<RuleEvent, RuleError> {
        let Some((kind, target)) = word.text.split_once(':') else {
            return match word.text {
                "next" => Ok(RuleEvent::Next),
                "idle" => Ok(RuleEvent::Idle),
                unknown => {
                    let valid = ["next", "idle", "close", "rename", "unlink"];
                    let message = format!("expected {EVENTS}, found `{unknown}`");
                    Err(self.error(word.offset, message, nearest(unknown, valid)))
                }
            };
        };
        let event_on = match kind {
            "close" => RuleEvent::Close,
            "rename" => RuleEvent::Rename,
            "unlink" => RuleEvent::Unlink,
            unknown => {
                let message = format!("expected `close`, `rename` or `unlink`, found `{unknown}`");
                let nearest = nearest(unknown, ["close", "rename", "unlink"]);
                return Err(self.error(word.offset, message, nearest));
            }
        };
        let target_word = Word {
            text: target,
            offset: word.offset + kind.len() + 1,
        };
        let target = self.parse_event_target(target_word, is_dir, names, kinds)?;
        Ok(event_on(target))
    }

    /// Parses the file or directory that the event of a rule concerns: the scope (the files of one checkpoint) itself,
    /// a path in it, or a name beside it. `is_dir` says whether the scope is a directory.
    ///
    /// A capture is a variable part of a pattern, such as `{N}`. `names` are the captures of the scope, the only ones
    /// that the event may use. `kinds` says for each of them what it matches, such as a number.
    fn parse_event_target(
        &self,
        target: Word<'_>,
        is_dir: bool,
        names: &[String],
        kinds: &BTreeMap<String, CaptureKind>,
    ) -> Result<EventTarget, RuleError> {
        for name in capture_names(target.text) {
            if !names.contains(&name) {
                let message = format!("expected a capture of the scope, found `{{{name}}}`");
                let nearest = nearest(&name, names.iter().map(String::as_str));
                return Err(self.error(target.offset, message, nearest));
            }
        }
        if target.text == "." {
            return Ok(EventTarget::Itself);
        }
        let text_beside = target.text.strip_prefix("../");
        let text = text_beside.unwrap_or(target.text);
        let path = Word {
            text,
            offset: target.offset + target.text.len() - text.len(),
        };
        let leaves_scope = text
            .split('|')
            .any(|alternative| alternative.split('/').any(|name| name == ".."));
        if leaves_scope {
            let message = "expected a path in the scope, or `../NAME` beside it";
            return Err(self.error(path.offset, message, None));
        }
        if text_beside.is_some() && !is_dir {
            let message =
                "expected a name without `..`: the name is in the directory of the scope's files";
            return Err(self.error(path.offset, message, None));
        }
        if text_beside.is_none() && is_dir {
            let pattern = self.compile_pattern(path, kinds, NO_PREFIX)?;
            return Ok(EventTarget::Inside(pattern));
        }
        // The files of a scope that is not a directory are all in one directory, so a name is beside them.
        if let Some(slash) = text.find('/') {
            let message = "expected a name beside the scope, without a directory";
            return Err(self.error(path.offset + slash, message, None));
        }
        let pattern = self.compile_pattern(path, kinds, NO_PREFIX)?;
        Ok(EventTarget::Beside(pattern))
    }

    /// Parses an option, a word after the event, and adds it to the rule: `keep=N`, or a condition such as `*=same`.
    ///
    /// Skips `begins=` and the kinds of captures, such as `T=number`: [`Self::parse_scope`] and
    /// [`Self::capture_kinds`] have parsed these before. `names` are the captures of the scope.
    fn parse_option(
        &self,
        word: Word<'_>,
        names: &[String],
        rule: &mut Rule,
    ) -> Result<(), RuleError> {
        const OPTIONS: &str = "`FILES=writers`, `FILES=same`, `FILES=renewed`, `FILES=N`, `begins=FILES`, `keep=N` or `CAPTURE=number` (or `integer`, `text`)";
        let Some((key, value)) = word.text.rsplit_once('=') else {
            let message = format!("expected {OPTIONS}, found `{}`", word.text);
            return Err(self.error(
                word.offset,
                message,
                nearest(word.text, ["begins=", "keep=", "writers", "same"]),
            ));
        };
        let value_offset = word.offset + key.len() + 1;
        let is_kind_of_capture = names.iter().any(|name| name == key);
        if key == "begins" || is_kind_of_capture {
            return Ok(());
        }
        let value_word = Word {
            text: value,
            offset: value_offset,
        };
        if key == "keep" {
            rule.keep = Some(self.parse_keep(value_word)?);
            if rule.scope.is_wide() {
                let message = "expected no `keep` where one checkpoint is in several directories";
                return Err(self.error(word.offset, message, None));
            }
            return Ok(());
        }
        // Any other key is the pattern of a condition.
        let count = self.parse_required_count(value_word)?;
        let files_word = Word {
            text: key,
            offset: word.offset,
        };
        rule.needs.push(Condition {
            text: word.text.to_owned(),
            files: self.compile_pattern(files_word, &BTreeMap::new(), NO_PREFIX)?,
            count,
        });
        Ok(())
    }

    /// Parses the number of checkpoints to keep.
    fn parse_keep(&self, value: Word<'_>) -> Result<usize, RuleError> {
        match parse_positive(value.text) {
            Some(number) => Ok(number),
            None => {
                let message = format!(
                    "expected the number of checkpoints to keep, 1 or more, found `{}`",
                    value.text
                );
                Err(self.error(value.offset, message, None))
            }
        }
    }

    /// Parses the number of files that a condition of a rule requires before a checkpoint may be committed.
    fn parse_required_count(&self, value: Word<'_>) -> Result<RequiredCount, RuleError> {
        match value.text {
            "writers" => Ok(RequiredCount::Writers),
            "same" => Ok(RequiredCount::Same),
            "renewed" => Ok(RequiredCount::Renewed),
            text => {
                if let Some(number) = parse_positive(text) {
                    return Ok(RequiredCount::Number(number));
                }
                let message =
                    format!("expected `writers`, `same`, `renewed` or a number, found `{text}`");
                let valid = ["writers", "same", "renewed", "number"];
                Err(self.error(value.offset, message, nearest(text, valid)))
            }
        }
    }
}

/// Parses a number of 1 or more.
fn parse_positive(text: &str) -> Option<usize> {
    text.parse().ok().filter(|number| *number > 0)
}

/// Prefix of a pattern that must match a whole path or name.
const NO_PREFIX: &str = "";
/// Regular expression for any directories before a pattern.
const AT_ANY_DEPTH: &str = "(?:.*/)?";

const EVENTS: &str = "`close:FILE`, `rename:FILE`, `unlink:FILE`, `next` or `idle`";

/// Maximum size of a file of rules in bytes.
pub const RULES_BYTES_MAX: usize = 64 << 10;
/// Maximum number of rules of one mount.
pub const RULES_MAX: usize = 256;

/// Parses the commit rules in a text, one on each line. Each rule must have a different name. `source_name` is shown in
/// error messages.
pub fn parse_rules(text: &str, source_name: &str) -> Result<Vec<Rule>, RuleError> {
    let mut rules: Vec<Rule> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let parser = LineParser {
            source_name,
            line: index + 1,
        };
        let Some(rule) = parser.parse_rule(line)? else {
            continue;
        };
        if rules.iter().any(|earlier| earlier.name == rule.name) {
            let message = format!(
                "expected another name: there is a rule `{}` above",
                rule.name
            );
            return Err(parser.error(0, message, None));
        }
        if rules.len() == RULES_MAX {
            return Err(parser.error(0, format!("expected at most {RULES_MAX} rules"), None));
        }
        rules.push(rule);
    }
    Ok(rules)
}
