//! Another user of the machine may make names beside the copies and checkpoints of a user: none of them counts as the
//! user's, none is removed, and nothing of the user's is removed or made elsewhere because of them.
//!
//! The other user is a number without an account. Needs root and FUSE.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use firn_testfs::{FoldCase, mount_client};
use firn_tests::agent::{Agent, pull, pull_command, staging_of};
use firn_tests::mount::mount_args;
use firn_tests::random::bytes;
use firn_tests::sandbox::{is_mounted, unmount_lazily};
use firn_tests::{FirnMount, Sandbox, run, wait_until};
use rustix::mount::{MountFlags, mount};

const LIMIT: Duration = Duration::from_secs(60);
const DEMAND: &str = "arena-size=32M,chunk-size=1M,drain=demand,passthrough=off";
/// Whose the planted names are.
const OTHER: u32 = 65534;
/// Seconds of a time to come, and of one long ago.
const LATE: u64 = 1_900_000_000;
const EARLY: u64 = 900_000_000;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("chmod");
}

fn set_time(path: &Path, seconds: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let file = File::open(path).expect("open");
    file.set_modified(time).expect("set the time");
}

/// A directory of another user with a file in it, both of this time.
fn plant(dir: &Path, seconds: u64) {
    fs::create_dir(dir).expect("mkdir");
    fs::write(dir.join("rank0"), b"planted").expect("write");
    for path in [dir.join("rank0"), dir.to_owned()] {
        chown(&path, Some(OTHER), Some(OTHER)).expect("chown");
        set_time(&path, seconds);
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("list").map(|entry| {
        let name = entry.expect("an entry").file_name();
        name.into_string().expect("UTF-8")
    });
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

fn write_step(top: &Path, seconds: u64) {
    fs::create_dir(top).expect("mkdir");
    fs::write(top.join("rank0"), bytes(seconds, 70_000)).expect("write");
    set_time(&top.join("rank0"), seconds);
    set_time(top, seconds);
}

/// Proves S-agent-32.
#[test]
fn a_pull_into_a_directory_that_others_may_change_is_refused() {
    let sandbox = Sandbox::new("neighbours-parent");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("rank0"), b"data").expect("write");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let project = sandbox.mkdir("project");
    let pull = |target: &Path, extra: &[&str]| {
        pull(
            &sandbox,
            mount.backing(),
            &mount.join("rank0"),
            target,
            extra,
        )
    };
    for (owner, mode, words) in [
        (0, 0o2770, "has mode 2770"),
        (0, 0o777, "has mode 0777"),
        (OTHER, 0o755, "belongs to user 65534"),
    ] {
        set_mode(&project, mode);
        chown(&project, Some(owner), None).expect("chown");
        set_mode(&project, mode);
        let refused = pull(&project.join("copy"), &[]).code(1);
        refused.says(words).says("choose a place");
        pull(&project, &["--follow"]).code(1).says(words);
        assert!(names(&project).is_empty(), "{words}");
    }
    // A directory of one's own in it, or one with the sticky bit, will do.
    let own = sandbox.mkdir("project/own");
    pull(&own.join("copy"), &[]).ok();
    assert_eq!(fs::read(own.join("copy")).expect("read"), b"data");
    chown(&project, Some(0), None).expect("chown");
    set_mode(&project, 0o1777);
    pull(&project.join("copy"), &[]).ok();
}

/// Proves S-agent-33.
#[test]
fn regression_names_that_are_one_where_the_copy_goes_lead_nowhere() {
    let sandbox = Sandbox::new("neighbours-case");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let outside = sandbox.mkdir("outside");
    // A list has its names in their order: the link comes first.
    fs::create_dir_all(mount.join("led/a")).expect("mkdir");
    symlink(&outside, mount.join("led/A")).expect("symlink");
    fs::write(mount.join("led/a/evil"), b"evil").expect("write");
    fs::create_dir(mount.join("twins")).expect("mkdir");
    fs::write(mount.join("twins/F"), b"one").expect("write");
    fs::write(mount.join("twins/f"), b"other").expect("write");
    fs::create_dir(mount.join("plain")).expect("mkdir");
    fs::write(mount.join("plain/F"), b"one").expect("write");
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let (source, point) = (sandbox.mkdir("folded"), sandbox.mkdir("point"));
    let session = mount_client(&source, &point, FoldCase, 4).expect("mount");
    for name in ["led", "twins"] {
        let target = point.join(name);
        pull(&sandbox, mount.backing(), &mount.join(name), &target, &[])
            .code(1)
            .says("treats two names of the source as one");
        assert!(!target.exists(), "{name}");
        assert!(names(&outside).is_empty(), "made outside");
    }
    let target = point.join("plain");
    pull(
        &sandbox,
        mount.backing(),
        &mount.join("plain"),
        &target,
        &[],
    )
    .ok();
    assert_eq!(fs::read(target.join("F")).expect("read"), b"one");
    drop(session);
    let (sane, name) = (sandbox.join("twins"), mount.join("twins"));
    pull(&sandbox, mount.backing(), &name, &sane, &[]).ok();
    assert!(!staging_of(&sane).exists());
}

/// `firn pull --follow` that ends with the value.
struct Follower {
    child: Child,
    log: PathBuf,
}

impl Follower {
    fn start(sandbox: &Sandbox, mount: &FirnMount<'_>, copies: &Path) -> Self {
        let extra = ["--follow", "--keep", "2", "--every", "100ms"];
        let mut command = pull_command(sandbox, mount.backing(), mount.path(), copies, &extra);
        let log = sandbox.join("follow.log");
        let stderr = File::create(&log).expect("a log");
        command.stdout(Stdio::null()).stderr(stderr);
        Self {
            child: command.spawn().expect("start the follower"),
            log,
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("its log")
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proves S-agent-34.
#[test]
fn regression_copies_of_other_users_neither_count_nor_go() {
    let sandbox = Sandbox::new("neighbours-follow");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let copies = sandbox.mkdir("copies");
    set_mode(&copies, 0o1777);
    let planted = ["step_2", "step_8", "step_9", ".next-x", ".removed-x"];
    for name in planted {
        plant(&copies.join(name), LATE);
    }
    let _agent = Agent::start(&sandbox, mount.path(), &[]);
    let follower = Follower::start(&sandbox, &mount, &copies);
    let own = || {
        let is_own = |name: &String| {
            let found = copies.join(name).symlink_metadata();
            !name.starts_with(".firn-pull") && found.is_ok_and(|found| found.uid() == 0)
        };
        let mut own = names(&copies);
        own.retain(is_own);
        own
    };
    for step in 1..=4 {
        write_step(&mount.join(format!("step_{step}")), 1_000_000_000 + step);
        // One whose name another user has cannot be copied; those after it are.
        if step != 2 {
            let name = format!("step_{step}");
            wait_until("a copy", LIMIT, || own().contains(&name));
        } else {
            wait_until("it is told", LIMIT, || follower.log().contains("step_2"));
        }
    }
    wait_until("the oldest copy goes", LIMIT, || {
        own() == ["step_3", "step_4"]
    });
    for name in planted {
        assert!(copies.join(name).join("rank0").exists(), "{name} is gone");
    }
    let told = follower.log().matches("step_2").count();
    assert_eq!(told, 1, "{}", follower.log());
}

/// Proves S-prune-4.
#[test]
fn regression_checkpoints_of_other_users_neither_count_nor_go() {
    let sandbox = Sandbox::new("neighbours-prune");
    let backing = sandbox.join("backing");
    set_mode(&backing, 0o1777);
    for (name, time) in [("step_0", EARLY), ("step_8", LATE), ("step_9", LATE)] {
        plant(&backing.join(name), time);
    }
    plant(&backing.join(".step_7.pruned"), EARLY);
    let mount = FirnMount::new(&sandbox, DEMAND);
    for step in 1..=4 {
        write_step(&mount.join(format!("step_{step}")), 1_000_000_000 + step);
    }
    // Nor does what another user puts into one of the user's.
    plant(&mount.join("step_1/late"), LATE);
    set_time(&mount.join("step_1"), 1_000_000_001);
    let prune = |more: &[&str]| {
        let mut command = sandbox.firn(["prune", "--keep", "3", "--json"]);
        run(command.args(more).arg(mount.path())).ok().json()
    };
    let plan = prune(&["--dry-run"]);
    assert_eq!(plan["removed"], serde_json::json!(["step_1"]), "{plan}");
    let told = prune(&[]);
    assert_eq!(told["removed"], serde_json::json!(["step_1"]), "{told}");
    let foreign = told["kept"].as_array().expect("a list").iter();
    let foreign = foreign.filter(|kept| kept["why"] == "foreign").count();
    assert_eq!(foreign, 3, "{told}");
    let left = [
        ".step_7.pruned",
        "step_0",
        "step_2",
        "step_3",
        "step_4",
        "step_8",
        "step_9",
    ];
    assert_eq!(names(mount.path()), left);
}

/// Proves S-prune-5: one in which a file system is mounted is not looked into.
#[test]
fn a_checkpoint_that_cannot_be_removed_keeps_no_other_one() {
    let sandbox = Sandbox::new("neighbours-stuck");
    let mount_of_firn = FirnMount::new(&sandbox, DEMAND);
    for step in 1..=5 {
        write_step(
            &mount_of_firn.join(format!("step_{step}")),
            1_000_000_000 + step,
        );
    }
    let busy = mount_of_firn.join("step_1/busy");
    fs::create_dir(&busy).expect("mkdir");
    set_time(&busy, 1_000_000_001);
    set_time(&mount_of_firn.join("step_1"), 1_000_000_001);
    mount("tmpfs", &busy, "tmpfs", MountFlags::empty(), None).expect("mount a tmpfs");
    fs::write(busy.join("file"), b"of the other file system").expect("write");
    let prune = || {
        let mut command = sandbox.firn(["prune", "--keep", "2"]);
        run(command.arg(mount_of_firn.path()))
    };
    let told = prune().code(3).says("step_1").stdout.clone();
    for step in [2, 3] {
        assert!(told.contains(&format!("removed: step_{step}")), "{told}");
    }
    let left = ["step_1", "step_4", "step_5"];
    assert_eq!(names(mount_of_firn.path()), left);
    assert!(busy.join("file").exists());
    unmount_lazily(&busy);
    prune().ok();
    assert_eq!(names(mount_of_firn.path()), left[1..]);
}

/// Proves S-priv-14.
#[test]
fn regression_a_place_below_a_directory_that_others_may_change_is_refused() {
    let sandbox = Sandbox::new("neighbours-above");
    let project = sandbox.mkdir("project");
    for name in ["arenas", "lane", "backup", "spill", "runtime", "backing"] {
        let own = sandbox.mkdir(&format!("project/{name}"));
        set_mode(&own, 0o700);
    }
    let place = |name: &str| project.join(name).display().to_string();
    let options = [
        (format!("arena-dir={}", place("arenas")), 10),
        (format!("placement=dirs,lanes={}", place("lane")), 2),
        (format!("drain=commit,backup={}", place("backup")), 10),
        (format!("spill={}", place("spill")), 10),
        (format!("spill={}/file", place("spill")), 10),
    ];
    // The backing may be there: bytes of the user's own are seen to by the user.
    let point = sandbox.join("mnt");
    let mut mounts = 0;
    let mut mount = |options: &str, runtime: Option<&Path>| {
        mounts += 1;
        // What a lane or a transaction leaves in one is not in the way of the next.
        let backing = sandbox.mkdir(&format!("project/backing/{mounts}"));
        let options = format!("arena-size=16M,chunk-size=1M,{options}");
        let mut command = sandbox.firn(mount_args(&backing, &point, &options));
        if let Some(runtime) = runtime {
            command.env("FIRN_RUNTIME_DIR", runtime);
        }
        let outcome = run(&mut command);
        if is_mounted(&point) {
            let mut umount = sandbox.firn(["umount"]);
            if let Some(runtime) = runtime {
                umount.env("FIRN_RUNTIME_DIR", runtime);
            }
            run(umount.arg(&point)).ok();
        }
        outcome
    };
    let at_fault = format!("{} has mode 2770", project.display());
    set_mode(&project, 0o2770);
    mount("drain=eager", None).ok();
    for (options, code) in &options {
        mount(options, None).code(*code).says(&at_fault);
    }
    let runtime = project.join("runtime");
    mount("drain=eager", Some(&runtime)).code(1).says(&at_fault);
    for name in ["arenas", "lane", "backup", "spill", "runtime"] {
        assert!(names(&project.join(name)).is_empty(), "{name}");
    }
    // The same by a link of another user's.
    set_mode(&project, 0o755);
    let shared = sandbox.mkdir("shared");
    set_mode(&shared, 0o1777);
    symlink(project.join("arenas"), shared.join("link")).expect("symlink");
    let by_link = format!("arena-dir={}/link", shared.display());
    mount(&by_link, None).ok();
    std::os::unix::fs::lchown(shared.join("link"), Some(OTHER), None).expect("lchown");
    mount(&by_link, None).code(10).says("belongs to user 65534");
    for mode in [0o755, 0o1777] {
        set_mode(&project, mode);
        for (options, _) in &options {
            mount(options, None).ok();
        }
        mount("drain=eager", Some(&runtime)).ok();
    }
}

/// Proves S-log-42: a reader without Firn believes only the user's own logs.
#[test]
fn regression_logs_of_another_user_are_not_read_without_firn() {
    let sandbox = Sandbox::new("neighbours-reader");
    let backing = sandbox.join("backing");
    set_mode(&backing, 0o1777);
    let options = format!("{DEMAND},layout=log,flatten=off");
    let mount = FirnMount::new(&sandbox, &options);
    fs::write(mount.join("shared"), b"in logs").expect("write");
    mount.umount();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/read_log.py");
    let read = || {
        let mut python = Command::new("python3");
        run(python.arg(&script).arg(&backing).arg("shared"))
    };
    assert_eq!(read().ok().stdout, "in logs");
    let firn = backing.join(".firn");
    let log_of = |container: &Path| {
        let names = names(container).into_iter();
        let mut logs = names.filter(|name| name.starts_with("d-"));
        logs.next().map(|name| container.join(name))
    };
    let below = |dir: &Path| {
        let dir = dir.to_owned();
        names(&dir).into_iter().map(move |name| dir.join(name))
    };
    let mut containers = below(&firn.join("log")).flat_map(|file| below(&file).collect::<Vec<_>>());
    let found = containers.find_map(|container| Some((log_of(&container)?, container)));
    let (data, container) = found.expect("a container with a log");
    let of_file = container.parent().expect("the directory of a file");
    let secret = sandbox.join("secret");
    fs::write(&secret, b"a secret of the user's").expect("write");
    set_mode(&secret, 0o600);
    let give = |path: &Path, uid| std::os::unix::fs::lchown(path, Some(uid), None).expect("chown");
    for path in [
        &firn,
        &firn.join("log"),
        of_file,
        &container,
        &container.join("head"),
        &data,
    ] {
        give(path, OTHER);
        read().code(10).says("belongs to user 65534");
        give(path, 0);
        if !path.is_symlink() {
            let mode = fs::metadata(path).expect("stat").permissions().mode();
            set_mode(path, mode | 0o044);
            read().code(10).says("not this user's alone");
            set_mode(path, mode);
        }
    }
    let aside = sandbox.join("aside");
    fs::rename(&data, &aside).expect("rename");
    symlink(&secret, &data).expect("symlink");
    let told = read();
    assert_ne!(told.code, 0);
    assert!(!told.stdout.contains("secret"), "{}", told.stdout);
    fs::remove_file(&data).expect("remove");
    fs::rename(&aside, &data).expect("rename");
    assert_eq!(read().ok().stdout, "in logs");
}

/// Proves S-priv-16.
#[test]
fn regression_recover_without_an_arena_looks_at_the_backing() {
    let sandbox = Sandbox::new("neighbours-recover");
    let backing = sandbox.join("backing");
    set_mode(&backing, 0o1777);
    let recover = || sandbox.run(["recover".as_ref(), backing.as_os_str()]);
    let told = recover().ok().stdout;
    assert!(told.contains("nothing to recover"), "{told}");
    let firn = backing.join(".firn");
    fs::create_dir(&firn).expect("mkdir");
    set_mode(&firn, 0o700);
    chown(&firn, Some(OTHER), None).expect("chown");
    recover().code(10).says("belongs to user 65534");
    fs::remove_dir(&firn).expect("rmdir");
    symlink("/etc", &firn).expect("symlink");
    recover().code(10).says("symbolic link");
}

/// Proves S-priv-9: whose a spill file is comes before what is in it, and also where an arena needs it.
#[test]
fn regression_a_spill_file_that_is_not_the_users_ends_with_the_same_status_everywhere() {
    let sandbox = Sandbox::new("neighbours-spill");
    let disk = sandbox.mkdir("disk");
    let spill = disk.join("spill");
    let options = format!(
        "arena-size=8M,chunk-size=1M,drain=demand,passthrough=off,spill={},spill-size=64M",
        spill.display()
    );
    let held = FirnMount::new(&sandbox, &options);
    fs::write(held.join("file"), bytes(1, 20 << 20)).expect("write");
    wait_until("something is spilled", LIMIT, || {
        held.status()
            .spill
            .is_some_and(|spill| spill.moved_bytes > 0)
    });
    let backing = held.kill();
    let point = sandbox.join("mnt");
    let verbs = |words: &str| {
        sandbox
            .run(mount_args(&backing, &point, &options))
            .code(10)
            .says(words);
        for verb in ["recover", "check"] {
            sandbox
                .run([verb.as_ref(), backing.as_os_str()])
                .code(10)
                .says(words);
        }
    };
    chown(&spill, Some(OTHER), None).expect("chown");
    verbs("belongs to user 65534");
    chown(&spill, Some(0), None).expect("chown");
    let aside = disk.join("aside");
    fs::rename(&spill, &aside).expect("rename");
    symlink(&aside, &spill).expect("symlink");
    verbs("is a symbolic link");
    fs::remove_file(&spill).expect("remove");
    fs::rename(&aside, &spill).expect("rename");
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert!(fs::read(backing.join("file")).expect("read") == bytes(1, 20 << 20));
    // Garbage of another user is told as another user's, without an arena, too.
    fs::write(&spill, b"garbage").expect("write");
    chown(&spill, Some(OTHER), None).expect("chown");
    sandbox
        .run(mount_args(&backing, &point, &options))
        .code(10)
        .says("belongs to user 65534");
}

/// Proves S-log-75: the name that a host has for its mounts counts without a mount, too.
#[test]
fn regression_logs_are_flattened_under_the_name_of_the_host_without_a_mount() {
    let sandbox = Sandbox::new("neighbours-flatten");
    let options = format!("{DEMAND},layout=log,flatten=off,host=n7");
    let mount = FirnMount::new(&sandbox, &options);
    fs::write(mount.join("shared"), b"in logs").expect("write");
    let backing = mount.umount();
    let flatten = |more: &[&str]| {
        let mut command = sandbox.firn(["flatten", "--all"]);
        run(command.args(more))
    };
    let of_backing = ["--backing", backing.to_str().expect("UTF-8")];
    flatten(&["--host", "n7"]).code(2).says("--backing");
    flatten(&[&of_backing[..], &["--host", "a/b"]].concat()).code(2);
    flatten(&[&of_backing[..], &["--host", "n7"]].concat()).ok();
    assert_eq!(fs::read(backing.join("shared")).expect("read"), b"in logs");
}

/// Proves S-priv-17.
#[test]
fn a_backing_whose_names_others_may_take_away_is_told() {
    let sandbox = Sandbox::new("neighbours-top");
    let backing = sandbox.join("backing");
    let told = |mode: u32, options: &str| {
        set_mode(&backing, mode);
        let options = format!("{DEMAND}{options}");
        let point = sandbox.join("mnt");
        let outcome = sandbox.run(mount_args(&backing, &point, &options)).ok();
        sandbox.run(["umount".as_ref(), point.as_os_str()]).ok();
        outcome.stderr.contains("take .firn away")
    };
    assert!(!told(0o2770, ""));
    for (mode, expected) in [(0o2770, true), (0o1777, false), (0o700, false)] {
        assert_eq!(told(mode, ",layout=log"), expected, "{mode:o}");
    }
}

/// Proves S-place-7: what another user put into a lane that he may make names in is named, and not the lane blamed.
#[test]
fn regression_a_marker_of_another_user_in_a_lane_is_named() {
    let sandbox = Sandbox::new("neighbours-marker");
    let lane = sandbox.mkdir("lane");
    set_mode(&lane, 0o1777);
    let options = format!("{DEMAND},placement=dirs,lanes={}", lane.display());
    let mount = FirnMount::new(&sandbox, &options);
    let backing = mount.umount();
    let marker = names(&lane)
        .into_iter()
        .find(|name| name.starts_with(".firn-"));
    let marker = marker.expect("the lane is marked");
    chown(lane.join(&marker), Some(OTHER), None).expect("chown");
    let point = sandbox.join("mnt");
    let refused = sandbox.run(mount_args(&backing, &point, &options)).code(2);
    refused
        .says(&format!("{marker} in it belongs to user 65534"))
        .says("remove it");
}

/// Proves S-priv-18: scripts/criu-action, given what CRIU gives it.
#[test]
fn regression_images_that_others_may_have_changed_are_not_restored_from() {
    let sandbox = Sandbox::new("neighbours-images");
    let images = sandbox.mkdir("17");
    set_mode(&images, 0o755);
    let mark = images.join("firn.checkpoint");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/criu-action");
    let restore = || {
        let mut bash = Command::new("bash");
        bash.arg(&script)
            .env("CRTOOLS_SCRIPT_ACTION", "pre-restore")
            .env("CRTOOLS_IMAGE_DIR", &images);
        // Says what it is asked for.
        run(bash.env("FIRN", "/bin/echo"))
    };
    fs::write(&mark, "17\n/work\n").expect("write");
    restore().ok().says("restore --id 17 -- /work");
    for path in [&images, &mark] {
        chown(path, Some(OTHER), None).expect("chown");
        restore().code(1).says("belongs to user 65534");
        chown(path, Some(0), None).expect("chown");
        let mode = fs::metadata(path).expect("stat").permissions().mode();
        set_mode(path, mode | 0o020);
        restore().code(1).says("others may have changed it");
        set_mode(path, mode);
    }
    for damaged in ["17\n--help\n", "x\n/work\n", "17\n"] {
        fs::write(&mark, damaged).expect("write");
        restore().code(1).says("is damaged");
    }
    let aside = sandbox.join("aside");
    fs::rename(&mark, &aside).expect("rename");
    symlink(&aside, &mark).expect("symlink");
    restore().code(1).says("is a symbolic link");
}
