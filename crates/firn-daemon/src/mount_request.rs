//! The request of `firn mount` to firnd, the process that serves the mount: what to mount, where and how.

use std::path::PathBuf;

use firn_config::{Options, Unknown, change_options, parse_minus_o};
use serde::{Deserialize, Serialize};

use crate::error::MountError;

/// Exit status: an invalid option.
const USAGE: u8 = 2;

/// What to mount, where and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountRequest {
    /// The backing directory, as the user gave it.
    #[serde(with = "firn_protocol::path::exact")]
    pub backing: PathBuf,
    /// The mount point, as the user gave it.
    #[serde(with = "firn_protocol::path::exact")]
    pub mount_point: PathBuf,
    /// Checked options.
    pub options: Options,
    /// Serve in this process until the mount ends.
    pub foreground: bool,
    /// The process that asks for the mount ends it, so firnd leaves signals to that process as long as it is alive.
    pub ends_with_parent: bool,
    /// Options that `firn upgrade` has changed since the mount, in the form of `-o`, the oldest first.
    #[serde(default)]
    pub changes: Vec<String>,
}

impl MountRequest {
    /// Returns the request with its changes applied to the options.
    pub(crate) fn with_changes(mut self) -> Result<Self, MountError> {
        for text in &self.changes {
            let changed = parse_minus_o(text, Unknown::Refuse)
                .and_then(|changes| change_options(&self.options, &changes));
            self.options = changed.map_err(|error| MountError::Reported {
                text: error.to_string(),
                code: USAGE,
            })?;
        }
        Ok(self)
    }
}
