//! The interface of a lock service for the token of one lane.
//!
//! A *lane* is one I/O server. Its *token* is a lock that lets one host at a time write there.

use std::error::Error;
use std::time::Duration;

use crate::OwnError;

/// Answer of a lock service to a request for the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenReply {
    /// This host has the token.
    Granted,
    /// Other hosts are ahead in the queue.
    Queued(QueuePosition),
}

/// The token is held by another host: its holder, and the time until the next request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePosition {
    /// Name of the holder, for people. `None` if it is unknown.
    pub holder: Option<String>,
    /// Identifies the grant of the token to its holder; any two grants have different values. As long as the value
    /// changes, the token passes from host to host.
    pub holding: String,
    /// How long to wait before the next request.
    pub ask_again_after: Duration,
}

/// Error of a lock service.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The token is lost, and another host may have it already.
    #[error("the token was lost: {why}")]
    Lost {
        /// How the token was lost, as a text for people.
        why: String,
    },
    /// A file that Firn owns is not in the required state, or the backing failed.
    #[error(transparent)]
    File(#[from] OwnError),
    /// A service outside the backing did not answer, or refused the request.
    #[error(transparent)]
    Outside(Box<dyn Error + Send + Sync>),
}

/// The lock of one lane, as this host uses it.
///
/// One thread makes all calls, one after the other. A call may take long only if the service does not answer.
pub trait LockService: Send {
    /// Requests the token, or checks an earlier request again. A host keeps its place in the queue between two calls.
    fn ask(&mut self) -> Result<TokenReply, ServiceError>;
    /// Gives the token back, or withdraws the request.
    fn give_back(&mut self) -> Result<(), ServiceError>;
    /// Returns whether another host waits for the token that this host holds.
    fn others_wait(&mut self) -> Result<bool, ServiceError>;
    /// Renews the grant at the service, which otherwise passes the token on as if this host had died.
    fn renew(&mut self) -> Result<(), ServiceError>;
    /// Returns the time between two calls of `renew`. Returns `None` if the service detects the death of a holder by
    /// itself.
    fn renew_every(&self) -> Option<Duration>;
}
