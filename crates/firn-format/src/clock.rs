//! Which clock modification times are taken from.
//!
//! Linux stamps files with a clock that moves in ticks of some milliseconds. From 6.13 on a file whose time was read
//! since its last change gets the exact time with its next change (*multigrain* timestamps,
//! Documentation/filesystems/multigrain-ts.rst). No file gets an earlier time afterwards, on any file system. So times
//! that Firn gives are exact there: those of ticks would be older than what was changed before. On older kernels they
//! are of ticks, as all others.

/// The first release whose times may be exact.
const FIRST_EXACT: (u32, u32) = (6, 13);

/// Whether the times of a kernel of this release (`uname -r`) may be exact.
pub fn is_exact(release: &[u8]) -> bool {
    let mut numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok());
    let mut next = || numbers.next().flatten();
    match (next(), next()) {
        (Some(major), Some(minor)) => (major, minor) >= FIRST_EXACT,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_from_linux_6_13_on() {
        for release in ["6.13.0", "6.18.44-fc-v595", "7.0-rc1", "10.1"] {
            assert!(is_exact(release.as_bytes()), "{release}");
        }
        for release in ["6.12.9", "6.1.0-18-amd64", "5.15.0", "6", "", "x.y"] {
            assert!(!is_exact(release.as_bytes()), "{release}");
        }
    }
}
