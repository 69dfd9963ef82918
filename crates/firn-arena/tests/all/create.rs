//! Tests that a process killed at any step of creating an arena leaves no arena that cannot be attached.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use firn_arena::{Arena, Identity, set_probe};
use firn_format::geometry::Geometry;

/// Variables that tell a child process, a copy of this test, where to create an arena and before which step to die.
const CREATE: &str = "FIRN_TEST_CREATE";
const STEP: &str = "FIRN_TEST_STEP";

fn create(dir: &Path) -> Arena {
    let geometry = Geometry::with_spill(4 << 20, 1 << 20, 2 << 20).unwrap();
    let identity = Identity {
        backing: "/backing".into(),
        dev: 1,
        ino: 2,
    };
    Arena::create_with_spill(
        &dir.join("a.arena"),
        geometry,
        &identity,
        &dir.join("spill"),
    )
    .unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Runs in a child process of the next test; does nothing otherwise.
#[test]
fn a_child_makes_an_arena_and_dies() {
    let (Some(dir), Ok(step)) = (std::env::var_os(CREATE), std::env::var(STEP)) else {
        return;
    };
    let mut left: u32 = step.parse().unwrap();
    set_probe(Some(Box::new(move || {
        if left == 0 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
        }
        left -= 1;
    })));
    create(Path::new(&dir));
}

#[test]
fn regression_a_kill_at_any_step_of_creation_leaves_no_damaged_arena_and_no_leak() {
    let mut kills = 0;
    for step in 0.. {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "create::a_child_makes_an_arena_and_dies"]);
        let output = child
            .env(CREATE, dir.path())
            .env(STEP, step.to_string())
            .output()
            .unwrap();
        let path = dir.path().join("a.arena");
        if output.status.signal() != Some(9) {
            assert!(output.status.success(), "{output:?}");
            assert_eq!(names(dir.path()), ["a.arena", "spill"]);
            break;
        }
        kills += 1;
        if path.exists() {
            let (arena, stored, damage) = Arena::attach(&path).unwrap();
            let replay = firn_arena::journal::replay(&arena.journal_region());
            assert!(stored.is_empty() && damage.is_empty() && arena.spill_fault().is_none());
            assert!(replay.damage.is_empty(), "step {step}: {:?}", replay.damage);
        } else {
            // A spill file without an arena is replaced.
            assert!(
                names(dir.path()).iter().all(|name| name == "spill"),
                "step {step}"
            );
            drop(create(dir.path()));
        }
        assert_eq!(names(dir.path()), ["a.arena", "spill"], "step {step}");
        assert_eq!(path.metadata().unwrap().nlink(), 1);
    }
    assert!(kills >= 5, "only {kills} steps");
}
