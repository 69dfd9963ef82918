//! What `firn mount` asks of firnd.

use std::path::PathBuf;

use firn_config::Options;
use serde::{Deserialize, Serialize};

/// What to mount where and how.
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
    /// Serve in this process until the end.
    pub foreground: bool,
    /// The process that asks for the mount ends it: a signal is for that process, as long as it lives.
    pub ends_with_parent: bool,
}
