//! Where data is, as each place that says it says it: `firn ls`, `firn ls --state`, the attribute, `firn status PATH` and
//! the totals of `firn status`, for the same tree in every frontend.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use firn_tests::mount::patient;
use firn_tests::preloaded::Frontend;
use firn_tests::random::{env_count, generator};
use firn_tests::transaction::{firn, firn_with};
use firn_tests::{FirnMount, Sandbox, run, seed};
use rand::RngExt;
use rustix::fs::lgetxattr;

const DIRS: [&str; 3] = ["", "step_1", "step_2/deep"];
const NAMES: [&str; 3] = ["a", "b", "c"];
const LEVELS: [&str; 6] = [
    "held",
    "spilled",
    "partnered",
    "logged",
    "drained",
    "durable",
];

/// A way to mount, and what is true of it.
struct Setup {
    name: &'static str,
    frontend: Frontend,
    options: &'static str,
}

const SETUPS: [Setup; 5] = [
    Setup {
        name: "held",
        frontend: Frontend::Mount,
        options: "close=held",
    },
    Setup {
        name: "drain",
        frontend: Frontend::Mount,
        options: "close=drain",
    },
    Setup {
        name: "log",
        frontend: Frontend::Mount,
        options: "close=held,layout=log",
    },
    Setup {
        name: "commit",
        frontend: Frontend::Mount,
        options: "drain=commit",
    },
    Setup {
        name: "tree",
        frontend: Frontend::Tree,
        options: "close=held",
    },
];

/// What `firn ls --json` says: path to level.
fn listed(sandbox: &Sandbox, top: &Path) -> BTreeMap<String, (String, u64)> {
    let list = firn_with(sandbox, "ls", top, &["--json"]).ok().json();
    let row = |file: &serde_json::Value| {
        let text = |key: &str| file[key].as_str().expect("a text").to_owned();
        let held = file["held_bytes"].as_u64().expect("a number");
        (text("path"), (text("level"), held))
    };
    list.as_array().expect("a list").iter().map(row).collect()
}

/// Compares all places. Returns what they say.
fn compare(sandbox: &Sandbox, mount: &FirnMount, setup: &Setup) -> BTreeMap<String, String> {
    let list = listed(sandbox, mount.path());
    for level in LEVELS {
        let words = firn_with(sandbox, "ls", mount.path(), &["--state", level]).ok();
        let found: BTreeSet<&str> = words
            .stdout
            .lines()
            .filter_map(|line| line.rsplit(' ').next())
            .collect();
        let expected: BTreeSet<&str> = list
            .iter()
            .filter(|(_, (listed, _))| listed == level)
            .map(|(path, _)| path.as_str())
            .collect();
        assert_eq!(found, expected, "{}: firn ls --state {level}", setup.name);
    }
    for (path, (level, held)) in &list {
        let file = mount.join(path);
        if setup.frontend == Frontend::Mount {
            let mut value = [0; 32];
            let len = lgetxattr(&file, "user.firn.state", &mut value).expect("the attribute");
            let found = String::from_utf8_lossy(&value[..len]);
            assert_eq!(&found, level, "{}: the attribute of {path}", setup.name);
        }
        let status = firn_with(sandbox, "status", &file, &["--json"]).ok().json();
        // It lists what is open or has bytes in memory.
        for known in status["files"].as_array().expect("a list") {
            let place = "the status of";
            assert_eq!(known["path"], **path, "{}: {place} {path}", setup.name);
            assert_eq!(known["state"], **level, "{}: {place} {path}", setup.name);
            assert_eq!(known["held_bytes"], *held, "{}: {place} {path}", setup.name);
        }
        let is_held = ["held", "spilled", "partnered"].contains(&level.as_str());
        assert_eq!(*held > 0, is_held, "{}: {path}", setup.name);
    }
    let held: u64 = list.values().map(|(_, held)| held).sum();
    assert_eq!(mount.status().held_bytes, held, "{}", setup.name);
    let levels = list.into_iter().map(|(path, (level, _))| (path, level));
    levels.collect()
}

/// A program writes; under the preload library where there is no mount.
fn write(sandbox: &Sandbox, mount: &FirnMount, setup: &Setup, path: &str, bytes: usize) {
    let mut command = Command::new("dd");
    command
        .arg("if=/dev/zero")
        .arg(format!("of={}", mount.join(path).display()))
        .args(["conv=notrunc", "status=none", "count=1"])
        .arg(format!("bs={bytes}"));
    if setup.frontend == Frontend::Tree {
        setup.frontend.preload(sandbox, &mut command);
    }
    run(&mut command).ok();
}

