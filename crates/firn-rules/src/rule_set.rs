//! The commit rules of a mount, compiled into one set of patterns. The module also reads the option `rules`.
//!
//! A *rule* names a *scope* (the files of one checkpoint) and the *event* (the change that completes it).
//!
//! A path is looked up once, in one pass over its bytes, whatever the number of rules ([`RuleSet::locate`]). Captures
//! are computed only for the rules that this pass finds. Nothing in this module takes a lock.

use std::io;

use regex::bytes::{RegexSet, RegexSetBuilder};

use crate::built_in::BUILT_IN;
use crate::language::{
    FoundScope, RULES_BYTES_MAX, RULES_MAX, Rule, RuleError, nearest, parent_of, parse_rules,
    relative,
};
use crate::pattern::Captures;

/// Maximum size of the compiled patterns in bytes. The built-in rules take less than 1 MiB.
const COMPILED_BYTES_MAX: usize = 64 << 20;

/// The rules in the order of the option, with one set of patterns for all of them.
#[derive(Clone, Debug)]
pub struct RuleSet {
    rules: Vec<Rule>,
    /// Pattern N matches each path that rule N may concern.
    patterns: RegexSet,
}

/// The role of a path for a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathRole {
    /// The path is in a scope.
    Scope(FoundScope),
    /// The path is the subject of the rule's event. It lies beside the scope that has these captures.
    Marker(Captures),
}

/// A rule that concerns a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RuleMatch {
    /// Index of the rule in the set.
    pub(crate) rule: usize,
    pub(crate) role: PathRole,
}

/// A path, relative to the mount, with its role for each rule that concerns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocatedPath {
    path: Vec<u8>,
    /// The matches, in the order of the rules.
    pub(crate) matches: Vec<RuleMatch>,
}

impl LocatedPath {
    /// Returns the path.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Returns whether no rule concerns the path, whatever scopes are open.
    pub fn is_free(&self) -> bool {
        self.matches.is_empty()
    }
}

/// A checkpoint that contains a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointOfPath {
    /// The name of the rule.
    pub rule: String,
    /// The top directory or file of the checkpoint. The path is this top or lies in it.
    pub top: Vec<u8>,
    /// The value of the rule's only capture; otherwise the last number in the name.
    pub step: Option<String>,
    /// Key of the checkpoint. All paths of one checkpoint have the same key, and different checkpoints have different
    /// keys.
    pub group: String,
}

impl RuleSet {
    /// Returns the checkpoint to which a path belongs by the patterns of the rules; `None` if no rule matches. No file
    /// is checked on disk.
    pub fn checkpoint_of(&self, path: &[u8]) -> Option<CheckpointOfPath> {
        // The outermost scope of all rules counts.
        let (rule, found) = self
            .locate(path)
            .matches
            .into_iter()
            .filter_map(|rule_match| match rule_match.role {
                PathRole::Scope(found) => Some((rule_match.rule, found)),
                PathRole::Marker(_) => None,
            })
            .min_by_key(|(_, found)| found.top.len())?;
        Some(CheckpointOfPath {
            rule: self.rules[rule].name.clone(),
            step: found.step(),
            // Only equality of these texts matters, so the debug form is enough.
            group: format!("{rule} {:?} {:?}", found.dir, found.identity),
            top: found.top,
        })
    }

    /// Returns the bytes of [`CheckpointOfPath::group`] for a path.
    pub fn checkpoint_key(&self, path: &[u8]) -> Option<Vec<u8>> {
        Some(self.checkpoint_of(path)?.group.into_bytes())
    }

    /// Compiles the rules.
    pub fn new(rules: Vec<Rule>) -> Result<Self, RuleSetError> {
        let expressions = rules
            .iter()
            .map(|rule| format!("(?s-u)\\A(?:{})\\z", rule.expression()));
        let patterns = RegexSetBuilder::new(expressions)
            .size_limit(COMPILED_BYTES_MAX)
            .dfa_size_limit(COMPILED_BYTES_MAX)
            .build()
            .map_err(|_| RuleSetError::Large)?;
        Ok(Self { rules, patterns })
    }

    /// Returns the rules in their order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the roles of a path for all rules.
    pub fn locate(&self, path: &[u8]) -> LocatedPath {
        let mut matches = Vec::new();
        for rule in self.patterns.matches(path) {
            if let Some(role) = role_of(&self.rules[rule], path) {
                matches.push(RuleMatch { rule, role });
            }
        }
        LocatedPath {
            matches,
            path: path.to_vec(),
        }
    }

    /// Returns the roles of a path that is not a directory. If the scope of a rule is a directory, the rule does not
    /// concern a file with the directory's own name.
    pub fn locate_file(&self, path: &[u8]) -> LocatedPath {
        let mut located = self.locate(path);
        located.matches.retain(|rule_match| match &rule_match.role {
            PathRole::Scope(found) => {
                !self.rules[rule_match.rule].scope.is_dir || found.top != path
            }
            PathRole::Marker(_) => true,
        });
        located
    }
}

/// Returns the role of a path for a rule; `None` if the rule does not concern the path.
fn role_of(rule: &Rule, path: &[u8]) -> Option<PathRole> {
    if let Some(found) = rule.scope.find(path) {
        return Some(PathRole::Scope(found));
    }
    let name = relative(path, parent_of(path))?;
    let captures = rule.marker()?.captures(name)?;
    Some(PathRole::Marker(captures))
}

