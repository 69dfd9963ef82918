//! Replays recorded operations of programs and reports what the commit rules do. A rule says which changes are one
//! checkpoint, and when the checkpoint is complete.
//!
//! Each line is one operation, `PROCESS OPERATION PATH…`, or a line of `strace -f`:
//!
//! ```text
//! 1 mkdir checkpoint-5
//! 1 open checkpoint-5/model.bin
//! 1 write checkpoint-5/model.bin 4096
//! 1 close checkpoint-5/model.bin
//! 1 rename a b        also: link a b, symlink TARGET a
//! 1 unlink a          also: rmdir a, truncate a
//! 1 exit 0            or: kill
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use crate::language::nearest;
use crate::machine::{Action, Ending, Machine, Operation, ScopeNumber, ScopeState};
use crate::rule_set::{LocatedPath, RuleSet};

/// One operation of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceStep {
    /// Create a directory.
    Mkdir(String),
    /// Open a file for writing. The open creates or truncates the file, unless it is an update in place.
    Open(String),
    /// Append this number of bytes to an open file.
    Write(String, u64),
    /// Close the file.
    Close(String),
    /// Truncate a file to zero bytes.
    Truncate(String),
    /// Rename a file.
    Rename(String, String),
    /// Add a hard link to a file.
    Link(String, String),
    /// Create a symbolic link: target and path.
    Symlink(String, String),
    /// Remove a file.
    Unlink(String),
    /// Remove a directory.
    Rmdir(String),
    /// The process ends with this code.
    Exit(u8),
    /// The process is killed.
    Kill,
}

/// A step with its process and its line number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLine {
    /// Line number, counted from 1.
    pub line: usize,
    /// The process id.
    pub process: u32,
    /// The operation.
    pub step: TraceStep,
}

/// Error for a line that is not an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct TraceError {
    /// Line number, counted from 1.
    pub line: usize,
    /// The expected text and the text that was found.
    pub message: String,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

const WORDS: [&str; 12] = [
    "mkdir", "open", "write", "close", "truncate", "rename", "link", "symlink", "unlink", "rmdir",
    "exit", "kill",
];

/// Parses a trace, which is a recorded list of operations of programs, in Firn's own form or in the form of strace.
///
/// `top` is the directory to which the paths of strace are made relative. Operations on paths elsewhere are left out.
pub fn parse_trace(text: &str, top: &str) -> Result<Vec<TraceLine>, TraceError> {
    let mut strace = Strace::new(top);
    let mut steps = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (process, step) = if Strace::is_strace_line(line) {
            match strace.parse_strace_line(line) {
                Some(process_and_step) => process_and_step,
                None => continue,
            }
        } else {
            parse_line(line).map_err(|message| TraceError {
                line: line_number,
                message,
            })?
        };
        steps.push(TraceLine {
            line: line_number,
            process,
            step,
        });
    }
    Ok(steps)
}

/// Parses a line of a trace in Firn's own form, such as `1 open PATH`. Returns the process and the operation, or a
/// message that says what was expected. The line is not empty.
fn parse_line(line: &str) -> Result<(u32, TraceStep), String> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let process = words[0].parse().map_err(|_| {
        format!(
            "expected the number of a process, found `{}`; write lines such as `1 open PATH`, or the output of strace -f",
            words[0]
        )
    })?;
    let Some(&word) = words.get(1) else {
        return Err(format!(
            "expected one of {} after the number of the process",
            WORDS.join(", ")
        ));
    };
    let argument = |number: usize| match words.get(1 + number) {
        Some(argument) => Ok((*argument).to_owned()),
        None => Err(format!("expected more words after `{word}`")),
    };
    let step = match word {
        "mkdir" => TraceStep::Mkdir(argument(1)?),
        "open" => TraceStep::Open(argument(1)?),
        "write" => {
            let count = argument(2)?;
            let path = argument(1)?;
            let Ok(bytes) = count.parse() else {
                return Err(format!("expected a number of bytes, found `{count}`"));
            };
            TraceStep::Write(path, bytes)
        }
        "close" => TraceStep::Close(argument(1)?),
        "truncate" => TraceStep::Truncate(argument(1)?),
        "rename" => TraceStep::Rename(argument(1)?, argument(2)?),
        "link" => TraceStep::Link(argument(1)?, argument(2)?),
        "symlink" => TraceStep::Symlink(argument(1)?, argument(2)?),
        "unlink" => TraceStep::Unlink(argument(1)?),
        "rmdir" => TraceStep::Rmdir(argument(1)?),
        "exit" => {
            let code = argument(1)?;
            let Ok(status) = code.parse() else {
                return Err(format!("expected an exit code, found `{code}`"));
            };
            TraceStep::Exit(status)
        }
        "kill" => TraceStep::Kill,
        unknown => {
            let hint = match nearest(unknown, WORDS) {
                Some(word) => format!("; did you mean `{word}`?"),
                None => String::new(),
            };
            let words = WORDS.join(", ");
            return Err(format!("expected one of {words}, found `{unknown}`{hint}"));
        }
    };
    Ok((process, step))
}

