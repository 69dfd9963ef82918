//! Check of the kernel's version: which features that Firn uses the running kernel lacks.

use crate::doctor::{CheckSubject, Finding};

/// Optional features: the first version of the kernel that has each, and what an older one lacks.
const FEATURES: [((u32, u32), &str); 4] = [
    (
        (6, 6),
        "programs may map files of a mount shared (mmap MAP_SHARED)",
    ),
    (
        (6, 9),
        "root's mounts read drained files straight from the backing (passthrough)",
    ),
    ((6, 12), "mounts may be id-mapped"),
    ((6, 13), "modification times are exact"),
];
/// Oldest version of the kernel that works: it has version 7.23 of the FUSE protocol.
const OLDEST: (u32, u32) = (3, 15);

/// Reports the features that the running kernel lacks.
pub(crate) fn check_kernel(_: &CheckSubject<'_>) -> Vec<Finding> {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    vec![judge(&release)]
}

/// Judges a kernel by its release, as `uname -r` prints it.
fn judge(release: &str) -> Finding {
    let Some(version) = version_of(release) else {
        return Finding::ok(format!("Linux {release}"));
    };
    if version < OLDEST {
        let (major, minor) = OLDEST;
        return Finding::wrong(
            format!("Linux {release} has too old a FUSE"),
            format!("use Linux {major}.{minor} or later, or `firn mount --frontend=preload`"),
        );
    }
    let missing: Vec<String> = FEATURES
        .iter()
        .filter(|(first, _)| version < *first)
        .map(|((major, minor), what)| format!("{what} from {major}.{minor} on"))
        .collect();
    if missing.is_empty() {
        return Finding::ok(format!("Linux {release} has all that Firn uses"));
    }
    let advice = format!("nothing, if no program needs it: {}", missing.join("; "));
    Finding::note(
        format!("Linux {release} lacks some of what Firn uses"),
        advice,
    )
}

/// Returns the first two numbers of `uname -r`, or `None` where the text does not begin with two numbers.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn an_old_kernel_is_told_what_it_lacks() {
        assert_eq!(judge("6.18.44-fc-v657").verdict, Verdict::Ok);
        let old = judge("5.15.0-91-generic");
        assert_eq!(old.verdict, Verdict::Note);
        let advice = old.advice.unwrap();
        assert!(
            advice.contains("from 6.6 on") && advice.contains("6.12"),
            "{advice}"
        );
        assert!(!judge("6.9.1").advice.unwrap().contains("passthrough"));
        assert_eq!(judge("3.10.0-1160.el7").verdict, Verdict::Wrong);
        assert_eq!(judge("odd").verdict, Verdict::Ok);
    }
}
