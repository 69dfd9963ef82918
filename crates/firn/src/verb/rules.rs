//! `firn rules`: lists commit rules, explains which rule covers a path, and replays recorded operations against rules.
//!
//! A commit rule defines which changes together are a checkpoint (its *scope*), and which change completes it (its
//! *event*). The scope is all paths at or below one path, its *top*.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_protocol::{Status, TransactionStatus};
use firn_rules::trace::{RuleReaction, TracePlayer, parse_trace};
use firn_rules::{BUILT_IN, Machine, RuleSet, ScopeState, load_rules, parse_rules};
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure, USAGE};
use crate::output;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "rules",
    about: "Show commit rules, explain which rule covers a path, and test rules with recorded operations",
    long: "A mount with the option `rules` commits checkpoints of programs that know nothing of Firn. A rule defines \
           which changes are one checkpoint (its scope), and which change makes it complete (its event).\n\n\
           A rule is one line: NAME SCOPE EVENT [WORD...]. A scope is a directory (checkpoint-*/), a file (*.pt), or \
           all paths with the same captures (restart.{T}.*). Events are close:FILE, rename:FILE and unlink:FILE, where \
           FILE is in the scope, `.` is the scope itself and ../FILE is beside it; next, the first change in another \
           scope of the rule, or the end of all writers with success; and idle, the last close. Words are \
           FILES=writers, FILES=same and FILES=N (the number of files that must exist), FILES=renewed (files that \
           existed before must be written again), begins=FILES (the files that begin the scope), keep=N (firnd removes \
           complete checkpoints older than the newest N) and CAPTURE=integer, number or text. `#` begins a comment.\n\n\
           A trace has one operation on each line: PROCESS and mkdir PATH, open PATH, write PATH BYTES, close PATH, \
           truncate PATH, rename FROM TO, link FROM TO, symlink TARGET PATH, unlink PATH, rmdir PATH, exit CODE or \
           kill; or it is the output of strace -f -e trace=file,desc,process.",
    examples: &[
        ("firn rules list", "the built-in rules"),
        (
            "firn rules explain /ckpt/checkpoint-500/model.bin",
            "which rule of the mount covers this path, and what its checkpoint waits for",
        ),
        (
            "firn rules test --rules ./site.rules solver.trace",
            "which checkpoints would be committed when, without a mount",
        ),
    ],
    exits: &[
        (0, "done"),
        (
            1,
            "failed; explain: no rule covers the path; test: an incomplete checkpoint was left",
        ),
        (2, "an invalid option, rule or trace"),
        (10, "explain: not on a firn mount, and no --rules"),
        NO_CONNECTION,
    ],
    args,
    run,
};

/// Adds the arguments of `firn rules` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    let json = || {
        Arg::new("json")
            .long("json")
            .action(ArgAction::SetTrue)
            .help("Print the answer as JSON")
    };
    let rules = || {
        Arg::new("rules")
            .long("rules")
            .value_name("RULE,RULE")
            .help("Names of rules, or paths with a slash of files of rules")
    };
    command
        .subcommand_required(true)
        .subcommand(
            Command::new("list")
                .about("Print the built-in rules")
                .arg(json()),
        )
        .subcommand(
            Command::new("explain")
                .about("Print which rule covers a path, and what its checkpoint waits for")
                .arg(
                    Arg::new("path")
                        .value_name("PATH")
                        .required(true)
                        .value_hint(ValueHint::AnyPath)
                        .value_parser(value_parser!(PathBuf)),
                )
                .arg(rules())
                .arg(json()),
        )
        .subcommand(
            Command::new("test")
                .about("Replay recorded operations, and print which checkpoints would be committed when")
                .arg(
                    Arg::new("trace")
                        .value_name("TRACE")
                        .required(true)
                        .help("A file, or - for standard input")
                        .value_hint(ValueHint::FilePath)
                        .value_parser(value_parser!(PathBuf)),
                )
                .arg(rules().required(true))
                .arg(
                    Arg::new("top")
                        .long("top")
                        .value_name("DIR")
                        .default_value("/")
                        .help("With a trace of strace: the mount point; absolute paths elsewhere are left out"),
                )
                .arg(json()),
        )
}

/// Runs `list`, `explain` or `test`.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    match matches.subcommand() {
        Some(("list", matches)) => run_list(matches),
        Some(("explain", matches)) => run_explain(matches),
        Some(("test", matches)) => run_test(matches),
        _ => unreachable!("clap demands one"),
    }
}

