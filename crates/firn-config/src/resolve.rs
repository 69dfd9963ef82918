//! Merges the options of all sources, and records which source gave each value.
//!
//! Sources (files, the environment, the command line) are applied from the weakest to the strongest, so a later value
//! replaces an earlier one. Then come
//! * the implied values, which options set for others ([`IMPLIED`]);
//! * the errors for values that contradict each other ([`CONTRADICTIONS`]);
//! * the values that `auto` stands for.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_format::quote::quoted;

use crate::error::ConfigError;
use crate::file::read_file;
use crate::kernel::KernelFlag;
use crate::minus_o::MinusO;
use crate::options::Options;
use crate::table::{CONTRADICTIONS, IMPLIED, Implied, Row, TABLE, row};
use crate::unchecked_option::{Origin, UncheckedOption};

/// Sources outside the command line.
#[derive(Clone, Debug, Default)]
pub struct ProcessSources {
    /// Variables of the environment.
    pub env: BTreeMap<String, OsString>,
    /// Path of the user's file; the file need not exist.
    pub user_file: Option<PathBuf>,
    /// Path of the system's file; the file need not exist.
    pub system_file: Option<PathBuf>,
}

impl ProcessSources {
    /// Returns the sources of this process: its environment, `$XDG_CONFIG_HOME/firn/firn.toml` (or `~/.config/…`), and
    /// `/etc/firn/firn.toml`.
    pub fn of_process() -> Self {
        let mut env = BTreeMap::new();
        for (name, value) in std::env::vars_os() {
            // A variable whose name is not UTF-8 belongs to no option, so it is skipped without an error.
            if let Ok(name) = name.into_string() {
                env.insert(name, value);
            }
        }
        let absolute_dir = |name: &str| {
            let dir = Path::new(env.get(name)?);
            dir.is_absolute().then(|| dir.to_owned())
        };
        let config_dir =
            absolute_dir("XDG_CONFIG_HOME").or_else(|| Some(absolute_dir("HOME")?.join(".config")));
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
    pub flags: Vec<UncheckedOption>,
    /// Options from `-o`.
    pub minus_o: MinusO,
    /// The environment and the configuration files of this process.
    pub surroundings: ProcessSources,
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
    /// Returns the options that all sources together set. The sources are, from the weakest to the strongest: the
    /// system's file, the user's file, the environment, `-o` and the flags. A stronger source replaces values of weaker
    /// ones, but each value is checked.
    ///
    /// Fails if a source has an invalid value, or if options contradict each other.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        self.check_flags_against_minus_o()?;
        let mut resolved = Resolved::from_options(Options::default());
        let ProcessSources {
            env,
            user_file,
            system_file,
        } = &self.surroundings;
        // From the weakest source to the strongest.
        for file in [system_file, user_file].into_iter().flatten() {
            resolved.set_options(&read_file(file)?, &Origin::File(file.clone()))?;
        }
        for row in &TABLE {
            let variable = row.env();
            if let Some(text) = env.get(&variable) {
                let text = text.clone();
                let option = UncheckedOption { row, text };
                resolved.set_options(&[option], &Origin::Environment(variable))?;
            }
        }
        resolved.set_options(&self.minus_o.options, &Origin::MinusO)?;
        resolved.set_options(&self.flags, &Origin::Flag)?;
        // Of two opposite flags of the kernel, such as `exec` and `noexec`, the later one stays.
        resolved.options.kernel_flags = remove_undone_flags(&self.minus_o.kernel_flags);
        resolved.add_implied()?;
        resolved.check_contradictions()?;
        // Replaces each value `auto` by the value that it stands for, which depends on other options.
        resolved.options.settle();
        Ok(resolved)
    }

    /// Refuses an option to which a flag and `-o` give different values.
    fn check_flags_against_minus_o(&self) -> Result<(), ConfigError> {
        for flag in &self.flags {
            // If the list names an option several times, the last one counts.
            let mut minus_o_options = self.minus_o.options.iter().rev();
            let Some(last) = minus_o_options.find(|option| option.row.name == flag.row.name) else {
                continue;
            };
            if last.text != flag.text {
                return Err(ConfigError::Twice {
                    name: flag.row.name,
                    flag: quoted(flag.text.as_bytes()),
                    minus_o: quoted(last.text.as_bytes()),
                });
            }
        }
        Ok(())
    }
}

impl Resolved {
    /// Returns `options` with `changes` applied and checked.
    pub(crate) fn change(options: &Options, changes: &MinusO) -> Result<Options, ConfigError> {
        let mut resolved = Self::from_options(options.clone());
        resolved.set_options(&changes.options, &Origin::MinusO)?;
        resolved.add_implied()?;
        resolved.check_contradictions()?;
        resolved.options.settle();
        Ok(resolved.options)
    }

    /// Begins with these options, as if no source had given them.
    fn from_options(options: Options) -> Self {
        Self {
            options,
            origins: TABLE.iter().map(|row| (row, Origin::Default)).collect(),
        }
    }

    /// Sets the options that one source gives, after a check of their values, and records `origin` as their source.
    fn set_options(
        &mut self,
        options: &[UncheckedOption],
        origin: &Origin,
    ) -> Result<(), ConfigError> {
        for UncheckedOption { row, text } in options {
            let value = row.kind.parse(text).map_err(|why| ConfigError::Value {
                origin: origin.clone(),
                name: row.name,
                why,
            })?;
            (row.set)(&mut self.options, value);
            for (origin_row, option_origin) in &mut self.origins {
                if origin_row.name == row.name {
                    *option_origin = origin.clone();
                }
            }
        }
        Ok(())
    }

    /// Sets the options that other options imply ([`IMPLIED`]). A source may have set such an option already: its value
    /// is retained if it satisfies the other option, and is an error otherwise. Called after all sources are applied.
    fn add_implied(&mut self) -> Result<(), ConfigError> {
        for implied in &IMPLIED {
            let Implied {
                name, implied_name, ..
            } = *implied;
            if !self.is_set(name) {
                continue;
            }
            let has_default = *self.origin(implied_name) == Origin::Default;
            if has_default && let Some(option_row) = row(implied_name) {
                let text = OsString::from(implied.value);
                let option = UncheckedOption {
                    row: option_row,
                    text,
                };
                self.set_options(&[option], &Origin::Implied(name))?;
            }
            if !(implied.is_satisfied)(&self.options) {
                return Err(self.contradiction_error([name, implied_name], implied.advice));
            }
        }
        Ok(())
    }

    /// Refuses options that contradict each other.
    fn check_contradictions(&self) -> Result<(), ConfigError> {
        for contradiction in &CONTRADICTIONS {
            if (contradiction.is_present)(&self.options) {
                return Err(self.contradiction_error(contradiction.names, contradiction.advice));
            }
        }
        Ok(())
    }

    fn contradiction_error(&self, names: [&str; 2], advice: &'static str) -> ConfigError {
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
