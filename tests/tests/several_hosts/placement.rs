//! Files in lanes: mounts that are refused, lanes that come and go, other lists of lanes, and what users are told.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_protocol::{LaneState, LaneStatus, PlacedStatus};
use firn_tests::lanes::place_in;
use firn_tests::mount::{SMALL, mount_args, patient};
use firn_tests::preloaded::Frontend;
use firn_tests::sandbox::is_mounted;
use firn_tests::{FirnMount, FsKind, LaneImages, LoopImage, Outcome, Sandbox, run, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

fn three_lanes(sandbox: &Sandbox) -> [PathBuf; 3] {
    ["lane0", "lane1", "lane2"].map(|name| sandbox.mkdir(name))
}

/// Refused with this message and exit code, and nothing was changed.
#[track_caller]
fn refused(sandbox: &Sandbox, options: &str, code: i32, message: &str) {
    let mount_point = sandbox.join("mnt");
    let outcome = sandbox.run(mount_args(&sandbox.join("backing"), &mount_point, options));
    assert!(!is_mounted(&mount_point), "it was mounted: {outcome}");
    assert_eq!(outcome.stderr.trim_end(), format!("firn: {message}"));
    assert_eq!(outcome.code, code, "{outcome}");
    assert!(sandbox.processes().is_empty(), "a firnd is left");
    assert!(sandbox.arenas().is_empty(), "an arena is left");
    assert!(!sandbox.join("backing/.firn").exists(), "`.firn` was made");
}

#[track_caller]
fn refuses_lane(sandbox: &Sandbox, lane: &Path, code: i32, why: &str) {
    let good = sandbox.mkdir("good");
    let options = place_in(&[&good, lane], SMALL);
    refused(
        sandbox,
        &options,
        code,
        &format!("lane {} {why}", lane.display()),
    );
    assert_eq!(fs::read_dir(&good).expect("list").count(), 0);
}

/// Proves S-place-7.
#[test]
fn directories_that_cannot_be_lanes_are_refused_before_anything_is_made() {
    let sandbox = Sandbox::new("badlanes");
    let path = |name: &str| sandbox.join(name);
    refuses_lane(
        &sandbox,
        &path("missing"),
        2,
        "does not exist: create it, or mount its file system first",
    );
    fs::write(path("file"), "").expect("write");
    let not_a_directory =
        "is not a directory: name a directory on the server that files shall go to";
    refuses_lane(&sandbox, &path("file"), 2, not_a_directory);
    refuses_lane(&sandbox, &path("file/x"), 2, not_a_directory);
    let inside = |dir: &str| {
        let dir = path(dir);
        format!("is inside {}: name a directory elsewhere", dir.display())
    };
    refuses_lane(
        &sandbox,
        &sandbox.mkdir("backing/lane"),
        2,
        &inside("backing"),
    );
    fs::remove_dir(path("backing/lane")).expect("rmdir");
    refuses_lane(&sandbox, &sandbox.mkdir("mnt/lane"), 2, &inside("mnt"));
    fs::remove_dir(path("mnt/lane")).expect("rmdir");
    refuses_lane(
        &sandbox,
        sandbox.path(),
        2,
        &format!(
            "contains {}: name a separate directory",
            path("backing").display()
        ),
    );
    let same = format!(
        "is the same directory as {}: name each lane once",
        path("good").display()
    );
    symlink(path("good"), path("link")).expect("symlink");
    refuses_lane(&sandbox, &path("link"), 2, &same);
    let bound = sandbox.mkdir("bound");
    run(Command::new("mount")
        .arg("--bind")
        .arg(path("good"))
        .arg(&bound))
    .ok();
    refuses_lane(&sandbox, &bound, 2, &same);
    run(Command::new("umount").arg(&bound)).ok();
    // A part of the backing, by another path: nothing above that path says so.
    run(Command::new("mount")
        .arg("--bind")
        .arg(sandbox.mkdir("backing/part"))
        .arg(&bound))
    .ok();
    refuses_lane(&sandbox, &bound, 2, &inside("backing"));
    run(Command::new("umount").arg(&bound)).ok();
    fs::remove_dir(path("backing/part")).expect("rmdir");
    refuses_lane(
        &sandbox,
        &path("good/../bound"),
        2,
        "is not a path that links can have: leave out `.`, `..` and double slashes",
    );
}

/// Proves S-place-7.
#[test]
fn a_lane_that_others_could_put_files_into_is_refused() {
    let sandbox = Sandbox::new("badowner");
    let lane = sandbox.mkdir("theirs");
    std::os::unix::fs::chown(&lane, Some(65534), None).expect("chown");
    let exposed = |lane: &Path, why: &str| {
        let lane = lane.display();
        format!("is not used: {lane} is no place for files of Firn: {why}")
    };
    let why = exposed(
        &lane,
        "it belongs to user 65534 instead of user 0; choose a place where all directories above belong to you or root, such as a directory that you make in /tmp or /dev/shm",
    );
    refuses_lane(&sandbox, &lane, 2, &why);
    let others = "others may replace what is in it, because it has no sticky bit; let only its owner write to it (chmod go-w) or set its sticky bit (chmod +t), or choose a place where only you and root may rename, as in a directory that you make in /tmp or /dev/shm";
    let lane = sandbox.mkdir("open");
    fs::set_permissions(&lane, fs::Permissions::from_mode(0o777)).expect("chmod");
    let why = exposed(&lane, &format!("it has mode 0777: {others}"));
    refuses_lane(&sandbox, &lane, 2, &why);
    let above = sandbox.mkdir("project");
    let lane = sandbox.mkdir("project/lane");
    fs::set_permissions(&above, fs::Permissions::from_mode(0o2770)).expect("chmod");
    let why = format!("{} has mode 2770: {others}", above.display());
    refuses_lane(&sandbox, &lane, 2, &exposed(&lane, &why));
}

/// Proves S-place-7.
#[test]
fn a_lane_that_is_read_only_or_full_is_refused() {
    let sandbox = Sandbox::new("rolane");
    let image = LoopImage::new(&sandbox, FsKind::Tmpfs, 1);
    let lane = image.mkdir("lane");
    image.remount("ro");
    refuses_lane(
        &sandbox,
        &lane,
        2,
        "is on a read-only file system: make it writable, or leave the lane out",
    );
    image.remount("rw,nr_inodes=3");
    let options = place_in(&[&lane], SMALL);
    let outcome = sandbox.run(mount_args(
        &sandbox.join("backing"),
        &sandbox.join("mnt"),
        &options,
    ));
    outcome
        .code(2)
        .says("is on a file system without room: make room, or leave the lane out");
    assert!(sandbox.arenas().is_empty(), "an arena is left");
}

/// Proves S-place-7.
#[test]
fn mistakes_in_lists_and_maps_are_named() {
    let sandbox = Sandbox::new("badmap");
    let lanes = three_lanes(&sandbox);
    refused(
        &sandbox,
        "placement=dirs,lanes=srv0/x",
        2,
        "-o: lanes: `srv0/x` is not an absolute path: begin each directory with a slash, with colons between them",
    );
    refused(
        &sandbox,
        "placement=dirs",
        2,
        "placement=dirs (-o) and lanes= (default) contradict each other: name the directories that files go to, as in lanes=/srv0/x:/srv1/x",
    );
    let map = sandbox.join("map");
    let with_map = place_in(&lanes, &format!("lane-map={}", map.display()));
    let refuses = |text: &[u8], why: &str| {
        fs::write(&map, text).expect("write");
        let message = format!("lane-map {}: {why}", map.display());
        refused(&sandbox, &with_map, 2, &message);
    };
    refuses(
        b"*.pt 0\nmodel* 3\n",
        "line 2: there is no lane 3: lanes are numbered 0 to 2",
    );
    refuses(
        b"\n# text\nx\n",
        "line 3: `x` has no lane: write a pattern, a space and a number",
    );
    refuses(b"a one\n", "line 1: `one` is not the number of a lane");
    refuses(
        b"d/x 1\n",
        "line 1: `d/x` has a slash: patterns are compared with names, without directories",
    );
    fs::remove_file(&map).expect("remove");
    let message = format!(
        "lane-map {}: cannot be read: No such file or directory (os error 2)",
        map.display()
    );
    refused(&sandbox, &with_map, 2, &message);
}

fn lane_of(backing: &Path, name: &str) -> PathBuf {
    let target = fs::read_link(backing.join(name)).expect("a link");
    target.parent().expect("a directory").to_owned()
}

/// Proves S-place-1, S-place-4.
#[test]
fn a_map_a_number_and_turns_decide_and_explain_says_which() {
    let sandbox = Sandbox::new("rule");
    let lanes = three_lanes(&sandbox);
    let map = sandbox.join("map");
    fs::write(&map, "# the large one\nmodel* 2\n").expect("write");
    let options = place_in(&lanes, &format!("lane-map={},{SMALL}", map.display()));
    let mount = FirnMount::new(&sandbox, &options);
    let backing = mount.backing().to_owned();
    let explain = |name: &str| -> String {
        let path = mount.join(name);
        let args = ["place".as_ref(), "--explain".as_ref(), path.as_os_str()];
        sandbox.run(args).ok().stdout
    };
    let path = |name: &str| mount.join(name).display().to_string();
    let lane = |number: usize| lanes[number].display().to_string();
    assert_eq!(
        explain("model-0"),
        format!(
            "{} does not exist\na new file of this name goes to {}: line 2 of the lane map matches\n",
            path("model-0"),
            lane(2)
        )
    );
    for name in ["model-0", "rank_4", "latest"] {
        fs::write(mount.join(name), name).expect("write");
    }
    assert_eq!(lane_of(&backing, "model-0"), lanes[2]);
    assert_eq!(lane_of(&backing, "rank_4"), lanes[1]);
    let file = fs::read_link(backing.join("rank_4")).expect("a link");
    assert_eq!(fs::read(&file).expect("read without firn"), b"rank_4");
    assert_eq!(
        explain("rank_4"),
        format!(
            "{} is {}\na new file of this name goes to {}: the numbers in its path add up to 4, modulo 3 lanes; if that lane has far more than its share of the directory's files, the lane with the fewest is chosen\n",
            path("rank_4"),
            file.display(),
            lane(1)
        )
    );
    fs::remove_file(mount.join("rank_4")).expect("remove");
    wait_until("the lane has its room back", LIMIT, || !file.exists());
    assert!(explain("latest").ends_with(
        "the lane of a new file of this name is not fixed: the name has no number, so the lane with the fewest files of its directory is chosen\n"
    ));
    mount.umount();
}

fn lane_status(mount: &FirnMount<'_>, lane: &Path) -> (LaneStatus, PlacedStatus) {
    let lanes = mount.status().lanes;
    let found = lanes
        .into_iter()
        .find(|status| status.path.as_path() == lane)
        .unwrap_or_else(|| panic!("no lane {lane:?} in the status"));
    let placed = found.placed.clone().expect("files are placed there");
    (found, placed)
}

/// Proves S-place-2, S-place-3.
#[test]
fn files_stay_where_they_are_when_the_next_mount_has_other_lanes_or_none() {
    let sandbox = Sandbox::new("otherlanes");
    let [a, b, c] = three_lanes(&sandbox);
    let mount = FirnMount::new(&sandbox, &place_in(&[&a, &b], SMALL));
    for rank in 0..4 {
        fs::write(mount.join(format!("rank_{rank}")), format!("{rank}")).expect("write");
    }
    // A link that a user made is a link, wherever it leads to.
    let target = fs::read_link(mount.backing().join("rank_0")).expect("a link");
    symlink(&target, mount.join("copied")).expect("symlink");
    let backing = mount.umount();
    let layouts = [
        place_in(&[&b, &c], SMALL),
        place_in(&[&c, &b, &a], SMALL),
        SMALL.to_owned(),
        format!("{SMALL},ro"),
        place_in(&[&c], SMALL),
    ];
    for options in &layouts {
        let mount = FirnMount::new(&sandbox, options);
        for rank in 0..4 {
            let file = mount.join(format!("rank_{rank}"));
            let metadata = fs::symlink_metadata(&file).expect("stat");
            assert!(metadata.is_file(), "{options}");
            assert_eq!(metadata.nlink(), 1);
            assert_eq!(fs::read_to_string(&file).expect("read"), format!("{rank}"));
        }
        assert_eq!(
            fs::read_link(mount.join("copied")).expect("readlink"),
            target
        );
        assert_eq!(lane_of(&backing, "rank_1"), b);
        mount.umount();
    }
    // The last one gives new files to c alone, and a keeps what it has.
    let mount = FirnMount::new(&sandbox, &layouts[4]);
    fs::write(mount.join("new_7"), "7").expect("write");
    assert_eq!(lane_of(&backing, "new_7"), c);
    assert!(lane_status(&mount, &c).1.takes_files);
    assert!(!lane_status(&mount, &a).1.takes_files);
    fs::remove_file(mount.join("rank_0")).expect("remove");
    fs::remove_file(mount.join("rank_2")).expect("remove");
    mount.umount();
    let mount = FirnMount::new(&sandbox, "drain=commit");
    assert_eq!(fs::read(mount.join("new_7")).expect("read"), b"7");
    mount.umount();
    let forget = |lane: &Path| {
        let args = [
            "place".as_ref(),
            "--forget".as_ref(),
            lane.as_os_str(),
            backing.as_os_str(),
        ];
        sandbox.run(args)
    };
    forget(&b).code(11).says("has 2 files of");
    forget(&a).ok();
    forget(&a).code(2).says("has no files in a lane");
    assert_eq!(fs::read_dir(&a).expect("list").count(), 0);
}

/// Proves S-place-2.
#[test]
fn what_is_held_of_placed_files_is_drained_by_recover_and_by_a_mount_without_lanes() {
    let sandbox = Sandbox::new("heldlanes");
    let lanes = three_lanes(&sandbox);
    let options = place_in(&lanes, &patient("close=held"));
    for round in 0..2 {
        let mount = FirnMount::new(&sandbox, &options);
        let names: Vec<String> = (0..6).map(|rank| format!("r{round}_{rank}")).collect();
        for name in &names {
            fs::write(mount.join(name), name.repeat(1000)).expect("write");
        }
        assert!(mount.status().held_bytes > 0);
        let (status, placed) = lane_status(&mount, &lanes[1]);
        assert_eq!(placed.files, 2);
        assert_eq!(status.held_bytes, 2 * 4 * 1000);
        let backing = mount.kill();
        if round == 0 {
            sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
        } else {
            FirnMount::new(&sandbox, SMALL).umount();
        }
        for name in &names {
            let content = fs::read_to_string(backing.join(name)).expect("read by its link");
            assert_eq!(content, name.repeat(1000));
            assert!(lanes.contains(&lane_of(&backing, name)));
        }
    }
}

/// Proves S-place-6.
#[test]
fn a_full_lane_gets_no_new_file_and_its_files_wait_while_others_go_on() {
    let sandbox = Sandbox::new("fulllane");
    let small = LoopImage::new(&sandbox, FsKind::Tmpfs, 8);
    let lanes = [small.mkdir("lane"), sandbox.mkdir("lane1")];
    let mount = FirnMount::new(&sandbox, &place_in(&lanes, &patient("close=held")));
    let filler = small.path().join("filler");
    run(Command::new("dd")
        .arg("if=/dev/zero")
        .arg(format!("of={}", filler.display()))
        .args(["bs=64K", "status=none"]));
    let content = vec![7; 1 << 20];
    fs::write(mount.join("rank_0"), &content).expect("write");
    fs::write(mount.join("rank_1"), &content).expect("write");
    sandbox
        .run(["drain".as_ref(), mount.path().as_os_str()])
        .ok();
    wait_until("the lane is known to be full", LIMIT, || {
        lane_status(&mount, &lanes[0]).1.state == LaneState::Full
    });
    mount.wait("drained", &mount.join("rank_1")).ok();
    fs::write(mount.join("rank_2"), &content).expect("write");
    assert_eq!(lane_of(mount.backing(), "rank_2"), lanes[1]);
    mount.wait("drained", &mount.join("rank_2")).ok();
    assert!(lane_status(&mount, &lanes[0]).0.held_bytes >= 1 << 20);
    assert_eq!(sandbox.logs().matches("a lane fails").count(), 1);
    fs::remove_file(&filler).expect("remove");
    mount.wait("drained", &mount.join("rank_0")).ok();
    fs::write(mount.join("rank_4"), &content).expect("write");
    assert_eq!(lane_of(mount.backing(), "rank_4"), lanes[0]);
    assert_eq!(lane_status(&mount, &lanes[0]).1.state, LaneState::Ok);
    let backing = mount.umount();
    assert_eq!(fs::read(backing.join("rank_0")).expect("read"), content);
}

/// Proves S-place-6.
#[test]
fn a_lane_that_is_gone_gets_no_new_file_but_by_the_map_and_comes_back() {
    let sandbox = Sandbox::new("gonelane");
    let images = LaneImages::new(&sandbox);
    let map = sandbox.join("map");
    fs::write(&map, "fixed* 2\n").expect("write");
    let map = format!("lane-map={}", map.display());
    let options = images.options(&format!("{map},{}", patient("close=held")));
    let mount = FirnMount::over(&sandbox, images.backing(), &options);
    fs::write(mount.join("rank_2"), "two").expect("write");
    mount.wait("drained", &mount.join("rank_2")).ok();
    images.image(2).remount("ro");
    fs::write(mount.join("rank_5"), "five").expect("write");
    assert_eq!(lane_of(images.backing(), "rank_5"), images.lanes()[0]);
    let error = fs::write(mount.join("fixed"), "x").expect_err("the map allows no other lane");
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    assert_eq!(
        lane_status(&mount, &images.lanes()[2]).1.state,
        LaneState::Gone
    );
    assert_eq!(fs::read(mount.join("rank_2")).expect("read"), b"two");
    images.image(2).remount("rw");
    fs::write(mount.join("fixed"), "x").expect("write");
    assert_eq!(
        lane_status(&mount, &images.lanes()[2]).1.state,
        LaneState::Ok
    );
    mount.umount();
}

/// Proves S-place-6.
#[test]
fn files_of_a_lane_that_is_missing_at_the_mount_fail_and_nothing_of_them_is_lost() {
    let sandbox = Sandbox::new("missinglane");
    let lanes = three_lanes(&sandbox);
    let mount = FirnMount::new(&sandbox, &place_in(&lanes, &patient("close=held")));
    for rank in 0..3 {
        fs::write(mount.join(format!("rank_{rank}")), format!("{rank}")).expect("write");
    }
    let backing = mount.kill();
    let away = sandbox.join("away");
    fs::rename(&lanes[2], &away).expect("rename");
    // An empty directory in its place, as that of a file system that is not mounted, is not the lane.
    for is_empty_directory_there in [false, true] {
        if is_empty_directory_there {
            sandbox.mkdir("lane2");
        }
        let recovered = sandbox.run(["recover".as_ref(), backing.as_os_str()]);
        // Partly done, as long as there is another file to drain.
        let code = if is_empty_directory_there { 1 } else { 3 };
        recovered.code(code).says("they stay in the arena");
        let mount = FirnMount::new(&sandbox, SMALL);
        let file = mount.join("rank_2");
        let error = fs::read(&file).expect_err("its lane is missing");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let error = fs::remove_file(&file).expect_err("its lane is missing");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert_eq!(fs::read(mount.join("rank_1")).expect("read"), b"1");
        assert_eq!(lane_status(&mount, &lanes[2]).1.state, LaneState::Gone);
        mount.kill();
    }
    let outcome = sandbox.run(mount_args(
        &backing,
        &sandbox.join("mnt"),
        &place_in(&lanes, SMALL),
    ));
    outcome.code(2).says(&format!(
        "lane {lane} is not the directory that files were placed in: mount its file system; if those files are gone for good, run `firn place --forget {lane} {backing}`",
        lane = lanes[2].display(),
        backing = backing.display()
    ));
    fs::remove_dir(&lanes[2]).expect("rmdir");
    fs::rename(&away, &lanes[2]).expect("rename");
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_eq!(fs::read(backing.join("rank_2")).expect("read"), b"2");
}

/// Two jobs, each with its own backing, and the same lanes.
///
/// Proves S-place-8.
#[test]
fn two_jobs_share_lanes_and_neither_touches_the_other_ones_files() {
    let sandbox = Sandbox::new("twojobs");
    let lanes = three_lanes(&sandbox);
    let options = place_in(&lanes, SMALL);
    let backings = ["one", "other"].map(|name| sandbox.mkdir(name));
    let points = ["mnt1", "mnt2"].map(|name| sandbox.mkdir(name));
    let mounts = [0, 1].map(|at| FirnMount::at(&sandbox, &backings[at], &points[at], &options));
    for (at, mount) in mounts.iter().enumerate() {
        for rank in 0..6 {
            let content = format!("job {at}, rank {rank}");
            fs::write(mount.join(format!("rank_{rank}")), content).expect("write");
        }
    }
    fs::remove_file(mounts[0].join("rank_3")).expect("remove");
    fs::rename(mounts[1].join("rank_4"), mounts[1].join("rank_5")).expect("rename");
    for (at, mount) in mounts.into_iter().enumerate() {
        let backing = mount.umount();
        let kept = if at == 0 {
            [0, 1, 2, 4, 5]
        } else {
            [0, 1, 2, 3, 5]
        };
        for rank in kept {
            let content = fs::read_to_string(backing.join(format!("rank_{rank}"))).expect("read");
            let moved = if at == 1 && rank == 5 { 4 } else { rank };
            assert_eq!(content, format!("job {at}, rank {moved}"));
        }
        let orphans = ["check".as_ref(), "--orphans".as_ref(), backing.as_os_str()];
        assert_eq!(sandbox.run(orphans).ok().stdout, "");
    }
    let files = lanes
        .iter()
        .flat_map(|lane| fs::read_dir(lane).expect("list").flatten());
    let is_file =
        |entry: &fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".firn-");
    assert_eq!(files.filter(is_file).count(), 10);
}

