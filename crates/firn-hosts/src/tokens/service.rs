//! What a lock service does for the token of one lane.

use std::error::Error;
use std::time::Duration;

use crate::OwnError;

/// What came of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// This host has the token.
    Granted,
    /// Others have it first.
    Behind(Behind),
}

/// The host that has the token instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// Name of the host that has it, for people.
    pub holder: Option<String>,
    /// Differs between any two holdings: as long as it changes the token goes from hand to hand.
    pub holding: String,
    /// How long to rest before the next question.
    pub rest: Duration,
}

/// Why a service did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Another host may have the token already.
    #[error("the token was lost: {why}")]
    Lost {
        /// What happened.
        why: String,
    },
    /// A file of Firn's own is not as it must be, or the backing failed.
    #[error(transparent)]
    File(#[from] OwnError),
    /// A service that is not in the backing did not answer, or refused.
    #[error(transparent)]
    Outside(Box<dyn Error + Send + Sync>),
}

/// The locks of one lane, as this host uses them. One thread makes all calls, one after the other; a call may take
/// long, but only where the service does not answer.
pub trait LockService: Send {
    /// One step towards the token: asks, or looks again after an earlier question. A host that asked keeps its place in
    /// the queue from one step to the next.
    fn ask(&mut self) -> Result<Asked, ServiceError>;
    /// Gives the token back, or takes the question back.
    fn give_back(&mut self) -> Result<(), ServiceError>;
    /// Whether another host waits for the token that this host has.
    fn others_wait(&mut self) -> Result<bool, ServiceError>;
    /// Shows that the holder lives.
    fn renew(&mut self) -> Result<(), ServiceError>;
    /// How often a holder must; `None`: the service sees it by itself.
    fn renew_every(&self) -> Option<Duration>;
}