/// Parser for the calls in the output of strace that change files.
struct Strace {
    /// The directory to which paths are made relative, without a slash at the end.
    top: String,
    /// Paths of descriptors that are open for writing, by process and descriptor.
    open: BTreeMap<(u32, i64), String>,
}

impl Strace {
    fn new(top: &str) -> Self {
        Self {
            top: top.trim_end_matches('/').to_owned(),
            open: BTreeMap::new(),
        }
    }

    /// Returns whether a line is output of strace: a call, the end of a process, a signal, or the rest of a call
    /// that was interrupted.
    fn is_strace_line(line: &str) -> bool {
        let (_, call) = Self::split_process(line);
        let is_name_byte =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let is_call = call
            .split_once('(')
            .is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(is_name_byte));
        is_call || call.starts_with("+++ ") || call.starts_with("--- ") || call.starts_with("<... ")
    }

    /// Splits the process id from the system call in a line of strace. The forms are `[pid 12] call`, `12 call`,
    /// `12 1700000000.5 call` and `call`. Without a process id the process is 1.
    fn split_process(line: &str) -> (u32, &str) {
        const DEFAULT_PROCESS: u32 = 1;
        if let Some(after_bracket) = line.strip_prefix("[pid")
            && let Some((pid, call)) = after_bracket.split_once(']')
        {
            let process = pid.trim().parse().unwrap_or(DEFAULT_PROCESS);
            return (process, call.trim_start());
        }
        let Some((first_word, after_first)) = line.split_once(' ') else {
            return (DEFAULT_PROCESS, line);
        };
        let Ok(process) = first_word.parse() else {
            return (DEFAULT_PROCESS, line);
        };
        let after_pid = after_first.trim_start();
        let is_time = |word: &str| {
            word.bytes()
                .all(|byte| byte.is_ascii_digit() || b".:".contains(&byte))
        };
        match after_pid.split_once(' ') {
            Some((time, call)) if is_time(time) => (process, call.trim_start()),
            _ => (process, after_pid),
        }
    }

    /// Returns a path relative to the top; `None` if the path lies elsewhere.
    fn relative_to_top(&self, path: &str) -> Option<String> {
        let path = path.strip_prefix("./").unwrap_or(path);
        if !path.starts_with('/') {
            return Some(path.to_owned());
        }
        let below_top = path.strip_prefix(&self.top)?.strip_prefix('/')?;
        Some(below_top.to_owned())
    }

    /// Returns the operation of a line and its process; `None` if the line changes no file below the top.
    fn parse_strace_line(&mut self, line: &str) -> Option<(u32, TraceStep)> {
        let (process, call) = Self::split_process(line);
        let step = match call.strip_prefix("+++ ") {
            Some(ending) => Self::parse_ending(ending),
            None => self.parse_call(process, call)?,
        };
        Some((process, step))
    }

    /// Parses how a process ended: `exited with 0 +++`, or by a signal.
    fn parse_ending(ending: &str) -> TraceStep {
        if let Some(after_words) = ending.strip_prefix("exited with ")
            && let Some((code, _)) = after_words.split_once(' ')
            && let Ok(code) = code.parse()
        {
            return TraceStep::Exit(code);
        }
        TraceStep::Kill
    }

    /// Returns the operation of a system call in a line of strace. Returns `None` if the call failed or changes no file
    /// below the top, the directory of the trace.
    fn parse_call(&mut self, process: u32, line: &str) -> Option<TraceStep> {
        let (name, after_name) = line.split_once('(')?;
        let (arguments, result) = after_name.rsplit_once(" = ")?;
        let result: i64 = result.split([' ', '<']).next()?.parse().ok()?;
        if result < 0 {
            return None;
        }
        // Every second part of the text lies between quotes.
        let quoted: Vec<&str> = arguments.split('"').skip(1).step_by(2).collect();
        let path = |index: usize| self.relative_to_top(quoted.get(index)?);
        let descriptor = || {
            arguments
                .split([',', ')', '<'])
                .next()?
                .trim()
                .parse::<i64>()
                .ok()
        };
        Some(match name {
            "open" | "openat" | "creat" => {
                let is_writing = name == "creat"
                    || arguments.contains("O_WRONLY")
                    || arguments.contains("O_RDWR");
                let path = path(0)?;
                if !is_writing {
                    return None;
                }
                self.open.insert((process, result), path.clone());
                TraceStep::Open(path)
            }
            "close" => TraceStep::Close(self.open.remove(&(process, descriptor()?))?),
            "write" | "pwrite64" | "writev" | "pwritev" | "pwritev2" => TraceStep::Write(
                self.open.get(&(process, descriptor()?))?.clone(),
                result as u64,
            ),
            "mkdir" | "mkdirat" => TraceStep::Mkdir(path(0)?),
            "rename" | "renameat" | "renameat2" => TraceStep::Rename(path(0)?, path(1)?),
            "link" | "linkat" => TraceStep::Link(path(0)?, path(1)?),
            "symlink" | "symlinkat" => TraceStep::Symlink((*quoted.first()?).to_owned(), path(1)?),
            "unlinkat" if arguments.contains("AT_REMOVEDIR") => TraceStep::Rmdir(path(0)?),
            "unlink" | "unlinkat" => TraceStep::Unlink(path(0)?),
            "rmdir" => TraceStep::Rmdir(path(0)?),
            "truncate" => TraceStep::Truncate(path(0)?),
            _ => return None,
        })
    }
}