/// Two hosts over one backing and the same lanes, which they write to at the same time: all files are whole, on the
/// lane of their number for either writer, and each host removes and renames what the other one made.
///
/// Proves S-place-1, S-place-8.
#[test]
fn two_hosts_share_a_backing_and_its_lanes() {
    let shared = Sandbox::new("twohosts");
    let lanes = three_lanes(&shared);
    let options = place_in(&lanes, &format!("{SMALL},tokens=flock"));
    let hosts = ["n0", "n1"].map(|host| Sandbox::on_host(&format!("place-{host}"), host));
    let backing = shared.join("backing");
    let mounts: Vec<FirnMount<'_>> = hosts
        .iter()
        .map(|host| FirnMount::over(host, &backing, &options))
        .collect();
    let content = |rank: usize| format!("rank {rank} ").repeat(100_000);
    std::thread::scope(|scope| {
        for (at, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                for rank in (at..24).step_by(2) {
                    let path = mount.join(format!("rank_{rank}"));
                    fs::write(path, content(rank)).expect("write");
                }
            });
        }
    });
    for (mount, host) in mounts.iter().zip(&hosts) {
        host.run([
            "wait",
            "--until",
            "drained",
            mount.path().to_str().expect("UTF-8"),
        ])
        .ok();
    }
    // Rank 1 is of the other host, and so is 2.
    fs::remove_file(mounts[0].join("rank_1")).expect("remove");
    fs::rename(mounts[1].join("rank_2"), mounts[1].join("rank_3")).expect("rename");
    for mount in mounts {
        mount.umount();
    }
    for rank in (0..24).filter(|rank| ![1, 2].contains(rank)) {
        let path = backing.join(format!("rank_{rank}"));
        let written = if rank == 3 { 2 } else { rank };
        assert!(
            fs::read_to_string(&path).expect("read") == content(written),
            "rank {rank}"
        );
        let file = fs::read_link(&path).expect("a link");
        assert!(
            file.starts_with(&lanes[written % 3]),
            "rank {rank} is {file:?}"
        );
    }
    let orphans = ["check".as_ref(), "--orphans".as_ref(), backing.as_os_str()];
    assert_eq!(hosts[0].run(orphans).ok().stdout, "");
}

