//! The name of this host, by which the others know it.

use firn_config::{Kind, Options};

use crate::error::AttachError;

/// What people and collectors of metrics are told: the same, whatever characters are in it.
pub(crate) fn shown_host_name(options: &Options) -> String {
    host_name(options).unwrap_or_else(|_| {
        let names = rustix::system::uname();
        names.nodename().to_string_lossy().into_owned()
    })
}

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
