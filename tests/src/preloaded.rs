//! Programs under the preload library, over each frontend: a FUSE mount, and a stub tree.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::sandbox::preload_library;
use crate::tree::{assert_same, snapshot};
use crate::{FirnMount, Outcome, Sandbox, run};

/// The variable that says how many bytes of a file go through the kernel before direct access is asked for.
pub const DIRECT_AFTER: &str = "FIRN_PRELOAD_DIRECT_AFTER";

/// How programs come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frontend {
    /// `frontend=fuse`: the kernel has the files, and the library makes calls shorter.
    Mount,
    /// `frontend=preload`: the kernel has empty files, and the library all bytes.
    Tree,
}

impl Frontend {
    /// Mounts the sandbox's backing; a tree is on root's own tmpfs.
    pub fn mount<'a>(self, sandbox: &'a Sandbox, options: &str) -> FirnMount<'a> {
        match self {
            Self::Mount => FirnMount::new(sandbox, options),
            Self::Tree => FirnMount::new(sandbox, &format!("{options},frontend=preload")),
        }
    }

    /// Puts the library before a program and lets it report. Unless the command says otherwise, direct access is asked
    /// for at the first call, so that small files have it too. A program finds the sandbox's tree by its runtime
    /// directory, and a mount without.
    pub fn preload<'c>(self, sandbox: &Sandbox, command: &'c mut Command) -> &'c mut Command {
        if self == Self::Tree {
            sandbox.environment(command);
        }
        if !command.get_envs().any(|(name, _)| name == DIRECT_AFTER) {
            command.env(DIRECT_AFTER, "0");
        }
        command
            .env("LD_PRELOAD", preload_library())
            .env("FIRN_PRELOAD_REPORT", "1")
    }

    /// Checks that the files that programs see are those of a plain directory: of a tree the kernel sees empty ones,
    /// which must be empty.
    #[track_caller]
    pub fn assert_shows(self, mount: &FirnMount<'_>, plain: &Path) {
        match self {
            Self::Mount => assert_same(
                "files on the mount",
                &snapshot(mount.path()),
                &snapshot(plain),
            ),
            Self::Tree => assert_eq!(stubs_with_bytes(mount.path()), [] as [PathBuf; 0]),
        }
    }

    /// Runs a program in a plain directory without the library, and over this frontend with it: exit code, output and
    /// files must be the same, and those of the backing afterwards. Gives what it said over this frontend.
    #[track_caller]
    pub fn same_as_plain(
        self,
        name: &str,
        options: &str,
        program: impl Fn(&Path) -> Command,
    ) -> Outcome {
        let sandbox = Sandbox::new(name);
        let plain = sandbox.mkdir("plain");
        let expected = run(&mut program(&plain));
        if self == Self::Mount {
            let other = sandbox.mkdir("other");
            let without_mount = run(self.preload(&sandbox, &mut program(&other)));
            assert_same_outcome(&without_mount, &expected);
            let what = "files of a plain directory";
            assert_same(what, &snapshot(&other), &snapshot(&plain));
        }
        let mount = self.mount(&sandbox, options);
        let found = run(self.preload(&sandbox, &mut program(mount.path())));
        assert_same_outcome(&found, &expected);
        if self == Self::Mount {
            // Programs without the library (`env -i`) may have written into stubs.
            self.assert_shows(&mount, &plain);
        }
        let backing = mount.umount();
        let what = "files in the backing";
        assert_same(what, &snapshot(&backing), &snapshot(&plain));
        found
    }
}

/// Checks that a program ended and said the same.
#[track_caller]
pub fn assert_same_outcome(found: &Outcome, expected: &Outcome) {
    assert_eq!(found.code, expected.code, "{found}\ninstead of\n{expected}");
    assert_eq!(found.stdout, expected.stdout, "{found}");
    assert!(!expected.stdout.contains("failed"), "{expected}");
}

/// Bytes of calls of one kind by direct access, from the reports of all processes.
pub fn direct_bytes(outcome: &Outcome, call: &str) -> u64 {
    let head = format!(": {call}: ");
    let lines = outcome
        .stderr
        .lines()
        .filter_map(|line| line.split_once(&head));
    let bytes = lines.filter_map(|(_, rest)| {
        let (_, bytes) = rest.split_once(" by direct access (")?;
        bytes.split(' ').next()?.parse::<u64>().ok()
    });
    bytes.sum()
}

/// Stubs that hold bytes themselves: what a call wrote that the library did not see.
pub fn stubs_with_bytes(top: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(top).expect("a directory").flatten() {
        let meta = entry.path().symlink_metadata().expect("lstat");
        if meta.is_dir() {
            found.extend(stubs_with_bytes(&entry.path()));
        } else if meta.is_file() && meta.len() > 0 {
            found.push(entry.path());
        }
    }
    found
}

/// Source of a program of these tests.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

/// Compiles a program into `dir`, with threads and checks of buffers.
pub fn compile(compiler: &str, name: &str, dir: &Path) -> PathBuf {
    let program = dir.join(name.replace('.', "-"));
    let mut command = Command::new(compiler);
    command
        .args(["-O2", "-D_FORTIFY_SOURCE=2", "-w", "-pthread", "-o"])
        .arg(&program)
        .arg(source(name));
    run(&mut command).ok();
    program
}

/// The program with a case for each kind of call, `preload.c`, compiled once into `dir`.
pub fn call_cases(dir: &Path) -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compile("cc", "preload.c", dir))
}

/// A shell script that runs in a directory.
pub fn shell(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("bash");
    command
        .args(["-euc", script, "bash"])
        .arg(dir)
        .current_dir(dir);
    command
}

/// A Python script whose argument is a directory.
pub fn python(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", script]).arg(dir);
    command
}