/// A rule as JSON.
#[derive(Serialize)]
struct ListedRule<'a> {
    /// Name of the rule.
    name: &'a str,
    /// The line that defines the rule.
    rule: &'a str,
}

/// Prints the built-in commit rules, as text or as JSON.
fn run_list(matches: &ArgMatches) -> Result<u8, Failure> {
    if matches.get_flag("json") {
        let rules = parse_rules(BUILT_IN, "built-in rules").map_err(usage_failure)?;
        let listed: Vec<ListedRule<'_>> = rules
            .iter()
            .map(|rule| ListedRule {
                name: &rule.name,
                rule: &rule.text,
            })
            .collect();
        output::print_json(&listed)?;
    } else {
        output::print(BUILT_IN)?;
    }
    Ok(DONE)
}

/// Returns the failure for invalid rules or an invalid trace.
fn usage_failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(USAGE, error.to_string())
}

/// Loads the rules that a list of names and files means, in the syntax of the mount option `rules`.
fn load_rule_set(list: &str) -> Result<Arc<RuleSet>, Failure> {
    let read_rules = |path: &str| {
        let mut text = String::new();
        // One byte more than the maximum suffices for the parser to refuse the file.
        let read_max = firn_rules::RULES_BYTES_MAX as u64 + 1;
        std::fs::File::open(path)?
            .take(read_max)
            .read_to_string(&mut text)?;
        Ok(text)
    };
    load_rules(list, read_rules)
        .map(Arc::new)
        .map_err(usage_failure)
}

/// Returns the rules that are in force on a mount.
pub(super) fn rules_of_mount(status: &Status) -> Result<Arc<RuleSet>, Failure> {
    let rules_option = status
        .options
        .iter()
        .find_map(|option| option.strip_prefix("rules="));
    let Some(list) = rules_option else {
        return Err(Failure::new(
            FAILED,
            "the mount has no commit rules: mount it with rules=NAME, or use --rules",
        ));
    };
    // In a list of mount options, where commas separate the options, colons separate the rules.
    load_rule_set(&list.replace(':', ","))
}

/// The result of `firn rules explain`.
#[derive(Default, Serialize)]
struct ExplainResult {
    /// Name of the rule. `None` means that no rule covers the path.
    rule: Option<String>,
    /// The line that defines the rule.
    text: Option<String>,
    /// The top of the checkpoint that the path belongs to.
    scope: Option<String>,
    /// What the commit waits for. `None` means that no checkpoint is open there.
    waits_for: Option<String>,
    /// Number of complete checkpoints that stay. `None` means that all of them stay.
    keep: Option<usize>,
}

/// Prints which commit rule covers a path, and to which checkpoint the path belongs. The rules are those of `--rules`,
/// or of the mount that the path is on. Returns [`FAILED`] if no rule covers the path.
fn run_explain(matches: &ArgMatches) -> Result<u8, Failure> {
    let path = matches.get_one::<PathBuf>("path").expect("clap demands it");
    let lookup = match matches.get_one::<String>("rules") {
        Some(list) => RuleLookup::without_mount(path, list)?,
        None => RuleLookup::on_mount(path)?,
    };
    let explanation = lookup.explain();
    if matches.get_flag("json") {
        output::print_json(&explanation)?;
    } else {
        output::print(&explanation.to_words(&lookup.relative_path))?;
    }
    Ok(if explanation.rule.is_some() {
        DONE
    } else {
        FAILED
    })
}

/// A path, and what is needed to find the commit rule that covers it.
struct RuleLookup {
    /// The rules that may cover the path.
    rules: Arc<RuleSet>,
    /// The path below the mount point.
    relative_path: Vec<u8>,
    /// The open transactions of the mount. There are none without a mount.
    transactions: Vec<TransactionStatus>,
}

impl RuleLookup {
    /// Returns the lookup of a path on a mount, with the rules of that mount.
    fn on_mount(path: &Path) -> Result<Self, Failure> {
        let (location, mut connection) = connect(path)?;
        let status = connection.status()?;
        Ok(Self {
            rules: rules_of_mount(&status)?,
            relative_path: location.relative.as_bytes().to_vec(),
            transactions: status.transactions,
        })
    }

    /// Returns the lookup of a path that is on no mount, with a list of rules.
    fn without_mount(path: &Path, rule_list: &str) -> Result<Self, Failure> {
        let relative_path = path.strip_prefix("/").unwrap_or(path);
        Ok(Self {
            rules: load_rule_set(rule_list)?,
            relative_path: relative_path.as_os_str().as_encoded_bytes().to_vec(),
            transactions: Vec::new(),
        })
    }

