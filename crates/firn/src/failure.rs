//! The failure of a verb: a message and an exit status. Errors of all libraries are converted here.

use firn_agent::{AgentError, PullError};
use firn_client::checkpoints::CheckpointError;
use firn_client::{ClientError, PathsError};
use firn_config::ConfigError;
use firn_daemon::{AttachError, CheckError, FlattenError, MountError, RecoverError};

/// Exit status: done.
pub const DONE: u8 = 0;
/// Exit status: failed.
pub const FAILED: u8 = 1;
/// Exit status: an invalid option or argument.
pub const USAGE: u8 = 2;
/// Exit status: partly done; nothing is lost, and the remaining part can still be done.
pub const PARTLY: u8 = 3;
/// Exit status: there is no mount or arena of firn, or it is not trusted.
pub const NO_MOUNT: u8 = 10;
/// Exit status: try again; all connections to firnd are in use.
pub const TRY_AGAIN: u8 = 12;
/// Exit status: stopped by Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// The failure of a verb.
#[derive(Debug)]
pub enum Failure {
    /// A message for stderr, and an exit status.
    Message {
        /// What happened, and what the user should do, without `firn: ` before it.
        text: String,
        /// The exit status of the program.
        code: u8,
    },
    /// The reader of stdout has closed it (`firn status | head`). The program ends without a message.
    OutputClosed,
}

impl Failure {
    /// Creates a failure with a message and its exit status.
    pub fn new(code: u8, text: impl Into<String>) -> Self {
        Self::Message {
            text: text.into(),
            code,
        }
    }

    /// Returns the message, for a verb that continues after the failure. Returns `None` for [`Failure::OutputClosed`].
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Message { text, .. } => Some(text.clone()),
            Self::OutputClosed => None,
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<MountError> for Failure {
    fn from(error: MountError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<RecoverError> for Failure {
    fn from(error: RecoverError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<FlattenError> for Failure {
    fn from(error: FlattenError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<CheckError> for Failure {
    fn from(error: CheckError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(USAGE, error.to_string())
    }
}

impl From<PathsError> for Failure {
    fn from(error: PathsError) -> Self {
        Self::new(FAILED, error.to_string())
    }
}

impl From<AgentError> for Failure {
    fn from(error: AgentError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<PullError> for Failure {
    fn from(error: PullError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        Self::new(USAGE, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use firn_daemon::AttachError;

    use super::*;

    fn code(failure: impl Into<Failure>) -> u8 {
        match failure.into() {
            Failure::Message { code, .. } => code,
            Failure::OutputClosed => panic!("it has a text"),
        }
    }

    #[test]
    fn every_kind_of_error_has_its_exit_status() {
        assert_eq!(
            code(ClientError::NoMount {
                path: "/x".into(),
                arena: None
            }),
            NO_MOUNT
        );
        assert_eq!(
            code(ClientError::Refused {
                errno: 16,
                message: String::new()
            }),
            11
        );
        assert_eq!(
            code(RecoverError::from(AttachError::BackingMissing {
                path: "/x".into()
            })),
            FAILED
        );
        assert_eq!(
            code(MountError::from(AttachError::Held {
                backing: "/x".into(),
                by: String::new()
            })),
            11
        );
        let contradiction =
            firn_config::parse_minus_o("nonsense", firn_config::Unknown::Refuse).unwrap_err();
        assert_eq!(code(contradiction), USAGE);
    }
}