/// Proves S-place-5.
#[test]
fn check_finds_files_without_a_name_and_removes_nothing_that_has_one() {
    let sandbox = Sandbox::new("orphans");
    let lanes = three_lanes(&sandbox);
    let mount = FirnMount::new(&sandbox, &place_in(&lanes, SMALL));
    for rank in 0..3 {
        fs::write(mount.join(format!("rank_{rank}")), format!("{rank}")).expect("write");
    }
    let backing = mount.umount();
    // As a power loss may leave them: a name that was not synced, and a file that was not.
    let orphan = fs::read_link(backing.join("rank_0")).expect("a link");
    fs::remove_file(backing.join("rank_0")).expect("remove");
    let lost = fs::read_link(backing.join("rank_1")).expect("a link");
    fs::remove_file(&lost).expect("remove");
    let check = |repair: &[&str]| -> Outcome {
        let mut args = vec!["check".as_ref(), "--orphans".as_ref(), backing.as_os_str()];
        args.extend(repair.iter().map(std::ffi::OsStr::new));
        sandbox.run(args)
    };
    let dangling = format!(
        "{}: its file is not in the lane\n",
        backing.join("rank_1").display()
    );
    let found = check(&[]).code(1);
    let file = orphan.display();
    assert_eq!(
        found.stdout,
        format!("{file}: 1 B without a name\n{dangling}")
    );
    assert!(orphan.exists());
    let repaired = check(&["--repair"]).code(1);
    assert_eq!(
        repaired.stdout,
        format!("{file}: 1 B without a name, removed\n{dangling}")
    );
    assert!(!orphan.exists());
    assert_eq!(fs::read(backing.join("rank_2")).expect("read"), b"2");
    let mount = FirnMount::new(&sandbox, SMALL);
    fs::remove_file(mount.join("rank_1")).expect("a name without a file is removed with rm");
    mount.umount();
    check(&[]).ok();
}