/// One reaction of the rules to an operation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RuleReaction {
    /// The line of the operation that caused the reaction. A `begin` happens before that operation, all else after it.
    pub line: usize,
    /// `begin`, `join`, `commit`, `abort`, `remove` (by `keep=N`) or `refuse`.
    pub what: &'static str,
    /// The name of the rule.
    pub rule: String,
    /// The names of the checkpoint.
    pub paths: Vec<String>,
    /// The reason of an abort or a refusal.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// The process id that stands for the process that started all processes of a trace.
const STARTING_PROCESS: u32 = u32::MAX;

/// A file that a process of the trace has open for writing.
struct OpenFile {
    process: u32,
    path: String,
    handle: u64,
}

/// A scope that the rules have begun.
#[derive(Default)]
struct PlayedScope {
    /// The name of the rule.
    rule: String,
    /// The names of the checkpoint.
    paths: Vec<String>,
}

/// Replays operations, and records what the rules do.
pub struct TracePlayer {
    machine: Machine,
    /// Names that programs have created and not removed.
    names: BTreeSet<String>,
    open_files: Vec<OpenFile>,
    last_handle: u64,
    scopes: BTreeMap<ScopeNumber, PlayedScope>,
    reactions: Vec<RuleReaction>,
}

impl TracePlayer {
    /// Creates a player with an empty history.
    pub fn new(rules: Arc<RuleSet>) -> Self {
        Self {
            machine: Machine::new(rules),
            names: BTreeSet::new(),
            open_files: Vec::new(),
            last_handle: 0,
            scopes: BTreeMap::new(),
            reactions: Vec::new(),
        }
    }

    /// Returns the recorded reactions of the rules.
    pub fn reactions(&self) -> &[RuleReaction] {
        &self.reactions
    }

    /// Returns the scopes that are open.
    pub fn states(&self) -> Vec<ScopeState> {
        self.machine.states()
    }

