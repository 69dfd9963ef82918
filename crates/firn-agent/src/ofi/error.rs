//! Errors of libfabric, the library for reads of other hosts' memory, and of its use. Each text says how to proceed.

use std::fmt;
use std::time::Duration;

/// The operation of libfabric that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening a device and the objects of an endpoint.
    Open,
    /// Taking the address of another endpoint.
    Connect,
    /// Reading the memory of another host.
    Read,
    /// Closing an endpoint.
    Close,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open an endpoint",
            Self::Connect => "use the address of the other host's endpoint",
            Self::Read => "read the memory of the other host",
            Self::Close => "close an endpoint",
        })
    }
}

/// The reason why an endpoint cannot be opened, or cannot read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OfiError {
    /// libfabric is not installed or cannot be loaded.
    #[error(
        "libfabric.so.1 cannot be loaded ({why}): install libfabric (Debian: libfabric1), or use the transport tcp"
    )]
    NoLibrary {
        /// Message of the dynamic loader.
        why: String,
    },
    /// libfabric has no device for the wanted provider, or does not know it.
    #[error(
        "libfabric has no provider {wanted} for reads of remote memory here (it has: {found}); `fi_info` lists them, and the transport tcp needs none"
    )]
    NoProvider {
        /// The wanted provider.
        wanted: String,
        /// The available providers.
        found: String,
    },
    /// The provider cannot register memory.
    #[error(
        "the provider {provider} cannot register {bytes} bytes of memory: {why}{}",
        memlock_advice(*limit)
    )]
    Register {
        /// Name of the provider.
        provider: String,
        /// Size of the memory.
        bytes: usize,
        /// Message of libfabric.
        why: String,
        /// RLIMIT_MEMLOCK, if it is less than `bytes`.
        limit: Option<u64>,
    },
    /// Another operation failed.
    #[error("the provider {provider} cannot {operation}: {why}")]
    Failed {
        /// Name of the provider.
        provider: String,
        /// The operation.
        operation: Operation,
        /// Message of libfabric.
        why: String,
    },
    /// The other host described a region, an address or a block that cannot exist.
    #[error("the other host described memory that cannot exist: {0}")]
    Implausible(&'static str),
    /// No read was completed for too long.
    #[error("the provider {provider} completed no read for {} s: check that the other host runs, and that the network lets this provider through", limit.as_secs())]
    Silent {
        /// Name of the provider.
        provider: String,
        /// Time without a complete read.
        limit: Duration,
    },
}

impl OfiError {
    /// Whether another connection may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Failed { operation, .. } => {
                matches!(operation, Operation::Read | Operation::Connect)
            }
            Self::Silent { .. } => true,
            _ => false,
        }
    }
}

fn memlock_advice(limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!(
            "; registered memory is locked, and a process may lock only {limit} bytes here (RLIMIT_MEMLOCK): raise \
             this limit with `ulimit -l unlimited`, LimitMEMLOCK=infinity of the service, or \
             PropagateResourceLimitsExcept=MEMLOCK of Slurm, or use the transport tcp"
        ),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_memory_lock_limit_says_how_to_raise_it() {
        let message = |limit| {
            let error = OfiError::Register {
                provider: "verbs".into(),
                bytes: 1 << 30,
                why: "Cannot allocate memory".into(),
                limit,
            };
            error.to_string()
        };
        let with_limit = message(Some(8 << 20));
        assert!(
            with_limit.contains("8388608") && with_limit.contains("ulimit -l"),
            "{with_limit}"
        );
        assert!(!message(None).contains("RLIMIT_MEMLOCK"));
    }
}
