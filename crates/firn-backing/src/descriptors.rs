//! The limit of descriptors of this process. A backing over a directory needs one descriptor for each file in use.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Result;

/// Raises the limit of descriptors as far as possible: to the kernel's maximum for root, else to the hard limit of this
/// process.
pub fn raise_descriptor_limit() -> Result<()> {
    if let Some(kernel_maximum) = kernel_descriptor_maximum()
        && set_limits(Some(kernel_maximum)).is_ok()
    {
        return Ok(());
    }
    // Only root may exceed the hard limit.
    let hard_limit = getrlimit(Resource::Nofile).maximum;
    set_limits(hard_limit)
}

/// Returns the maximum number of descriptors that the kernel allows a process.
fn kernel_descriptor_maximum() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?;
    text.trim().parse().ok()
}

/// Sets the soft and the hard limit of descriptors; `None` means no limit.
fn set_limits(limit: Option<u64>) -> Result<()> {
    let limits = Rlimit {
        current: limit,
        maximum: limit,
    };
    setrlimit(Resource::Nofile, limits)
}
