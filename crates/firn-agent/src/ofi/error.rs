//! What can go wrong. Every text says what to do next.

use std::fmt;
use std::time::Duration;

/// What libfabric was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// To open a device and what an endpoint consists of.
    Open,
    /// To take the address of another endpoint.
    Connect,
    /// To read.
    Read,
    /// To let go of its memory.
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

/// Why there is no endpoint, or no bytes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OfiError {
    /// It is not installed, or cannot be used.
    #[error(
        "libfabric.so.1 cannot be loaded ({why}): install libfabric (Debian: libfabric1), or use the transport tcp"
    )]
    NoLibrary {
        /// The loader's words.
        why: String,
    },
    /// No device, or no such name.
    #[error(
        "libfabric has no provider {wanted} for reads of remote memory here (it has: {found}); `fi_info` lists them, and the transport tcp needs none"
    )]
    NoProvider {
        /// As asked for.
        wanted: String,
        /// The available ones.
        found: String,
    },
    /// Memory cannot be registered.
    #[error(
        "the provider {provider} cannot register {bytes} bytes of memory: {why}{}",
        memlock_advice(*limit)
    )]
    Register {
        /// Its name.
        provider: String,
        /// How many bytes.
        bytes: usize,
        /// libfabric's words.
        why: String,
        /// RLIMIT_MEMLOCK, where it is less than that.
        limit: Option<u64>,
    },
    /// Something else.
    #[error("the provider {provider} cannot {operation}: {why}")]
    Failed {
        /// Its name.
        provider: String,
        /// What was tried.
        operation: Operation,
        /// libfabric's words.
        why: String,
    },
    /// The other side said what cannot be.
    #[error("the other host described memory that cannot be: {0}")]
    Implausible(&'static str),
    /// No read was completed.
    #[error("the provider {provider} completed no read for {} s: is the other host there, and is its network open for it?", limit.as_secs())]
    Silent {
        /// Its name.
        provider: String,
        /// How long.
        limit: Duration,
    },
}

impl OfiError {
    /// Whether it may be over with another connection.
    pub fn may_pass(&self) -> bool {
        let is_read = |operation| matches!(operation, Operation::Read | Operation::Connect);
        match self {
            Self::Failed { operation, .. } => is_read(*operation),
            Self::Silent { .. } => true,
            _ => false,
        }
    }
}

fn memlock_advice(limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!(
            "; a process may lock {limit} bytes here (RLIMIT_MEMLOCK), and registered memory is locked: raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity of the service, or PropagateResourceLimitsExcept=MEMLOCK of Slurm, or use the transport tcp"
        ),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_lock_too_little_memory_is_told_how_to_lock_more() {
        let told = |limit| {
            let error = OfiError::Register {
                provider: "verbs".into(),
                bytes: 1 << 30,
                why: "Cannot allocate memory".into(),
                limit,
            };
            error.to_string()
        };
        let short = told(Some(8 << 20));
        assert!(
            short.contains("8388608") && short.contains("ulimit -l"),
            "{short}"
        );
        assert!(!told(None).contains("RLIMIT_MEMLOCK"));
    }
}
