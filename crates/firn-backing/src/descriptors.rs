//! The limit of descriptors of this process. A backing over a directory needs one descriptor for each file in use.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Result;

/// Raises the limit of descriptors as far as possible: to the kernel's maximum for root, else to the hard limit of this
/// process.
pub fn raise_descriptor_limit() -> Result<()> {
    let kernel_maximum = std::fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let equal_limits = |limit: Option<u64>| Rlimit {
        current: limit,
        maximum: limit,
    };
    if kernel_maximum.is_some() && setrlimit(Resource::Nofile, equal_limits(kernel_maximum)).is_ok()
    {
        return Ok(());
    }
    setrlimit(
        Resource::Nofile,
        equal_limits(getrlimit(Resource::Nofile).maximum),
    )
}
