//! Opens the lock service of a mount's tokens, flock or etcd (`tokens=flock|etcd`). A *token* is the lock that lets one
//! host at a time write to a lane (one I/O server).
//!
//! Promises
//! * If the locks of the file system do not reach other hosts, the mount is refused before it writes anything.
//! * An etcd that does not answer does not prevent a mount. It is reported, and drains continue without tokens.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{DirBacking, Volume};
use firn_config::{Options, TokenService};
use firn_etcd::{Client, EtcdService};
use firn_hosts::LeaseUse;
use firn_hosts::tokens::{FlockService, LockService, TokenLimits, Tokens};

use crate::error::AttachError;
use crate::host_lease::{HostLease, open_backing, own_error};
use crate::host_name::host_name;
use crate::peers::terms_from_options;

/// The opened lock service, from which the lock of each lane is made.
pub(crate) struct TokenSource {
    kind: SourceKind,
    host: String,
    limits: TokenLimits,
}

enum SourceKind {
    Flock {
        base: Arc<DirBacking>,
        dir: <DirBacking as Volume>::Inode,
    },
    Etcd {
        client: Arc<Client>,
        group: String,
    },
}

impl TokenSource {
    /// Opens the source of tokens that the options name; `None` if the mount has no tokens. A token is the lock that
    /// lets one host at a time write to a lane (I/O server).
    ///
    /// With flock(2) the host takes its lease, a locked file in the backing. The lease shows other hosts that this one
    /// is alive, and thereby whether locks reach them.
    pub(crate) fn open(
        backing: &Path,
        options: &Options,
        lease: &mut HostLease,
        notice: &mut dyn FnMut(String),
    ) -> Result<Option<Self>, AttachError> {
        let host = match options.tokens {
            TokenService::None => return Ok(None),
            TokenService::Flock | TokenService::Etcd => host_name(options)?,
        };
        let limits = TokenLimits {
            hold: Duration::from_millis(options.token_hold_ms),
            wait: Duration::from_millis(options.token_wait_ms),
        };
        let kind = if options.tokens == TokenService::Flock {
            open_flock(backing, options, &host, lease)?
        } else {
            open_etcd(backing, options, &host, limits.wait, notice)?
        };
        Ok(Some(Self { kind, host, limits }))
    }

    /// Starts the tokens of `lane_count` lanes.
    pub(crate) fn start(&self, lane_count: usize) -> io::Result<Tokens> {
        let services = (0..lane_count)
            .map(|lane| self.make_lock_service(lane))
            .collect();
        Tokens::start(services, self.limits)
    }

    /// Returns the lock service of one lane.
    fn make_lock_service(&self, lane: usize) -> Box<dyn LockService> {
        let host = &self.host;
        match &self.kind {
            SourceKind::Flock { base, dir } => {
                Box::new(FlockService::new(Arc::clone(base), dir.clone(), lane, host))
            }
            SourceKind::Etcd { client, group } => Box::new(EtcdService::new(
                Arc::clone(client),
                group,
                lane,
                host,
                self.limits.wait,
            )),
        }
    }
}

/// Opens the directory of token files in the backing. There is one for each lane (I/O server); the host that may write
/// to the lane has the file locked with flock(2).
///
/// First takes this host's lease, a locked file by which other hosts see that it is alive. That fails if locks do not
/// reach other hosts.
fn open_flock(
    backing: &Path,
    options: &Options,
    host: &str,
    lease: &mut HostLease,
) -> Result<SourceKind, AttachError> {
    let serves_logs = false;
    let terms = terms_from_options(options, serves_logs);
    lease.begin_use(LeaseUse::Tokens, host, &terms)?;
    let base = open_backing(backing)?;
    let dir = firn_hosts::tokens::make_dir(&base).map_err(own_error(backing))?;
    Ok(SourceKind::Flock {
        base: Arc::new(base),
        dir,
    })
}

/// Opens the connection to etcd, which manages tokens, the locks of lanes (I/O servers). An etcd that does not answer
/// is only reported: until then, several hosts may write to a lane. Hosts with the same `group` exclude each other; by
/// default that is the backing's.
fn open_etcd(
    backing: &Path,
    options: &Options,
    host: &str,
    answer_timeout: Duration,
    notice: &mut dyn FnMut(String),
) -> Result<SourceKind, AttachError> {
    let endpoints: Vec<String> = options
        .token_endpoints
        .iter()
        .map(|address| format!("http://{address}"))
        .collect();
    let client = Client::new(&endpoints, answer_timeout).map_err(AttachError::TokenEndpoints)?;
    let group = match &options.token_group {
        Some(group) => group.clone(),
        None => {
            let base = open_backing(backing)?;
            firn_hosts::tokens::find_or_make_group(&base, host).map_err(own_error(backing))?
        }
    };
    if let Err(error) = client.check() {
        notice(format!(
            "tokens: {error}; until etcd answers, several hosts may write to a lane at the same time"
        ));
    }
    Ok(SourceKind::Etcd {
        client: Arc::new(client),
        group,
    })
}