/// Error of loading rules.
#[derive(Debug, thiserror::Error)]
pub enum RuleSetError {
    /// No built-in rule has this name.
    #[error(
        "there is no rule `{name}`{}; `firn rules list` shows the names. To name a file, write a path with a slash, such as ./site.rules",
        nearest.as_ref().map(|word| format!("; did you mean `{word}`?")).unwrap_or_default()
    )]
    Unknown {
        /// The unknown name.
        name: String,
        /// The nearest name.
        nearest: Option<String>,
    },
    /// A file cannot be read.
    #[error("cannot read the rules in {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The error.
        source: io::Error,
    },
    /// A file is too long.
    #[error("{path} has more than {} KiB, the limit for a file of rules: name another file", RULES_BYTES_MAX >> 10)]
    Long {
        /// The file.
        path: String,
    },
    /// A rule has a mistake.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// There are too many patterns, or they are too long.
    #[error("the compiled patterns of all rules take more than {} MiB: write fewer or shorter patterns", COMPILED_BYTES_MAX >> 20)]
    Large,
    /// Two rules have the same name.
    #[error("two rules have the name `{name}`: rename one of them")]
    Twice {
        /// The name.
        name: String,
    },
    /// There are no rules, or too many.
    #[error("expected 1 to {RULES_MAX} rules, found {found}")]
    Count {
        /// Number of rules.
        found: usize,
    },
}

/// Loads the commit rules that `list` names: names of built-in rules and paths of files with rules, separated by
/// commas. Fails if two rules have the same name.
///
/// `read` returns the content of a file, of which it reads at most [`RULES_BYTES_MAX`] + 1 bytes.
pub fn load_rules(
    list: &str,
    mut read: impl FnMut(&str) -> io::Result<String>,
) -> Result<RuleSet, RuleSetError> {
    let built_in = parse_rules(BUILT_IN, "built-in rules")?;
    let mut rules: Vec<Rule> = Vec::new();
    for word in list.split(',').map(str::trim) {
        if word.is_empty() {
            continue;
        }
        let named_rules = if word.contains('/') {
            read_rules(word, &mut read)?
        } else {
            vec![find_built_in(word, &built_in)?.clone()]
        };
        for rule in named_rules {
            if rules.iter().any(|known| known.name == rule.name) {
                return Err(RuleSetError::Twice { name: rule.name });
            }
            rules.push(rule);
        }
    }
    let found = rules.len();
    if found == 0 || found > RULES_MAX {
        return Err(RuleSetError::Count { found });
    }
    RuleSet::new(rules)
}

/// Reads and parses a file of rules.
fn read_rules(
    path: &str,
    read: &mut impl FnMut(&str) -> io::Result<String>,
) -> Result<Vec<Rule>, RuleSetError> {
    let text = read(path).map_err(|source| RuleSetError::Read {
        path: path.to_owned(),
        source,
    })?;
    if text.len() > RULES_BYTES_MAX {
        return Err(RuleSetError::Long {
            path: path.to_owned(),
        });
    }
    Ok(parse_rules(&text, path)?)
}

/// Returns the built-in rule of this name.
fn find_built_in<'a>(name: &str, built_in: &'a [Rule]) -> Result<&'a Rule, RuleSetError> {
    match built_in.iter().find(|rule| rule.name == name) {
        Some(rule) => Ok(rule),
        None => Err(RuleSetError::Unknown {
            name: name.to_owned(),
            nearest: nearest(name, built_in.iter().map(|rule| rule.name.as_str())),
        }),
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn one_look_into_all_rules_finds_what_each_of_them_finds() {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let set = RuleSet::new(parse_rules(BUILT_IN, "built-in rules").unwrap()).unwrap();
        let words = [
            "checkpoint-5",
            "checkpoint_5",
            "checkpoints",
            "x.ckpt",
            "__0.distcp",
            ".metadata",
            "tmp_x",
            "step-7",
            "iter_1",
            "latest_checkpointed_iteration.txt",
            "latest",
            "global_step3",
            "3.orbax-checkpoint-tmp",
            "s-unfinished",
            "s_ckpt",
            "LATEST",
            "restart.7.base",
            "a_prev.cpt",
            "0.25",
            "wrfrst_d01_x",
            "rpointer.atm.7",
            "rcf",
            "x.coor.old",
            "p.save",
            "p.xml",
            "a_hdf5_chk_01",
            "chk1.temp",
            "a.pt",
            "data",
            "",
            "\u{e9}\n",
            "rng_state_0.pth",
            "trainer_state.json",
            "epoch_1_step_2",
        ];
        let mut found = 0;
        for _ in 0..2_000 {
            let count = random.random_range(1..5);
            let names: Vec<&str> = (0..count)
                .map(|_| words[random.random_range(0..words.len())])
                .collect();
            let path = names.join("/").into_bytes();
            let alone = set.rules().iter().enumerate().filter_map(|(rule, one)| {
                let role = role_of(one, &path)?;
                Some(RuleMatch { rule, role })
            });
            let alone: Vec<RuleMatch> = alone.collect();
            found += alone.len();
            assert_eq!(set.locate(&path).matches, alone, "{names:?}");
        }
        assert!(found > 200, "the paths are those of checkpoints");
    }
}