/// Random writes, renames and waits: all places agree after each, what was waited for is durable, and what was changed
/// since is not. Proves S-fsync-5, S-fsync-8.
#[test]
fn all_places_say_the_same_level_and_never_too_high_a_one() {
    let seed = seed("levels");
    let operations = env_count("FIRN_OPS", 15);
    for setup in &SETUPS {
        let mut rng = generator(seed);
        let sandbox = Sandbox::new(&format!("levels-{}", setup.name));
        let mount = setup.frontend.mount(&sandbox, &patient(setup.options));
        for dir in &DIRS[1..] {
            fs::create_dir_all(mount.join(dir)).expect("mkdir");
        }
        // What was waited for and is as it was then.
        let mut durable = BTreeSet::new();
        for _ in 0..operations {
            let dir = DIRS[rng.random_range(0..DIRS.len())];
            let name = NAMES[rng.random_range(0..NAMES.len())];
            let path = Path::new(dir).join(name);
            let path = path.to_str().expect("UTF-8").to_owned();
            match rng.random_range(0..10) {
                0..6 => {
                    write(&sandbox, &mount, setup, &path, rng.random_range(1..5000));
                    durable.remove(&path);
                }
                6 => {
                    let other = format!("{path}-other");
                    if fs::rename(mount.join(&path), mount.join(&other)).is_ok() {
                        durable.remove(&path);
                        durable.remove(&other);
                    }
                }
                7 => {
                    mount.wait("drained", &mount.join(dir)).ok();
                }
                _ => {
                    mount.wait("durable", &mount.join(dir)).ok();
                    let below = compare(&sandbox, &mount, setup);
                    let below = below.into_keys();
                    durable.extend(below.filter(|path| Path::new(path).starts_with(dir)));
                }
            }
            for (path, level) in compare(&sandbox, &mount, setup) {
                let is_durable = durable.contains(&path);
                // A wait for one directory may make others durable too, but does not report them.
                assert_eq!(level == "durable", is_durable, "{}: {path}", setup.name);
            }
        }
        mount.wait("durable", mount.path()).ok();
        let levels = compare(&sandbox, &mount, setup);
        assert!(
            levels.values().all(|level| level == "durable"),
            "{levels:?}"
        );
        // The next firnd did not see it.
        let backing = mount.umount();
        let mount = match setup.frontend {
            Frontend::Mount => FirnMount::over(&sandbox, &backing, &patient(setup.options)),
            Frontend::Tree => setup.frontend.mount(&sandbox, &patient(setup.options)),
        };
        let levels = compare(&sandbox, &mount, setup);
        assert!(!levels.is_empty(), "{}", setup.name);
        assert!(
            levels.values().all(|level| level == "drained"),
            "{levels:?}"
        );
        mount.umount();
    }
}

/// Proves S-fsync-9.
#[test]
fn a_file_that_another_program_changes_in_the_backing_is_not_said_to_be_durable() {
    let sandbox = Sandbox::new("levels-beside");
    let mount = FirnMount::new(&sandbox, &patient("close=held,attr-timeout=0"));
    for name in ["changed", "touched", "left"] {
        fs::write(mount.join(name), b"bytes").expect("write");
    }
    mount.wait("durable", mount.path()).ok();
    let levels = |expected: [&str; 3]| {
        let list = listed(&sandbox, mount.path());
        let found = ["changed", "left", "touched"].map(|name| list[name].0.as_str());
        assert_eq!(found, expected);
    };
    levels(["durable"; 3]);
    fs::write(mount.backing().join("changed"), b"other bytes").expect("write beside the mount");
    // What the mount itself changes is no other content.
    let time = std::time::SystemTime::UNIX_EPOCH;
    let touched = fs::File::open(mount.join("touched")).expect("open");
    touched.set_modified(time).expect("utimensat");
    drop(touched);
    levels(["drained", "durable", "durable"]);
    mount.wait("durable", &mount.join("changed")).ok();
    levels(["durable"; 3]);
    mount.umount();
}

/// Proves S-tx-8.
#[test]
fn what_a_transaction_may_take_back_is_not_said_to_be_durable() {
    let sandbox = Sandbox::new("levels-tx");
    let mount = FirnMount::new(&sandbox, &patient("drain=commit"));
    let step = mount.join("step_1");
    fs::create_dir(&step).expect("mkdir");
    let level = || {
        let list = listed(&sandbox, mount.path());
        list["step_1/rank0"].0.clone()
    };
    firn(&sandbox, "begin", &step).ok();
    fs::write(step.join("rank0"), b"bytes").expect("write");
    mount.wait("durable", &step).ok();
    assert_eq!(level(), "drained", "it counts once it is committed");
    firn(&sandbox, "commit", &step).ok();
    mount.wait("durable", &step).ok();
    assert_eq!(level(), "durable");
    mount.umount();
}

/// Proves S-demand-7: also once it is drained.
#[test]
fn regression_a_cut_file_is_listed_as_cut_after_its_drain_until_it_is_emptied() {
    let sandbox = Sandbox::new("levels-cut");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let script = "exec 3> \"$0\"; echo part >&3; kill -9 $$";
    let file = mount.join("step_1");
    let mut writer = Command::new("sh");
    run(writer.args(["-c", script]).arg(&file)).code(137);
    mount.wait("durable", mount.path()).ok();
    let cut = || {
        let args = ["ls", "--state=cut"].map(OsStr::new);
        let list = sandbox.run(args.into_iter().chain([mount.path().as_os_str()]));
        list.ok().stdout.lines().count()
    };
    firn_tests::wait_until("it is cut", std::time::Duration::from_secs(30), || {
        cut() == 1
    });
    fs::write(&file, b"whole").expect("write");
    assert_eq!(cut(), 0);
    mount.umount();
}