    /// Returns the roles of a path for the rules.
    fn locate(&self, path: &str) -> LocatedPath {
        self.machine.rules().locate(path.as_bytes())
    }

    /// Updates the set of existing names after an operation of the trace.
    fn update_names(&mut self, step: &TraceStep) {
        let names = &mut self.names;
        match step {
            TraceStep::Mkdir(path)
            | TraceStep::Open(path)
            | TraceStep::Symlink(_, path)
            | TraceStep::Link(_, path) => {
                names.insert(path.clone());
            }
            TraceStep::Unlink(path) | TraceStep::Rmdir(path) => {
                names.remove(path);
            }
            TraceStep::Rename(from, to) => {
                *names = std::mem::take(names)
                    .into_iter()
                    .map(|name| match suffix_below(&name, from) {
                        Some(suffix) => format!("{to}{suffix}"),
                        None => name,
                    })
                    .collect();
            }
            TraceStep::Write(..)
            | TraceStep::Close(_)
            | TraceStep::Truncate(_)
            | TraceStep::Exit(_)
            | TraceStep::Kill => {}
        }
    }

    /// Replays one line of the trace: makes its operation, and carries out what the commit rules require.
    pub fn play(&mut self, line: &TraceLine) {
        self.update_names(&line.step);
        let process = line.process;
        match &line.step {
            TraceStep::Open(path) => {
                self.last_handle += 1;
                let handle = self.last_handle;
                self.open_files.push(OpenFile {
                    process,
                    path: path.clone(),
                    handle,
                });
                let path = &self.machine.rules().locate_file(path.as_bytes());
                self.run(line, &Operation::Open { path, handle });
            }
            // A write changes nothing for the rules: the file is open.
            TraceStep::Write(..) => {}
            TraceStep::Close(path) => {
                let index = self
                    .open_files
                    .iter()
                    .position(|file| file.process == process && file.path == *path);
                if let Some(index) = index {
                    let handle = self.open_files.remove(index).handle;
                    let ending = Ending::Success;
                    self.run(line, &Operation::Close { handle, ending });
                }
            }
            TraceStep::Mkdir(path)
            | TraceStep::Truncate(path)
            | TraceStep::Symlink(_, path)
            | TraceStep::Link(_, path) => {
                let path = &self.locate(path);
                self.run(line, &Operation::Change { path });
            }
            TraceStep::Rename(from, to) => {
                for file in &mut self.open_files {
                    if file.path == *from {
                        file.path.clone_from(to);
                    }
                }
                let from = &self.locate(from);
                let to = &self.locate(to);
                self.run(line, &Operation::Rename { from, to });
            }
            TraceStep::Unlink(path) | TraceStep::Rmdir(path) => {
                let path = &self.locate(path);
                self.run(line, &Operation::Remove { path });
            }
            TraceStep::Exit(0) => self.end_process(line, Ending::Success),
            TraceStep::Exit(_) | TraceStep::Kill => self.end_process(line, Ending::Failure),
        }
    }

    /// Ends the job that started all processes of the trace.
    pub fn end_job(&mut self, line: usize) {
        let actions = self.machine.record_exit(STARTING_PROCESS, Ending::Success);
        self.carry_out(line, actions);
    }

    /// Ends the process of a line: closes its open files, and reports the end to the machine.
    fn end_process(&mut self, line: &TraceLine, ending: Ending) {
        let closed_files: Vec<OpenFile> = self
            .open_files
            .extract_if(.., |file| file.process == line.process)
            .collect();
        for OpenFile { handle, .. } in closed_files {
            self.run(line, &Operation::Close { handle, ending });
        }
        let actions = self.machine.record_exit(line.process, ending);
        self.carry_out(line.line, actions);
    }

    /// Makes one operation of the trace with all actions (begin, commit, abort) that the rules require before and after
    /// it. A refused operation is recorded and not made.
    fn run(&mut self, line: &TraceLine, operation: &Operation<'_>) {
        self.machine.record_job(line.process, STARTING_PROCESS);
        let entered = match self.machine.enter_operation(line.process, operation) {
            Ok(entered) => entered,
            Err(refusal) => {
                let rule = refusal.rule().to_owned();
                self.record(line.line, "refuse", rule, Vec::new(), refusal.to_string());
                return;
            }
        };
        self.carry_out(line.line, entered.actions);
        let is_made = true;
        let actions =
            self.machine
                .finish_operation(line.process, operation, entered.scope, is_made);
        self.carry_out(line.line, actions);
    }