#[test]
fn status_says_where_placement_does_not_pay() {
    let sandbox = Sandbox::new("advice");
    let lanes = three_lanes(&sandbox);
    let map = sandbox.join("map");
    fs::write(&map, "step* 0\n").expect("write");
    let options = place_in(&lanes, &format!("lane-map={},{SMALL}", map.display()));
    let mount = FirnMount::new(&sandbox, &options);
    assert!(mount.status().placement_advice.is_empty());
    fs::write(mount.join("rank_0"), "x").expect("write");
    let advice = mount.status().placement_advice;
    assert_eq!(
        advice,
        [
            "3 lanes got only 1 file(s): with fewer than 4 for each lane, files striped over all servers are written faster"
        ]
    );
    for step in 1..20 {
        fs::write(mount.join(format!("step_{step}")), "x").expect("write");
    }
    let advice = mount.status().placement_advice;
    let expected = format!(
        "{} got 20 of 20 files: number the files of a checkpoint consecutively, or use a lane-map",
        lanes[0].display()
    );
    assert_eq!(advice, [expected]);
    mount.umount();
}

/// Proves S-place-1: the files of a stub tree are placed by the names that they have when a program first writes to them,
/// also in directories that only the tree has by then.
#[test]
fn a_stub_tree_places_files_by_their_names() {
    let sandbox = Sandbox::new("treelanes");
    let lanes = three_lanes(&sandbox);
    let options = place_in(&lanes, &format!("frontend=preload,{SMALL}"));
    let mount = FirnMount::new(&sandbox, &options);
    let script = "mkdir -p step1/in; for rank in 0 1 2 3 4 5; do
        head -c 300000 /dev/zero | tr '\\0' \"$rank\" > step1/in/rank$rank; done
        echo early > step1/in/tmp; mv step1/in/tmp step1/in/late2; echo gone > step1/gone; rm step1/gone";
    let mut shell = Command::new("bash");
    shell.args(["-ec", script]).current_dir(mount.path());
    run(Frontend::Tree.preload(&sandbox, &mut shell)).ok();
    mount.umount();
    let dir = sandbox.join("backing/step1/in");
    for rank in 0..6_usize {
        let path = dir.join(format!("rank{rank}"));
        let link = fs::read_link(&path).expect("a link to a lane");
        // The sum of the numbers in the path, modulo the number of lanes.
        assert!(link.starts_with(&lanes[(1 + rank) % 3]), "{rank}: {link:?}");
        let expected = vec![b'0' + rank as u8; 300_000];
        firn_tests::fsops::assert_same_bytes(
            "in its lane",
            &fs::read(&path).expect("read"),
            &expected,
        );
    }
    assert_eq!(fs::read(dir.join("late2")).expect("read"), b"early\n");
    let in_lanes = lanes
        .iter()
        .flat_map(|lane| fs::read_dir(lane).expect("list"));
    let names: Vec<_> = in_lanes
        .map(|entry| entry.expect("an entry").file_name())
        .filter(|name| !name.as_encoded_bytes().starts_with(b"."))
        .collect();
    assert_eq!(names.len(), 7, "a removed file is in no lane: {names:?}");
    let again = FirnMount::new(&sandbox, &place_in(&lanes, SMALL));
    assert_eq!(
        fs::read(again.join("step1/in/late2")).expect("read"),
        b"early\n"
    );
    again.umount();
}
