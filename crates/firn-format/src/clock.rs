//! Derives from the kernel's release which clock the kernel uses for modification times, so that Firn uses the same
//! clock.
//!
//! Linux stamps files with a clock that advances in ticks of some milliseconds. From release 6.13 on, a file whose time
//! was read since its last change gets the exact time with its next change (*multigrain* timestamps,
//! Documentation/filesystems/multigrain-ts.rst). After that, no file on any file system gets an earlier time.
//!
//! Firn itself also sets times of files. From release 6.13 on it uses exact times, because the time of the last tick
//! may be earlier than that of a previous change. On older kernels Firn uses the time of the last tick, as the kernel
//! does.

/// First release with multigrain timestamps.
const FIRST_EXACT: (u32, u32) = (6, 13);

/// Returns whether a kernel of this release (`uname -r`) may stamp files with exact times.
pub fn is_exact(release: &[u8]) -> bool {
    let mut numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok());
    let mut next_number = || numbers.next().flatten();
    let (Some(major), Some(minor)) = (next_number(), next_number()) else {
        return false;
    };
    (major, minor) >= FIRST_EXACT
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
