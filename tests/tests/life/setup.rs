//! `scripts/setup` on releases that have other packages than this machine: what apt knows there is said by programs in its place.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use firn_tests::Sandbox;
use firn_tests::command::{Outcome, run, write_program};

/// What the script uses of a system beside apt.
const SYSTEM: [&str; 8] = [
    "awk", "bash", "cat", "dirname", "env", "grep", "sed", "timeout",
];

/// A release, with what apt would install where that is not version 1.0, and with commands that are there.
struct Release<'a> {
    candidates: &'a [(&'a str, &'a str)],
    commands: &'a [(&'a str, &'a str)],
}

impl Release<'_> {
    /// Has the script install packages; what it says, and the words of each call of `apt-get`.
    fn install(&self, sandbox: &Sandbox) -> Outcome {
        let dir = sandbox.mkdir("bin");
        for program in SYSTEM {
            let found = ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(program));
            let found = found.iter().find(|path| path.exists());
            symlink(found.expect("a program"), dir.join(program)).expect("link");
        }
        let mut policy = String::from("#!/bin/bash\ncase $2 in\n");
        for (package, version) in self.candidates {
            policy += &format!("{package}) v='{version}' ;;\n");
        }
        policy += "*t64) v='(none)' ;;\n*) v=1.0 ;;\nesac\nprintf '%s:\\n  Installed: (none)\\n  Candidate: %s\\n' \"$2\" \"$v\"\n";
        write_program(&dir.join("apt-cache"), &policy);
        write_program(&dir.join("apt-get"), "#!/bin/bash\necho \"apt-get $*\"\n");
        write_program(&dir.join("dpkg-query"), "#!/bin/bash\nexit 1\n");
        write_program(&dir.join("sudo"), "#!/bin/bash\nexec \"$@\"\n");
        for (command, text) in self.commands {
            write_program(&dir.join(command), &format!("#!/bin/bash\n{text}\n"));
        }
        let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup");
        let text = fs::read_to_string(setup).expect("the script");
        let (functions, _) = text.split_once("\ninstall_packages\n").expect("its end");
        let script = sandbox.join("setup");
        fs::write(&script, format!("{functions}\ninstall_packages\n")).expect("write it");
        run(Command::new(dir.join("bash")).arg(script).env("PATH", &dir)).ok()
    }
}

fn installed(outcome: &Outcome) -> Vec<&str> {
    let line = outcome
        .stdout
        .lines()
        .find(|line| line.starts_with("apt-get install "));
    line.unwrap_or_default().split_whitespace().collect()
}

#[test]
fn a_browser_that_is_a_snap_is_not_installed_and_what_is_missing_is_said() {
    let sandbox = Sandbox::new("setup-ubuntu");
    let outcome = Release {
        candidates: &[
            ("chromium", "(none)"),
            ("chromium-browser", "2:1snap1-0ubuntu2"),
            ("google-chrome", "(none)"),
            ("firefox-esr", "(none)"),
            ("firefox", "1:1snap1-0ubuntu5"),
            ("python3-torch", "(none)"),
            ("moosefs-master", "(none)"),
            ("libtcmalloc-minimal4", "(none)"),
            ("libtcmalloc-minimal4t64", "2.15-3"),
        ],
        commands: &[],
    }
    .install(&sandbox);
    assert!(
        outcome.stdout.contains("no browser as a package"),
        "{outcome}"
    );
    assert!(
        outcome
            .stdout
            .contains("this release has no python3-torch;"),
        "{outcome}"
    );
    let installed = installed(&outcome);
    for package in ["fuse3", "libtcmalloc-minimal4t64", "moosefs-client"] {
        assert!(installed.contains(&package), "{package}: {outcome}");
    }
    for package in [
        "chromium-browser",
        "firefox",
        "python3-torch",
        "libtcmalloc-minimal4",
    ] {
        assert!(!installed.contains(&package), "{package}: {outcome}");
    }
}

#[test]
fn a_browser_that_is_a_package_is_installed_where_none_starts() {
    let sandbox = Sandbox::new("setup-debian");
    let debian = |commands| Release {
        candidates: &[
            ("chromium", "156.0-1~deb12u1"),
            ("chromium-browser", "(none)"),
        ],
        commands,
    };
    // The command of a package that fetches a snap.
    let outcome =
        debian(&[("firefox", "echo 'run snap install firefox' >&2; exit 1")]).install(&sandbox);
    assert!(installed(&outcome).contains(&"chromium"), "{outcome}");
    let other = Sandbox::new("setup-chrome");
    let outcome = debian(&[("google-chrome", "echo 'Google Chrome 156'")]).install(&other);
    assert!(!installed(&outcome).contains(&"chromium"), "{outcome}");
    assert!(!outcome.stdout.contains("no browser"), "{outcome}");
}

#[test]
fn a_package_that_building_needs_is_asked_for_also_where_apt_has_none() {
    let sandbox = Sandbox::new("setup-none");
    let outcome = Release {
        candidates: &[("fuse3", "(none)")],
        commands: &[],
    }
    .install(&sandbox);
    // apt says what is wrong, and the script ends.
    assert!(installed(&outcome).contains(&"fuse3"), "{outcome}");
}
