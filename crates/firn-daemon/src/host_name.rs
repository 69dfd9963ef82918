//! The name of this host, by which the others know it.

use firn_config::{Kind, Options};

use crate::error::AttachError;

/// What this host is called among others: as the option says, or like the host.
pub(crate) fn host_name(options: &Options) -> Result<String, AttachError> {
    if let Some(host) = &options.host {
        return Ok(host.clone());
    }
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    Kind::Host
        .parse(&host)
        .map_err(|why| AttachError::HostName { why })?;
    Ok(host)
}
