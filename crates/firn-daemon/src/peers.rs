//! Compares how the hosts that have the same backing mounted use it.
//!
//! Each host with a lease in the backing stores beside the lease how it mounts: its *terms* ([`firn_hosts::Terms`]).
//! A host that mounts compares its terms with those of the hosts that are alive:
//!
//! | difference | effect on the host that mounts now |
//! |---|---|
//! | version of a format that hosts store for each other | the mount is refused |
//! | this host has `layout=log`, the other one reads no logs | the mount is refused |
//! | this host has `layout=plain`, the other one `layout=log` | this host reads and writes logs too, and reports it |
//! | `tokens`, `placement`, `lanes` or `servers`, version of Firn | reported at the mount and in the status |
//!
//! The refused differences would give wrong results; the reported ones only cost time.
//!
//! Hosts without any of these options are not compared, because they have no lease.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use firn_backing::DirBacking;
use firn_config::{Layout, Options, Placement, TokenService};
use firn_format::quote::quoted;
use firn_hosts::{Holder, Peer, PeerWatch, STALE_AFTER, Terms};
use parking_lot::Mutex;

use crate::error::AttachError;
use crate::host_lease::{open_backing, own_error};
use crate::host_name::host_name;

// The names of the terms, and below the values of `layout`, as hosts store them for each other.
const FORMATS: &str = "formats";
const VERSION: &str = "version";
const LAYOUT: &str = "layout";
const TOKENS: &str = "tokens";
const LANES: &str = "lanes";
/// The terms that are compared, in the order of the report.
const COMPARED: [&str; 5] = [FORMATS, LAYOUT, LANES, TOKENS, VERSION];

const LOG: &str = "log";
const PLAIN: &str = "plain";
/// Value of the layout for a plain layout with the log layer: files that other hosts log are read and written in logs.
const PLAIN_WITH_LOGS: &str = "plain, with logs";

/// Returns the terms of this host: how it mounts the backing, as pairs of name and text that other hosts compare. With
/// `serves_logs` the store has the log layer, so files in logs (each host's own writes) are read and written there,
/// whatever `layout` is.
pub(crate) fn terms_from_options(options: &Options, serves_logs: bool) -> Terms {
    let layout = match options.layout {
        Layout::Log => LOG,
        Layout::Plain if serves_logs => PLAIN_WITH_LOGS,
        Layout::Plain => PLAIN,
    };
    let tokens = match options.tokens {
        TokenService::None => "none",
        TokenService::Flock => "flock",
        TokenService::Etcd => "etcd",
    };
    let formats = format!(
        "leases {}, logs {}, lanes {}, change log {}, ballots {}",
        firn_hosts::LEASE_VERSION,
        firn_log::head::VERSION,
        firn_lanes::record::VERSION,
        firn_transact::change_log::SEAL.version,
        firn_hosts::BALLOT_VERSION
    );
    let terms = [
        (FORMATS, formats),
        (VERSION, env!("CARGO_PKG_VERSION").to_owned()),
        (LAYOUT, layout.to_owned()),
        (TOKENS, tokens.to_owned()),
        (LANES, describe_lanes(options)),
    ];
    terms.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Returns the lanes (I/O servers, or directories on them) as text for the comparison with other hosts. The order is
/// that of the options, because the position of a lane is its number.
fn describe_lanes(options: &Options) -> String {
    if options.placement == Placement::None {
        return "none".into();
    }
    let mut lanes = Vec::new();
    for dir in &options.lanes {
        lanes.push(quoted(dir.as_os_str().as_bytes()));
    }
    for server in &options.servers {
        lanes.push(quoted(server.as_bytes()));
    }
    format!(
        "{} of placement={}",
        lanes.join(":"),
        options.placement.name()
    )
}

/// A difference between this host and another host that is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Difference {
    /// The other host.
    host: String,
    /// Name of the term, one of [`COMPARED`].
    term: &'static str,
    their_value: String,
    our_value: String,
}

impl Difference {
    /// Returns why a mount with this difference would give wrong results; `None` if it would not.
    fn refusal_reason(&self) -> Option<&'static str> {
        match (
            self.term,
            self.our_value.as_str(),
            self.their_value.as_str(),
        ) {
            (FORMATS, ..) => Some(
                "each of these hosts would misread what the other one stores: run the same version of firn on all \
                 hosts",
            ),
            (LAYOUT, LOG, PLAIN) => Some(
                "that host would not see all bytes of files that this host writes to logs: mount with layout=log on \
                 all hosts, or unmount that host first",
            ),
            _ => None,
        }
    }

    /// Describes the difference and its consequence for the user.
    fn describe(&self) -> String {
        let Self {
            host,
            term,
            their_value,
            our_value,
        } = self;
        let meaning = match *term {
            LAYOUT => "the host with the plain layout writes new files directly, and not to logs",
            LANES => "files are spread unevenly, and lanes with the same number differ",
            TOKENS => "one of the hosts writes to a lane while the other one has the token",
            _ => "update one of the hosts",
        };
        format!("host {host} has {term} {their_value}, this host {our_value}: {meaning}")
    }
}

/// Returns each difference between the terms of this host (how it mounts the backing) and those of its peers, the other
/// hosts that are alive.
fn find_differences(our_terms: &Terms, peers: &[Peer]) -> Vec<Difference> {
    let mut differences = Vec::new();
    for peer in peers {
        for term in COMPARED {
            // Another version of Firn may have other terms; only common ones are compared.
            let (Some(their_value), Some(our_value)) = (peer.terms.get(term), our_terms.get(term))
            else {
                continue;
            };
            if their_value != our_value {
                differences.push(Difference {
                    host: peer.host.clone(),
                    term,
                    their_value: quoted(their_value.as_bytes()),
                    our_value: our_value.clone(),
                });
            }
        }
    }
    differences
}

