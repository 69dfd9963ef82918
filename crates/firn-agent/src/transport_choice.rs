//! The choice of the transport of files' bytes between hosts: the connection itself, or a *provider* of libfabric, a
//! driver for one kind of RDMA network.
//!
//! The *puller*, which copies files, names the providers that it has, the best first. The *agent*, which serves the
//! files of a mount, chooses the first one that it has and that its own option allows. The names come from another
//! host, so their number and length are bounded.

use std::fmt;
use std::str::FromStr;

use crate::ofi::{Library, OfiError, has_devices, is_hardware};

/// Maximum number of providers that a puller may name: more than any libfabric has.
const PROVIDERS_MAX: usize = 64;
/// Maximum number of bytes of a provider's name.
const PROVIDER_BYTES_MAX: usize = 64;

/// The option `--transport`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Hardware that reads remote memory, if both sides have it; otherwise the connection.
    #[default]
    Auto,
    /// The connection.
    Tcp,
    /// libfabric.
    Ofi {
        /// Name of the provider, such as `verbs` or `tcp;ofi_rxm`; `None` means the best one.
        provider: Option<String>,
    },
}

/// How the bytes of files reach a puller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataTransport {
    /// The transport.
    pub transport: TransportChoice,
    /// Whether the agent sends MACs of bytes that libfabric reads. Bytes over the connection are always authenticated.
    pub sums: bool,
}

impl DataTransport {
    /// Sends bytes over the connection, even if both sides have faster hardware.
    pub fn connection_only() -> Self {
        Self {
            transport: TransportChoice::Tcp,
            sums: true,
        }
    }
}

impl Default for DataTransport {
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
            // libfabric takes the name as a C string.
            Some(("ofi", provider)) if !provider.is_empty() && !provider.contains('\0') => {
                Ok(Self::Ofi {
                    provider: Some(provider.to_owned()),
                })
            }
            _ => Err("expected auto, tcp, ofi or ofi:PROVIDER, such as ofi:verbs".into()),
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
    /// Checks that this host has the named provider, or any provider for `ofi` without a name.
    pub(crate) fn check(&self) -> Result<(), OfiError> {
        match self {
            Self::Auto | Self::Tcp => Ok(()),
            Self::Ofi { provider } => find_providers(provider.as_deref()).map(drop),
        }
    }

    /// Returns the providers of this host that a puller names to an agent, the best first. If there are none, bytes are
    /// received over the connection.
    pub(crate) fn wanted_providers(&self) -> Result<Vec<String>, OfiError> {
        match self {
            Self::Tcp => Ok(Vec::new()),
            // Without a device there is no hardware provider, so libfabric need not be loaded.
            Self::Auto if !has_devices() => Ok(Vec::new()),
            Self::Auto => Ok(hardware_providers()),
            Self::Ofi { provider } => find_providers(provider.as_deref()),
        }
    }

    /// Whether only libfabric is allowed. Libfabric cannot encrypt.
    pub fn is_ofi(&self) -> bool {
        matches!(self, Self::Ofi { .. })
    }

    /// Chooses a provider (libfabric's driver for one network) for the bytes that this host sends: the first of
    /// `wanted` that this host has and that this option allows.
    ///
    /// `wanted` are the providers of the other host, the puller, the best first. The error is a text for it.
    pub(crate) fn choose(&self, wanted: &[String]) -> Result<String, String> {
        let is_too_long = |name: &String| name.len() > PROVIDER_BYTES_MAX;
        if wanted.len() > PROVIDERS_MAX || wanted.iter().any(is_too_long) {
            return Err("the puller names more providers of libfabric, or longer names, than a host can have".into());
        }
        let named_provider = match self {
            Self::Tcp => {
                return Err(
                    "this agent sends bytes over its connections only (--transport tcp)".into(),
                );
            }
            Self::Auto => None,
            Self::Ofi { provider } => provider.as_deref(),
        };
        let available = find_providers(named_provider).map_err(|error| error.to_string())?;
        for name in wanted {
            if available.contains(name) {
                return Ok(name.clone());
            }
        }
        Err(format!(
            "the two hosts have no provider of libfabric in common: the agent has {}, the puller {}",
            available.join(", "),
            wanted.join(", ")
        ))
    }
}

/// Returns the names of this host's providers whose hardware answers reads. Returns none if libfabric cannot be loaded.
fn hardware_providers() -> Vec<String> {
    let Ok(library) = Library::load() else {
        return Vec::new();
    };
    let providers = library.providers().into_iter();
    providers
        .map(|provider| provider.name)
        .filter(|name| is_hardware(name))
        .collect()
}

/// Returns the names of this host's providers (libfabric's drivers for kinds of network), the best first: those that
/// match `wanted`, or all. Fails if there are none, or if libfabric cannot be loaded.
fn find_providers(wanted: Option<&str>) -> Result<Vec<String>, OfiError> {
    let mut all_names = Vec::new();
    let mut matching_names = Vec::new();
    for provider in Library::load()?.providers() {
        let is_wanted = wanted.is_none_or(|wanted| provider.is_named(wanted));
        if is_wanted {
            matching_names.push(provider.name.clone());
        }
        all_names.push(provider.name);
    }
    if matching_names.is_empty() {
        return Err(OfiError::NoProvider {
            // Without a name, the message says: libfabric has no provider at all.
            wanted: wanted.unwrap_or("at all").into(),
            found: all_names.join(", "),
        });
    }
    Ok(matching_names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_parsed_and_written_alike_and_long_lists_of_a_puller_are_refused() {
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
