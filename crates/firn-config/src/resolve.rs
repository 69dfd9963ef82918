//! Merges the options of all sources, and records which source gave each value.
//!
//! Sources are applied from the weakest to the strongest, so a later value replaces an earlier one. Then come the
//! implied values, the contradictions, and the values that `auto` stands for.

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

/// Sources outside the command line.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Variables of the environment.
    pub env: BTreeMap<String, OsString>,
    /// Path of the user's file; the file need not exist.
    pub user_file: Option<PathBuf>,
    /// Path of the system's file; the file need not exist.
    pub system_file: Option<PathBuf>,
}

impl Surroundings {
    /// Returns the sources of this process: its environment, `$XDG_CONFIG_HOME/firn/firn.toml` (or `~/.config/…`), and
    /// `/etc/firn/firn.toml`.
    pub fn of_process() -> Self {
        // A variable whose name is not UTF-8 belongs to no option, so it is skipped without an error.
        let env: BTreeMap<String, OsString> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .collect();
        let absolute = |name: &str| {
            env.get(name)
                .filter(|dir| Path::new(dir).is_absolute())
                .map(PathBuf::from)
        };
        let config_dir = absolute("XDG_CONFIG_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".config")));
        Self {
            user_file: config_dir.map(|dir| dir.join("firn/firn.toml")),
            system_file: Some(PathBuf::from("/etc/firn/firn.toml")),
            env,
        }
    }
}

/// All sources of options.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Options from flags.
    pub flags: Vec<Given>,
    /// Options from `-o`.
    pub minus_o: MinusO,
    /// The environment and the files.
    pub surroundings: Surroundings,
}

/// The merged options, and the source of each.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The merged options.
    pub options: Options,
    /// The source of each option, in the order of the table.
    pub origins: Vec<(&'static Row, Origin)>,
}

impl Sources {
    /// Merges all sources. Each value is checked, even if a stronger source replaces it.
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
        resolved.options.kernel_flags = remove_undone_flags(&self.minus_o.kernel_flags);
        resolved.add_implied()?;
        resolved.check()?;
        resolved.options.settle();
        Ok(resolved)
    }

    /// Refuses an option to which a flag and `-o` give different values.
    fn refuse_disagreement(&self) -> Result<(), ConfigError> {
        for flag in &self.flags {
            let by_minus_o = self
                .minus_o
                .given
                .iter()
                .rev()
                .find(|given| given.row.name == flag.row.name);
            if let Some(other) = by_minus_o.filter(|other| other.text != flag.text) {
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
    /// Returns `options` with `changes` applied and checked.
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

    /// Sets the options that one source gives.
    fn take(&mut self, given: &[Given], origin: &Origin) -> Result<(), ConfigError> {
        for Given { row, text } in given {
            let name = row.name;
            let value = row.kind.parse(text).map_err(|why| ConfigError::Value {
                origin: origin.clone(),
                name,
                why,
            })?;
            (row.set)(&mut self.options, value);
            for (other, other_origin) in &mut self.origins {
                if other.name == name {
                    *other_origin = origin.clone();
                }
            }
        }
        Ok(())
    }

    /// Sets the options that other options imply. A source may have set such an option already: its value is retained if it
    /// fits, and is an error otherwise.
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

    /// Refuses options that contradict each other.
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

    /// Whether a source gives the option a value that differs from its default.
    fn is_set(&self, name: &str) -> bool {
        *self.origin(name) != Origin::Default
            && row(name).is_some_and(|row| (row.get)(&self.options) != row.default)
    }

    fn origin(&self, name: &str) -> &Origin {
        let entry = self.origins.iter().find(|(row, _)| row.name == name);
        entry.map_or(&Origin::Default, |(_, origin)| origin)
    }

    /// Formats an option as `name=value (origin)`.
    fn describe(&self, name: &str) -> String {
        self.origins
            .iter()
            .find(|(row, _)| row.name == name)
            .map_or_else(String::new, |(row, origin)| {
                format!("{name}={} ({origin})", (row.get)(&self.options))
            })
    }
}

/// Removes each flag that a later flag undoes, as mount(8) does.
fn remove_undone_flags(flags: &[KernelFlag]) -> Vec<KernelFlag> {
    let mut flags_in_force: Vec<KernelFlag> = Vec::new();
    for flag in flags {
        flags_in_force.retain(|other| other != flag && Some(*other) != flag.opposite());
        flags_in_force.push(*flag);
    }
    flags_in_force
}

#[cfg(test)]
mod tests;
