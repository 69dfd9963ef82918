//! What carries bytes between an agent and a puller: the connection itself, or libfabric.

use std::fmt;
use std::str::FromStr;

use crate::ofi::{Library, OfiError, has_devices, is_hardware};

/// Providers that a puller may name, and bytes of a name: more than any libfabric has.
const PROVIDERS_MAX: usize = 64;
const PROVIDER_BYTES_MAX: usize = 64;

/// `--transport`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Hardware that reads remote memory where both sides have it, or else the connection.
    #[default]
    Auto,
    /// The connection.
    Tcp,
    /// libfabric, and one of its providers or the best.
    Ofi {
        /// Its name, such as `verbs` or `tcp;ofi_rxm`.
        provider: Option<String>,
    },
}

/// How bytes of files reach a puller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carriage {
    /// What carries them.
    pub transport: TransportChoice,
    /// Whether the agent sums up what libfabric reads; over the connection it always does.
    pub sums: bool,
}

impl Carriage {
    /// The connection, whatever hardware there is.
    pub fn connection() -> Self {
        Self {
            transport: TransportChoice::Tcp,
            sums: true,
        }
    }
}

impl Default for Carriage {
    fn default() -> Self {
        Self {
            transport: TransportChoice::Auto,
            sums: true,
        }
    }
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "tcp" => Ok(Self::Tcp),
            None if text == "ofi" => Ok(Self::Ofi { provider: None }),
            Some(("ofi", provider)) if !provider.is_empty() && !provider.contains('\0') => {
                let provider = Some(provider.to_owned());
                Ok(Self::Ofi { provider })
            }
            _ => Err("it is auto, tcp, ofi or ofi:PROVIDER, such as ofi:verbs".into()),
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Tcp => f.write_str("tcp"),
            Self::Ofi { provider: None } => f.write_str("ofi"),
            Self::Ofi {
                provider: Some(provider),
            } => write!(f, "ofi:{provider}"),
        }
    }
}

impl TransportChoice {
    /// An error where it names what this host does not have.
    pub(crate) fn check(&self) -> Result<(), OfiError> {
        match self {
            Self::Auto | Self::Tcp => Ok(()),
            Self::Ofi { provider } => find_providers(provider.as_deref()).map(drop),
        }
    }

    /// The providers of this host that a puller may ask an agent for, the best first; none: the connection it is.
    pub(crate) fn wanted_providers(&self) -> Result<Vec<String>, OfiError> {
        match self {
            Self::Tcp => Ok(Vec::new()),
            // Without a device there is nothing to load.
            Self::Auto if !has_devices() => Ok(Vec::new()),
            Self::Auto => {
                let found = Library::load().map(Library::providers);
                let names = found
                    .unwrap_or_default()
                    .into_iter()
                    .map(|found| found.name);
                Ok(names.filter(|name| is_hardware(name)).collect())
            }
            Self::Ofi { provider } => find_providers(provider.as_deref()),
        }
    }

    /// Whether it insists on reads by libfabric, which encrypts nothing.
    pub fn is_ofi(&self) -> bool {
        matches!(self, Self::Ofi { .. })
    }

    /// The first of the providers that a puller asks for which an agent may serve by. They are the puller's words.
    pub(crate) fn choose(&self, wanted: &[String]) -> Result<String, String> {
        let is_long = |name: &String| name.len() > PROVIDER_BYTES_MAX;
        if wanted.len() > PROVIDERS_MAX || wanted.iter().any(is_long) {
            return Err("no host has as many providers of libfabric, or such names".into());
        }
        let there = match self {
            Self::Tcp => {
                return Err("this agent serves over its connections only (--transport tcp)".into());
            }
            Self::Auto => find_providers(None),
            Self::Ofi { provider } => find_providers(provider.as_deref()),
        };
        let there = there.map_err(|error| error.to_string())?;
        let chosen = wanted.iter().find(|name| there.contains(*name));
        chosen.cloned().ok_or_else(|| {
            format!(
                "no provider of libfabric that both hosts have: the agent's are {}, the puller's {}",
                there.join(", "),
                wanted.join(", ")
            )
        })
    }
}

/// Providers of this host: those of a name, or all.
fn find_providers(wanted: Option<&str>) -> Result<Vec<String>, OfiError> {
    let found = Library::load()?.providers();
    let is_wanted = |provider: &&crate::ofi::Provider| match wanted {
        Some(wanted) => provider.is_named(wanted),
        None => true,
    };
    let named: Vec<_> = found.iter().filter(is_wanted).cloned().collect();
    if named.is_empty() {
        let names: Vec<_> = found.into_iter().map(|provider| provider.name).collect();
        return Err(OfiError::NoProvider {
            wanted: wanted.unwrap_or("at all").into(),
            found: names.join(", "),
        });
    }
    Ok(named.into_iter().map(|provider| provider.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_what_it_is_written_as_and_no_endless_one_is_looked_at() {
        for text in ["auto", "tcp", "ofi", "ofi:verbs", "ofi:tcp;ofi_rxm"] {
            let choice: TransportChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
        }
        for choice in [
            TransportChoice::Auto,
            TransportChoice::Ofi { provider: None },
        ] {
            let refused = |wanted: Vec<String>| choice.choose(&wanted).unwrap_err();
            assert!(refused(vec!["\u{1}".repeat(65)]).len() < 100);
            assert!(refused(vec!["x".into(); 65]).len() < 100);
        }
        for text in ["", "ofi:", "tcp:x", "verbs", "ofi:a\0b", "OFI"] {
            assert!(text.parse::<TransportChoice>().is_err(), "{text}");
        }
    }
}
