//! The name by which other hosts identify this host.

use firn_config::{Kind, Options};

use crate::error::AttachError;

/// Returns the host name for messages and metrics. Unlike [`host_name`], it never fails: invalid characters remain.
pub(crate) fn shown_host_name(options: &Options) -> String {
    host_name(options).unwrap_or_else(|_| {
        let names = rustix::system::uname();
        names.nodename().to_string_lossy().into_owned()
    })
}

/// Returns the name of this host among other hosts: the option `host`, or the system's host name. Fails if that name is
/// invalid.
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
