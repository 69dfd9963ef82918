//! From all sources to one set of options, and where each value came from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_format::quote::quoted;

use crate::error::ConfigError;
use crate::file::read_file;
use crate::given::{Given, Origin};
use crate::kernel::KernelFlag;
use crate::minus_o::MinusO;
use crate::options::Options;
use crate::table::{IMPLIED, Implied, RULES, Row, TABLE, row};

/// What is around the process and holds options.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The environment.
    pub env: BTreeMap<String, OsString>,
    /// The user's file, whether or not it exists.
    pub user_file: Option<PathBuf>,
    /// The system's file, whether or not it exists.
    pub system_file: Option<PathBuf>,
}

impl Surroundings {
    /// Those of this process: `$XDG_CONFIG_HOME/firn/firn.toml` (or `~/.config/…`), `/etc/firn/firn.toml`.
    pub fn of_process() -> Self {
        // A variable whose name is not UTF-8 sets no option: leave it out instead of failing on it.
        let env: BTreeMap<String, OsString> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .collect();
        let absolute = |name: &str| {
            env.get(name)
                .filter(|dir| Path::new(dir).is_absolute())
                .map(PathBuf::from)
        };
        let home = absolute("XDG_CONFIG_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".config")));
        Self {
            user_file: home.map(|dir| dir.join("firn/firn.toml")),
            system_file: Some(PathBuf::from("/etc/firn/firn.toml")),
            env,
        }
    }
}

/// Everything that may give options.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// From flags.
    pub flags: Vec<Given>,
    /// From `-o`.
    pub minus_o: MinusO,
    /// The rest.
    pub surroundings: Surroundings,
}

/// Options and where they came from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The options.
    pub options: Options,
    /// One origin for each row of the table, in its order.
    pub origins: Vec<(&'static Row, Origin)>,
}

impl Sources {
    /// Asks the sources in order; every value that stands anywhere is checked, also where it loses.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        self.refuse_disagreement()?;
        let mut resolved = Resolved {
            options: Options::default(),
            origins: TABLE.iter().map(|row| (row, Origin::Default)).collect(),
        };
        for file in [&self.surroundings.system_file, &self.surroundings.user_file]
            .into_iter()
            .flatten()
        {
            resolved.take(&read_file(file)?, &Origin::File(file.clone()))?;
        }
        for row in &TABLE {
            if let Some(text) = self.surroundings.env.get(&row.env()) {
                resolved.take(
                    &[Given {
                        row,
                        text: text.clone(),
                    }],
                    &Origin::Environment(row.env()),
                )?;
            }
        }
        resolved.take(&self.minus_o.given, &Origin::MinusO)?;
        resolved.take(&self.flags, &Origin::Flag)?;
        resolved.options.kernel_flags = settle(&self.minus_o.kernel_flags);
        resolved.add_implied()?;
        resolved.check()?;
        resolved.options.settle();
        Ok(resolved)
    }

    fn refuse_disagreement(&self) -> Result<(), ConfigError> {
        for flag in &self.flags {
            let same = self
                .minus_o
                .given
                .iter()
                .rev()
                .find(|given| given.row.name == flag.row.name);
            if let Some(other) = same.filter(|other| other.text != flag.text) {
                return Err(ConfigError::Twice {
                    name: flag.row.name,
                    flag: quoted(flag.text.as_bytes()),
                    minus_o: quoted(other.text.as_bytes()),
                });
            }
        }
        Ok(())
    }
}

impl Resolved {
    /// Options that are there, with these over them.
    pub(crate) fn change(options: &Options, changes: &MinusO) -> Result<Options, ConfigError> {
        let mut resolved = Self {
            options: options.clone(),
            origins: TABLE.iter().map(|row| (row, Origin::Default)).collect(),
        };
        resolved.take(&changes.given, &Origin::MinusO)?;
        resolved.add_implied()?;
        resolved.check()?;
        resolved.options.settle();
        Ok(resolved.options)
    }

    fn take(&mut self, given: &[Given], origin: &Origin) -> Result<(), ConfigError> {
        for Given { row, text } in given {
            let name = row.name;
            let value = row.kind.parse(text).map_err(|why| ConfigError::Value {
                origin: origin.clone(),
                name,
                why,
            })?;
            (row.set)(&mut self.options, value);
            for (other, place) in &mut self.origins {
                if other.name == name {
                    *place = origin.clone();
                }
            }
        }
        Ok(())
    }

    /// Gives options the values that others bring along.
    fn add_implied(&mut self) -> Result<(), ConfigError> {
        for implied in &IMPLIED {
            let Implied { name, other, .. } = *implied;
            if !self.is_set(name) {
                continue;
            }
            if *self.origin(other) == Origin::Default
                && let Some(row) = row(other)
            {
                let text = OsString::from(implied.value);
                self.take(&[Given { row, text }], &Origin::Implied(name))?;
            }
            if !(implied.fits)(&self.options) {
                return Err(self.contradiction([name, other], implied.advice));
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), ConfigError> {
        match RULES.iter().find(|rule| (rule.broken)(&self.options)) {
            Some(rule) => Err(self.contradiction(rule.names, rule.advice)),
            None => Ok(()),
        }
    }

    fn contradiction(&self, names: [&str; 2], advice: &'static str) -> ConfigError {
        let [first, second] = names.map(|name| self.describe(name));
        ConfigError::Contradiction {
            first,
            second,
            advice,
        }
    }

    /// Whether a source gives an option another value than its default.
    fn is_set(&self, name: &str) -> bool {
        *self.origin(name) != Origin::Default
            && row(name).is_some_and(|row| (row.get)(&self.options) != row.default)
    }

    fn origin(&self, name: &str) -> &Origin {
        let found = self.origins.iter().find(|(row, _)| row.name == name);
        found.map_or(&Origin::Default, |(_, origin)| origin)
    }

    /// `name=value (origin)`.
    fn describe(&self, name: &str) -> String {
        self.origins
            .iter()
            .find(|(row, _)| row.name == name)
            .map_or_else(String::new, |(row, origin)| {
                format!("{name}={} ({origin})", (row.get)(&self.options))
            })
    }
}

/// Of flags that undo each other the last one counts, as in mount(8).
fn settle(flags: &[KernelFlag]) -> Vec<KernelFlag> {
    let mut settled: Vec<KernelFlag> = Vec::new();
    for flag in flags {
        settled.retain(|other| other != flag && Some(*other) != flag.opposite());
        settled.push(*flag);
    }
    settled
}

#[cfg(test)]
mod tests;