/// Compares this host with the others at the mount and later, and keeps the differences for the status.
pub(crate) struct PeerComparison {
    base: DirBacking,
    our_terms: Terms,
    /// The watch is taken out during a comparison, so that no other caller waits for the backing.
    watch: Mutex<Option<PeerWatch>>,
    /// The result of the last comparison.
    differences: Mutex<Vec<Difference>>,
}

impl PeerComparison {
    fn new(backing: &Path, our_terms: Terms) -> Result<Self, AttachError> {
        Ok(Self {
            base: open_backing(backing)?,
            our_terms,
            watch: Mutex::new(None),
            differences: Mutex::default(),
        })
    }

    /// Compares how this host is about to mount the backing with how the other living hosts have mounted it. Fails if a
    /// difference would give wrong results; `notice` is called with a sentence for each other difference.
    ///
    /// The call takes [`STALE_AFTER`] longer if a second look must show which hosts are alive.
    pub(crate) fn compare_before_mount(
        backing: &Path,
        options: &Options,
        serves_logs: bool,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let own_host = host_name(options).unwrap_or_default();
        let own_holder = Holder::this_process(&own_host)
            .map_err(AttachError::io("read the boot id of this host"))?;
        let comparison = Self::new(backing, terms_from_options(options, serves_logs))?;
        let mut watch = PeerWatch::new(own_holder);
        let to_error = own_error(backing);
        let mut peers = watch.find_living(&comparison.base).map_err(&to_error)?;
        // Of some hosts, one look does not show whether they are alive. Living hosts have renewed their leases by the
        // second look.
        if peers.has_undecided {
            std::thread::sleep(STALE_AFTER);
            peers = watch.find_living(&comparison.base).map_err(&to_error)?;
        }
        let differences = find_differences(&comparison.our_terms, &peers.living);
        for difference in &differences {
            if let Some(why) = difference.refusal_reason() {
                return Err(AttachError::PeerDiffers {
                    backing: backing.into(),
                    host: difference.host.clone(),
                    theirs: format!("{} {}", difference.term, difference.their_value),
                    ours: format!("{} {}", difference.term, difference.our_value),
                    why,
                });
            }
            notice(difference.describe());
        }
        *comparison.differences.lock() = differences;
        *comparison.watch.lock() = Some(watch);
        Ok(comparison)
    }

    /// Compares again how the living hosts mount the backing, because other hosts mount and unmount. Differences that
    /// are new since the last comparison are logged. Does nothing while another thread compares, and keeps the old
    /// result if the backing fails.
    pub(crate) fn compare_again(&self) {
        // While one thread has the watch, it is absent for all others.
        let Some(mut watch) = self.watch.lock().take() else {
            return;
        };
        let look_result = watch.find_living(&self.base);
        *self.watch.lock() = Some(watch);
        let peers = match look_result {
            Ok(peers) => peers.living,
            Err(error) => {
                tracing::debug!(%error, "cannot compare this host with the other hosts of the backing");
                return;
            }
        };
        let differences = find_differences(&self.our_terms, &peers);
        let known_differences =
            std::mem::replace(&mut *self.differences.lock(), differences.clone());
        for difference in &differences {
            if !known_differences.contains(difference) {
                tracing::warn!("{}", difference.describe());
            }
        }
    }

    /// Returns a sentence for each difference to another host that is alive.
    pub(crate) fn differences(&self) -> Vec<String> {
        let differences = self.differences.lock();
        differences.iter().map(Difference::describe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(changed: &[(&str, &str)]) -> Terms {
        let mut terms: Terms = COMPARED
            .into_iter()
            .map(|name| (name.to_owned(), "same".to_owned()))
            .collect();
        for (name, value) in changed {
            terms.insert((*name).to_owned(), (*value).to_owned());
        }
        terms
    }

    fn differences(ours: &[(&str, &str)], theirs: &[(&str, &str)]) -> Vec<Difference> {
        let peer = Peer {
            host: "b".into(),
            terms: terms(theirs),
        };
        find_differences(&terms(ours), &[peer])
    }

    #[test]
    fn hosts_with_the_same_terms_do_not_differ() {
        assert_eq!(differences(&[], &[]), []);
        // Terms that another version does not publish are not compared.
        let silent = Peer {
            host: "b".into(),
            terms: Terms::new(),
        };
        assert_eq!(find_differences(&terms(&[]), &[silent]), []);
    }

    #[test]
    fn what_would_be_misread_is_refused_and_what_is_slow_is_told() {
        let refused = |ours: &[(&str, &str)], theirs: &[(&str, &str)]| {
            differences(ours, theirs)[0].refusal_reason().is_some()
        };
        assert!(refused(&[(FORMATS, "1")], &[(FORMATS, "2")]));
        assert!(refused(&[(LAYOUT, LOG)], &[(LAYOUT, PLAIN)]));
        assert!(!refused(&[(LAYOUT, LOG)], &[(LAYOUT, PLAIN_WITH_LOGS)]));
        assert!(!refused(&[(LAYOUT, PLAIN_WITH_LOGS)], &[(LAYOUT, LOG)]));
        for name in [LANES, TOKENS, VERSION] {
            assert!(!refused(&[(name, "ours")], &[(name, "theirs")]));
            let text = differences(&[(name, "ours")], &[(name, "theirs")])[0].describe();
            let begin = format!("host b has {name} theirs, this host ours: ");
            assert!(text.starts_with(&begin), "{text}");
        }
    }
}