    /// Returns the commit rule that covers the path, and the checkpoint that the path belongs to. All fields are `None`
    /// if no rule covers the path.
    ///
    /// The checkpoint is everything at or below one path, its scope. It has an open transaction until the rule commits
    /// it.
    fn explain(&self) -> ExplainResult {
        let machine = Machine::new(Arc::clone(&self.rules));
        let location = machine.rules().locate(&self.relative_path);
        let Some((rule, scope)) = machine.explain(&location) else {
            return ExplainResult::default();
        };
        let open_transaction = self
            .transactions
            .iter()
            .find(|transaction| transaction.scope.as_bytes() == scope.as_slice());
        ExplainResult {
            rule: Some(rule.name.clone()),
            text: Some(rule.text.clone()),
            scope: Some(String::from_utf8_lossy(&scope).into_owned()),
            waits_for: open_transaction.and_then(|transaction| transaction.waits_for.clone()),
            keep: rule.keep(),
        }
    }
}

impl ExplainResult {
    /// Returns the explanation for a path in words: its commit rule, its checkpoint (`scope`), and what the commit
    /// waits for.
    fn to_words(&self, path: &[u8]) -> String {
        let path = String::from_utf8_lossy(path);
        let (Some(text), Some(scope)) = (&self.text, &self.scope) else {
            return format!(
                "no rule covers {path}: its changes go to the backing as they are made\n"
            );
        };
        let state = match &self.waits_for {
            Some(waits_for) => {
                format!("a checkpoint is open there; its commit waits for {waits_for}")
            }
            None => "no checkpoint is open there: the first change begins one".to_owned(),
        };
        let keep = match self.keep {
            None => "old checkpoints stay until a program removes them".to_owned(),
            Some(1) => "the newest complete checkpoint stays, firnd removes older ones".to_owned(),
            Some(count) => {
                format!("the newest {count} complete checkpoints stay, firnd removes older ones")
            }
        };
        format!("{path} is in the checkpoint {scope}, by the rule\n  {text}\n{state}\n{keep}\n")
    }
}

/// The result of `firn rules test`.
#[derive(Serialize)]
struct TestResult<'a> {
    /// What the rules did at each operation.
    outcomes: &'a [RuleReaction],
    /// Checkpoints that are still open at the end.
    open: Vec<ScopeState>,
}

/// Replays a trace (recorded operations on files) against commit rules, and prints when the rules would commit which
/// checkpoint. Returns [`FAILED`] if a checkpoint is still open at the end.
fn run_test(matches: &ArgMatches) -> Result<u8, Failure> {
    let list = matches.get_one::<String>("rules").expect("clap demands it");
    let path = matches
        .get_one::<PathBuf>("trace")
        .expect("clap demands it");
    let top = matches.get_one::<String>("top").expect("it has a default");
    let shown_path = crate::text::path(path);
    let trace = read_trace(path)
        .map_err(|error| Failure::new(FAILED, format!("cannot read {shown_path}: {error}")))?;
    let operations = parse_trace(&trace, top)
        .map_err(|error| usage_failure(format!("{shown_path}: {error}")))?;
    let mut player = TracePlayer::new(load_rule_set(list)?);
    for operation in &operations {
        player.play(operation);
    }
    let last_line = operations.last().map_or(0, |operation| operation.line);
    player.end_job(last_line);
    let result = TestResult {
        outcomes: player.reactions(),
        open: player.states(),
    };
    if matches.get_flag("json") {
        output::print_json(&result)?;
    } else {
        output::print(&result.to_words())?;
    }
    Ok(if result.open.is_empty() { DONE } else { FAILED })
}

/// Reads recorded operations from a file, or from standard input for the path `-`.
fn read_trace(path: &Path) -> std::io::Result<String> {
    if path.as_os_str() == "-" {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    }
}

impl TestResult<'_> {
    /// Returns in words what the commit rules did at each recorded operation, and what the open checkpoints wait for.
    fn to_words(&self) -> String {
        let mut text = String::new();
        for reaction in self.outcomes {
            let paths = reaction.paths.join(" ");
            let reason = if reaction.reason.is_empty() {
                String::new()
            } else {
                format!(": {}", reaction.reason)
            };
            let _ = writeln!(
                text,
                "line {:<4} {:<8} {} {paths}{reason}",
                reaction.line, reaction.what, reaction.rule
            );
        }
        for checkpoint in &self.open {
            let _ = writeln!(
                text,
                "at the end {} {} waits for {}",
                checkpoint.rule, checkpoint.path, checkpoint.waits_for
            );
        }
        text
    }
}
