//! What tests of transactions do again and again.

use std::ffi::OsStr;
use std::path::Path;

use crate::command::Outcome;
use crate::sandbox::Sandbox;
use crate::tree::{Tree, snapshot};

/// `firn VERB PATH MORE...`.
#[track_caller]
pub fn firn_with(sandbox: &Sandbox, verb: &str, path: &Path, more: &[&str]) -> Outcome {
    let args = [OsStr::new(verb), path.as_os_str()];
    sandbox.run(args.into_iter().chain(more.iter().map(OsStr::new)))
}

/// `firn VERB PATH`.
#[track_caller]
pub fn firn(sandbox: &Sandbox, verb: &str, path: &Path) -> Outcome {
    firn_with(sandbox, verb, path, &[])
}

/// `firn VERB PATH --id ID`.
#[track_caller]
pub fn firn_id(sandbox: &Sandbox, verb: &str, path: &Path, id: u64) -> Outcome {
    firn_with(sandbox, verb, path, &["--id", &id.to_string()])
}

/// What is in a backing, but for what Firn keeps there.
pub fn behind(backing: &Path) -> Tree {
    snapshot(backing)
        .into_iter()
        .filter(|(path, _)| !path.starts_with(".firn"))
        .collect()
}
