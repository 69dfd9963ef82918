//! How many descriptors this process may have: a backing over a directory takes one for each file in use.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Result;

/// Raises the limit of descriptors as far as it goes: root may have as many as the kernel allows, others what their
/// hard limit says.
pub fn raise_descriptor_limit() -> Result<()> {
    let kernel_maximum = std::fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let of = |limit: Option<u64>| Rlimit {
        current: limit,
        maximum: limit,
    };
    if kernel_maximum.is_some() && setrlimit(Resource::Nofile, of(kernel_maximum)).is_ok() {
        return Ok(());
    }
    setrlimit(Resource::Nofile, of(getrlimit(Resource::Nofile).maximum))
}