    /// Carries out the actions of the machine, and the further actions that they cause. Records each action as a
    /// reaction to `line`.
    fn carry_out(&mut self, line: usize, actions: Vec<Action>) {
        for action in actions {
            self.carry_out_one(line, action);
        }
    }

    /// Carries out one action that the machine of commit rules requires for a scope (the files of one checkpoint), and
    /// records it as a reaction to `line`.
    ///
    /// The machine may answer an action by further actions. They are carried out last, so the reactions are recorded in
    /// the order in which the actions occur.
    fn carry_out_one(&mut self, line: usize, action: Action) {
        // Only an abort has a reason.
        let no_reason = String::new();
        // The trace does not say which files existed before it.
        let existed_before = false;
        match action {
            Action::Begin {
                scope, rule, tops, ..
            } => {
                let paths = to_texts(&tops);
                self.machine.record_begun(scope, existed_before);
                let played_scope = PlayedScope {
                    rule: rule.clone(),
                    paths: paths.clone(),
                };
                self.scopes.insert(scope, played_scope);
                self.record(line, "begin", rule, paths, no_reason);
            }
            Action::Join { scope, tops } => {
                let paths = to_texts(&tops);
                self.machine.record_begun(scope, existed_before);
                let played_scope = self.scopes.entry(scope).or_default();
                played_scope.paths.extend(paths.iter().cloned());
                let rule = played_scope.rule.clone();
                self.record(line, "join", rule, paths, no_reason);
            }
            Action::Commit { scope } => {
                let PlayedScope { rule, paths } = self.scopes.remove(&scope).unwrap_or_default();
                self.record(line, "commit", rule, paths, no_reason);
                let further_actions = self.machine.record_committed(scope);
                self.carry_out(line, further_actions);
            }
            // The player is the only host, so there is no other host to ask.
            Action::Propose { .. } => {}
            Action::Rotate { rule, dir } => {
                let names: Vec<LocatedPath> =
                    self.names.iter().map(|name| self.locate(name)).collect();
                let linked_tops = BTreeSet::new();
                let removals = self.machine.rotate(rule, &dir, &names, &linked_tops);
                self.carry_out(line, removals);
            }
            Action::Remove {
                scope, rule, tops, ..
            } => {
                let paths = to_texts(&tops);
                self.forget_names_below(&paths);
                self.record(line, "remove", rule, paths, no_reason);
                let further_actions = self.machine.record_committed(scope);
                self.carry_out(line, further_actions);
            }
            Action::Abort { scope, reason } => {
                let PlayedScope { rule, paths } = self.scopes.remove(&scope).unwrap_or_default();
                self.machine.record_aborted(scope);
                self.record(line, "abort", rule, paths, reason);
            }
        }
    }

    /// Removes the names at or below these paths from the names that exist.
    fn forget_names_below(&mut self, tops: &[String]) {
        self.names
            .retain(|name| !tops.iter().any(|top| suffix_below(name, top).is_some()));
    }

    /// Records one reaction of the rules to the line of the trace with number `line`. `what` is the kind, such as
    /// `begin` or `commit`.
    fn record(
        &mut self,
        line: usize,
        what: &'static str,
        rule: String,
        paths: Vec<String>,
        reason: String,
    ) {
        self.reactions.push(RuleReaction {
            line,
            what,
            rule,
            paths,
            reason,
        });
    }
}

/// Returns the names as texts for people.
fn to_texts(names: &[Vec<u8>]) -> Vec<String> {
    names
        .iter()
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect()
}

/// Returns the part of `name` after `top`, with its slash, if `name` is `top` or lies below it.
fn suffix_below<'a>(name: &'a str, top: &str) -> Option<&'a str> {
    name.strip_prefix(top)
        .filter(|suffix| suffix.is_empty() || suffix.starts_with('/'))
}
