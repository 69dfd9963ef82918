//! Check of the kernel's version: whether Firn works with it, and which optional features it lacks.

use crate::doctor::{CheckSubject, Finding};

/// A version of the kernel, such as 6.12.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct KernelVersion {
    major: u32,
    minor: u32,
}

/// A feature of the kernel that Firn uses if the kernel has it.
struct OptionalFeature {
    /// First version of the kernel that has the feature.
    since: KernelVersion,
    /// What works with the feature, in words.
    effect: &'static str,
}

const FEATURES: [OptionalFeature; 4] = [
    OptionalFeature {
        since: KernelVersion::new(6, 6),
        effect: "programs may map files of a mount shared (mmap MAP_SHARED)",
    },
    OptionalFeature {
        since: KernelVersion::new(6, 9),
        effect: "root's mounts read drained files straight from the backing (passthrough)",
    },
    OptionalFeature {
        since: KernelVersion::new(6, 12),
        effect: "mounts may be id-mapped",
    },
    OptionalFeature {
        since: KernelVersion::new(6, 13),
        effect: "modification times are exact",
    },
];
/// Oldest version of the kernel that works: it has version 7.23 of the FUSE protocol.
const OLDEST: KernelVersion = KernelVersion::new(3, 15);

impl KernelVersion {
    const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Parses the first two numbers of a release such as `6.8.0-45-generic`. Returns `None` if it does not begin with
    /// two numbers.
    fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        let major = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?.parse().ok()?;
        Some(Self::new(major, minor))
    }
}

/// Reports the features that the running kernel lacks.
pub(crate) fn check_kernel(_: &CheckSubject<'_>) -> Vec<Finding> {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    vec![judge_release(&release)]
}

/// Judges a kernel by its release, as `uname -r` prints it.
fn judge_release(release: &str) -> Finding {
    let Some(version) = KernelVersion::parse(release) else {
        return Finding::ok(format!("Linux {release}"));
    };
    if version < OLDEST {
        let KernelVersion { major, minor } = OLDEST;
        return Finding::wrong(
            format!("the FUSE of Linux {release} is too old"),
            format!("use Linux {major}.{minor} or later, or `firn mount --frontend=preload`"),
        );
    }
    let mut missing = Vec::new();
    for OptionalFeature { since, effect } in &FEATURES {
        if version < *since {
            missing.push(format!("{effect} from {}.{} on", since.major, since.minor));
        }
    }
    if missing.is_empty() {
        return Finding::ok(format!("Linux {release} has all features that Firn uses"));
    }
    Finding::note(
        format!("Linux {release} lacks some features that Firn can use"),
        format!(
            "nothing to do, if no program needs them: {}",
            missing.join("; ")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn an_old_kernel_is_told_what_it_lacks() {
        assert_eq!(judge_release("6.18.44-fc-v657").verdict, Verdict::Ok);
        let old = judge_release("5.15.0-91-generic");
        assert_eq!(old.verdict, Verdict::Note);
        let advice = old.advice.unwrap();
        assert!(
            advice.contains("from 6.6 on") && advice.contains("6.12"),
            "{advice}"
        );
        assert!(
            !judge_release("6.9.1")
                .advice
                .unwrap()
                .contains("passthrough")
        );
        assert_eq!(judge_release("3.10.0-1160.el7").verdict, Verdict::Wrong);
        assert_eq!(judge_release("odd").verdict, Verdict::Ok);
    }
}
