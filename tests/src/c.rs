//! The C library as a user has it: installed, found by pkg-config, linked by cc.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::run;
use crate::sandbox::{Sandbox, firn_binary};

/// How a program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// With libfirn.so.
    Shared,
    /// With libfirn.a.
    Static,
}

/// Everything installed below one directory of a sandbox.
pub struct Installed<'a> {
    sandbox: &'a Sandbox,
    prefix: PathBuf,
}

impl<'a> Installed<'a> {
    /// Runs scripts/install with what cargo built.
    #[track_caller]
    pub fn new(sandbox: &'a Sandbox) -> Self {
        let prefix = sandbox.join("prefix");
        let from = firn_binary().parent().expect("a directory").to_owned();
        let library = from.join("libfirn.so");
        assert!(
            library.exists(),
            "{library:?} is missing: run `cargo build -p firn-c`"
        );
        let mut install = Command::new(repository().join("scripts/install"));
        run(install.arg("--prefix").arg(&prefix).arg("--from").arg(from)).ok();
        Self { sandbox, prefix }
    }

    /// A path below the prefix.
    pub fn join(&self, name: &str) -> PathBuf {
        self.prefix.join(name)
    }

    /// What pkg-config says.
    #[track_caller]
    pub fn pkg_config(&self, args: &[&str]) -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command
            .env("PKG_CONFIG_PATH", self.join("lib/pkgconfig"))
            .args(args)
            .arg("firn");
        run(&mut command)
            .ok()
            .stdout
            .split_whitespace()
            .map(str::to_owned)
            .collect()
    }

    /// Compiles a C program of the repository.
    #[track_caller]
    pub fn compile(&self, source: &str, link: Link) -> PathBuf {
        let source = repository().join(source);
        let name = format!(
            "{}-{link:?}",
            source.file_stem().expect("a name").to_string_lossy()
        );
        let program = self.sandbox.join(name);
        let mut cc = Command::new("cc");
        cc.args([
            "-std=gnu11",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-pthread",
        ]);
        cc.arg("-o")
            .arg(&program)
            .arg(source)
            .args(self.pkg_config(&["--cflags"]));
        match link {
            Link::Shared => cc.args(self.pkg_config(&["--libs"])),
            Link::Static => {
                let libraries = self.pkg_config(&["--libs", "--static"]);
                let shared = libraries.iter().filter(|word| *word != "-lfirn");
                cc.arg(self.join("lib/libfirn.a")).args(shared)
            }
        };
        run(&mut cc).ok();
        program
    }

    /// A command in the sandbox's environment that finds the shared library.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        self.sandbox.environment(&mut command);
        command.env("LD_LIBRARY_PATH", self.join("lib"));
        command
    }
}

/// The top of the repository.
fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ is in the repository")
}
