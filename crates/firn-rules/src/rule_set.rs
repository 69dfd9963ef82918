//! The value of the option `rules`: names of built-in rules and files of a site's own.

use std::io;

use crate::built_in::BUILT_IN;
use crate::language::{RULES_BYTES_MAX, RULES_MAX, Rule, RuleError, nearest, parse_rules};

/// Why rules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuleSetError {
    /// No built-in rule has this name.
    #[error(
        "there is no rule `{name}`{}; `firn rules list` shows the names, and a file is given by a path with a slash, as ./site.rules",
        nearest.as_ref().map(|word| format!("; did you mean `{word}`?")).unwrap_or_default()
    )]
    Unknown {
        /// The word.
        name: String,
        /// The nearest name.
        nearest: Option<String>,
    },
    /// A file cannot be read.
    #[error("cannot read the rules in {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A file is too long.
    #[error("{path} has more than {} KiB: give a file of rules", RULES_BYTES_MAX >> 10)]
    Long {
        /// The file.
        path: String,
    },
    /// A rule has a mistake.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A name is there twice.
    #[error("rule `{name}` is there twice: give another name to one of them")]
    Twice {
        /// The name.
        name: String,
    },
    /// There is none, or there are too many.
    #[error("expected 1 to {RULES_MAX} rules, found {found}")]
    Count {
        /// How many there are.
        found: usize,
    },
}

/// The rules that a list names. `read` gives the contents of a file, [`RULES_BYTES_MAX`] and one more byte at most.
pub fn load_rules(
    list: &str,
    mut read: impl FnMut(&str) -> io::Result<String>,
) -> Result<Vec<Rule>, RuleSetError> {
    let built_in = parse_rules(BUILT_IN, "built-in rules")?;
    let mut rules: Vec<Rule> = Vec::new();
    for word in list
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty())
    {
        let named = if word.contains('/') {
            let text = read(word).map_err(|source| RuleSetError::Read {
                path: word.to_owned(),
                source,
            })?;
            if text.len() > RULES_BYTES_MAX {
                return Err(RuleSetError::Long {
                    path: word.to_owned(),
                });
            }
            parse_rules(&text, word)?
        } else {
            let found = built_in.iter().find(|rule| rule.name == word);
            let found = found.ok_or_else(|| RuleSetError::Unknown {
                name: word.to_owned(),
                nearest: nearest(word, built_in.iter().map(|rule| rule.name.as_str())),
            })?;
            vec![found.clone()]
        };
        for rule in named {
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
    Ok(rules)
}
