//! Replays recorded operations of programs and reports what the rules do.
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

/// Parses a trace in Firn's own form or in the form of strace.
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
        if Strace::is_strace_line(line) {
            if let Some((process, step)) = strace.parse_strace_line(line) {
                steps.push(TraceLine {
                    line: line_number,
                    process,
                    step,
                });
            }
            continue;
        }
        let (process, step) = parse_line(line).map_err(|message| TraceError {
            line: line_number,
            message,
        })?;
        steps.push(TraceLine {
            line: line_number,
            process,
            step,
        });
    }
    Ok(steps)
}

/// Parses a line in Firn's own form. Returns the process and the operation, or a message that says what was expected.
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
    let argument = |index: usize| {
        let found = words.get(1 + index).map(|word| (*word).to_owned());
        found.ok_or_else(|| format!("expected more words after `{word}`"))
    };
    let step = match word {
        "mkdir" => TraceStep::Mkdir(argument(1)?),
        "open" => TraceStep::Open(argument(1)?),
        "write" => {
            let bytes = argument(2)?;
            let count = bytes.parse();
            TraceStep::Write(
                argument(1)?,
                count.map_err(|_| format!("expected a number of bytes, found `{bytes}`"))?,
            )
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
            TraceStep::Exit(
                code.parse()
                    .map_err(|_| format!("expected an exit code, found `{code}`"))?,
            )
        }
        "kill" => TraceStep::Kill,
        other => {
            let hint = nearest(other, WORDS).map(|word| format!("; did you mean `{word}`?"));
            let words = WORDS.join(", ");
            return Err(format!(
                "expected one of {words}, found `{other}`{}",
                hint.unwrap_or_default()
            ));
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

    /// Splits the process id from the call. The forms are `[pid 12] call`, `12 call`, `12 1700000000.5 call` and
    /// `call`. Without a process id the process is 1.
    fn split_process(line: &str) -> (u32, &str) {
        if let Some((pid, rest)) = line
            .strip_prefix("[pid")
            .and_then(|rest| rest.split_once(']'))
        {
            return (pid.trim().parse().unwrap_or(1), rest.trim_start());
        }
        let Some((first, rest)) = line.split_once(' ') else {
            return (1, line);
        };
        let Ok(process) = first.parse() else {
            return (1, line);
        };
        let rest = rest.trim_start();
        let is_time = |word: &str| {
            word.bytes()
                .all(|byte| byte.is_ascii_digit() || b".:".contains(&byte))
        };
        match rest.split_once(' ') {
            Some((time, rest)) if is_time(time) => (process, rest.trim_start()),
            _ => (process, rest),
        }
    }

    /// Returns a path relative to the top; `None` if the path lies elsewhere.
    fn relative_to_top(&self, path: &str) -> Option<String> {
        let path = path.strip_prefix("./").unwrap_or(path);
        if !path.starts_with('/') {
            return Some(path.to_owned());
        }
        let rest = path.strip_prefix(&self.top)?;
        Some(rest.strip_prefix('/')?.to_owned())
    }

    /// Returns the operation of a line and its process; `None` if the line changes no file below the top.
    fn parse_strace_line(&mut self, line: &str) -> Option<(u32, TraceStep)> {
        let (process, call) = Self::split_process(line);
        let step = match call.strip_prefix("+++ ") {
            Some(end) => {
                let code = end.strip_prefix("exited with ");
                let code = code.and_then(|code| code.split_once(' ')?.0.parse().ok());
                code.map_or(TraceStep::Kill, TraceStep::Exit)
            }
            None => self.parse_call(process, call)?,
        };
        Some((process, step))
    }

    /// Returns the operation of a system call; `None` if the call failed or changes no file below the top.
    fn parse_call(&mut self, process: u32, line: &str) -> Option<TraceStep> {
        let (name, rest) = line.split_once('(')?;
        let (arguments, result) = rest.rsplit_once(" = ")?;
        let result: i64 = result.split([' ', '<']).next()?.parse().ok()?;
        if result < 0 {
            return None;
        }
        let paths: Vec<String> = arguments
            .split('"')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect();
        let path = |index: usize| self.relative_to_top(paths.get(index)?);
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
            "symlink" | "symlinkat" => TraceStep::Symlink(paths.first()?.clone(), path(1)?),
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

/// Replays operations, and records what the rules do.
pub struct TracePlayer {
    machine: Machine,
    /// Names that programs have created and not removed.
    names: BTreeSet<String>,
    /// Open files by process and path, with their handles.
    open: Vec<(u32, String, u64)>,
    last_handle: u64,
    /// The rule and the names of each scope.
    scopes: BTreeMap<ScopeNumber, (String, Vec<String>)>,
    reactions: Vec<RuleReaction>,
}

impl TracePlayer {
    /// Creates a player with an empty history.
    pub fn new(rules: Arc<RuleSet>) -> Self {
        Self {
            machine: Machine::new(rules),
            names: BTreeSet::new(),
            open: Vec::new(),
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

    /// Updates the set of existing names after an operation.
    fn note_names(&mut self, step: &TraceStep) {
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
                let moved = |name: &String| {
                    let rest = name.strip_prefix(from.as_str())?;
                    (rest.is_empty() || rest.starts_with('/')).then(|| format!("{to}{rest}"))
                };
                *names = std::mem::take(names)
                    .into_iter()
                    .map(|name| moved(&name).unwrap_or(name))
                    .collect();
            }
            TraceStep::Write(..)
            | TraceStep::Close(_)
            | TraceStep::Truncate(_)
            | TraceStep::Exit(_)
            | TraceStep::Kill => {}
        }
    }

    /// Replays one line.
    pub fn play(&mut self, line: &TraceLine) {
        self.note_names(&line.step);
        let process = line.process;
        match &line.step {
            TraceStep::Open(path) => {
                self.last_handle += 1;
                let handle = self.last_handle;
                self.open.push((process, path.clone(), handle));
                let path = &self.machine.rules().locate_file(path.as_bytes());
                self.run(line, &Operation::Open { path, handle });
            }
            TraceStep::Write(..) => {}
            TraceStep::Close(path) => {
                let found = self
                    .open
                    .iter()
                    .position(|(owner, open, _)| *owner == process && open == path);
                if let Some(index) = found {
                    let handle = self.open.remove(index).2;
                    self.run(
                        line,
                        &Operation::Close {
                            handle,
                            ending: Ending::Success,
                        },
                    );
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
                for (_, path, _) in &mut self.open {
                    if path == from {
                        path.clone_from(to);
                    }
                }
                let (from, to) = (&self.locate(from), &self.locate(to));
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
        let actions = self.machine.note_exit(STARTING_PROCESS, Ending::Success);
        self.carry_out(line, actions);
    }

    /// Ends the process of a line: closes its open files, and reports the end to the machine.
    fn end_process(&mut self, line: &TraceLine, ending: Ending) {
        let (ended, open) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|(process, ..)| *process == line.process);
        self.open = open;
        let ended: Vec<(u32, String, u64)> = ended;
        for (_, _, handle) in ended {
            self.run(line, &Operation::Close { handle, ending });
        }
        let actions = self.machine.note_exit(line.process, ending);
        self.carry_out(line.line, actions);
    }

    /// Makes one operation with all actions that the rules require. A refused operation is recorded and not made.
    fn run(&mut self, line: &TraceLine, operation: &Operation<'_>) {
        self.machine.note_job(line.process, STARTING_PROCESS);
        let entered = match self.machine.enter_operation(line.process, operation) {
            Ok(entered) => entered,
            Err(error) => {
                return self.reactions.push(RuleReaction {
                    line: line.line,
                    what: "refuse",
                    rule: error.rule().to_owned(),
                    paths: Vec::new(),
                    reason: error.to_string(),
                });
            }
        };
        self.carry_out(line.line, entered.actions);
        let actions = self
            .machine
            .finish_operation(line.process, operation, entered.scope, true);
        self.carry_out(line.line, actions);
    }

    /// Carries out the actions of the machine, and the further actions that they cause. Records each action as a
    /// reaction to `line`.
    fn carry_out(&mut self, line: usize, actions: Vec<Action>) {
        let shown = |paths: &[Vec<u8>]| -> Vec<String> {
            paths
                .iter()
                .map(|path| String::from_utf8_lossy(path).into_owned())
                .collect()
        };
        for action in actions {
            let (what, rule, paths, reason) = match action {
                Action::Begin {
                    scope, rule, tops, ..
                } => {
                    self.machine.note_begun(scope, false);
                    self.scopes.insert(scope, (rule.clone(), shown(&tops)));
                    ("begin", rule, shown(&tops), String::new())
                }
                Action::Join { scope, tops } => {
                    self.machine.note_begun(scope, false);
                    let (rule, paths) = self.scopes.entry(scope).or_default();
                    paths.extend(shown(&tops));
                    ("join", rule.clone(), shown(&tops), String::new())
                }
                Action::Commit { scope } => {
                    let (rule, paths) = self.scopes.remove(&scope).unwrap_or_default();
                    self.record(line, "commit", rule, paths, String::new());
                    let further_actions = self.machine.note_committed(scope);
                    self.carry_out(line, further_actions);
                    continue;
                }
                // The player is the only host, so there is no other host to ask.
                Action::Propose { .. } => continue,
                Action::Rotate { rule, dir } => {
                    let names = self.names.iter().map(|name| self.locate(name));
                    let names: Vec<LocatedPath> = names.collect();
                    let removals = self.machine.rotate(rule, &dir, &names, &BTreeSet::new());
                    self.carry_out(line, removals);
                    continue;
                }
                Action::Remove {
                    scope, rule, tops, ..
                } => {
                    let tops = shown(&tops);
                    self.forget_names_below(&tops);
                    self.record(line, "remove", rule, tops, String::new());
                    let further_actions = self.machine.note_committed(scope);
                    self.carry_out(line, further_actions);
                    continue;
                }
                Action::Abort { scope, reason } => {
                    let (rule, paths) = self.scopes.remove(&scope).unwrap_or_default();
                    self.machine.note_aborted(scope);
                    ("abort", rule, paths, reason)
                }
            };
            self.record(line, what, rule, paths, reason);
        }
    }

    /// Removes the names at or below these paths from the names that exist.
    fn forget_names_below(&mut self, tops: &[String]) {
        let is_removed = |name: &String| {
            let mut rests = tops
                .iter()
                .filter_map(|top| name.strip_prefix(top.as_str()));
            rests.any(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.names.retain(|name| !is_removed(name));
    }

    /// Records one reaction of the rules.
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
