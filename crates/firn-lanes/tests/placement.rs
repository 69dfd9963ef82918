//! Tests of files that the rule places in lanes.
//!
//! Through Firn, all placed files behave as files of one directory. Without Firn, a placed file is a symbolic link in
//! the primary to a whole file in its lane. A crash at any call loses no file, and leaves no file that Firn does not
//! find.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_backing::{
    Access, Attributes, Backing, DirBacking, Errno, Files, Kind, LaneIndex, Names, Placement,
    RenameFlags, Volume,
};
use firn_lanes::{Lane, LaneState, Lanes, LanesFile, Orphan, Rule, Setup, XATTR};
use firn_sim::{Fault, Hang, tree};
use firn_sim::{SimBacking, suite};
use firn_transact::PlainBacking;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const LANES: usize = 3;
const ID: u128 = 0xf1f0;

/// A primary and its lanes, simulated.
struct World {
    primary: SimBacking,
    lanes: Vec<SimBacking>,
}

impl World {
    fn new() -> Self {
        let primary = SimBacking::new();
        let me = suite::own_caller();
        let root = primary.root();
        let (firn, _) = primary
            .mkdir(&me, &root, OsStr::new(".firn"), 0o755)
            .expect("mkdir");
        primary
            .mkdir(&me, &firn, OsStr::new("placing"), 0o700)
            .expect("mkdir");
        primary.sync_all().expect("sync");
        let lanes = (0..LANES).map(|_| SimBacking::new()).collect();
        Self { primary, lanes }
    }

    fn open(&self) -> Lanes<SimBacking> {
        let root = self.primary.root();
        let (firn, _) = self
            .primary
            .lookup(&root, OsStr::new(".firn"))
            .expect("lookup");
        let (staging, _) = self
            .primary
            .lookup(&firn, OsStr::new("placing"))
            .expect("lookup");
        let lanes = self.lanes.iter().enumerate();
        let lanes = lanes
            .map(|(number, lane)| Lane::new(lane.clone(), lane_path(number)))
            .collect();
        Lanes::open(self.primary.clone(), setup(staging, lanes)).expect("open")
    }

    /// Opens the backing as programs see it, without `.firn`.
    fn open_for_programs(&self) -> PlainBacking<Lanes<SimBacking>> {
        PlainBacking::new(self.open())
    }

    /// Returns the primary and the lanes.
    fn backings(&self) -> impl Iterator<Item = &SimBacking> {
        std::iter::once(&self.primary).chain(&self.lanes)
    }

    fn fork(&self) -> Self {
        Self {
            primary: self.primary.fork(),
            lanes: self.lanes.iter().map(SimBacking::fork).collect(),
        }
    }

    fn files_in_lanes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.tree().len() - 1).sum()
    }
}

fn setup<B: Backing>(staging: B::Inode, lanes: Vec<Arc<Lane<B>>>) -> Setup<B> {
    Setup {
        id: ID,
        staging: Some(staging),
        rule: Some(Rule::new(lanes.len(), "host")),
        lanes,
        absent: Vec::new(),
    }
}

fn lane_path(number: usize) -> OsString {
    format!("/lanes/{number}").into()
}

#[test]
fn a_backing_over_lanes_passes_the_suite() {
    suite::run(|| World::new().open_for_programs());
}

#[test]
fn a_backing_over_lanes_does_what_one_directory_does() {
    let first: u64 = std::env::var("FIRN_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1);
    for seed in first..first + 200 {
        println!("seed {seed}");
        let world = World::new();
        let plain = SimBacking::new();
        suite::differential::run(&world.open_for_programs(), &plain, seed, 300);
        let lanes = world.open();
        let orphans = lanes.find_orphans().expect("walk");
        assert!(orphans.is_empty(), "seed {seed}: {orphans:?}");
        for backing in world.backings() {
            backing.fsck().expect("fsck");
        }
    }
}

#[test]
fn real_directories_pass_the_suite() {
    rustix::process::umask(rustix::fs::Mode::empty());
    let kept = std::cell::RefCell::new(Vec::new());
    suite::run(|| {
        let dir = tempfile::tempdir().expect("tempdir");
        let sub = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(&path).expect("mkdir");
            path
        };
        sub("primary/.firn/placing");
        let primary = DirBacking::open(sub("primary")).expect("open");
        primary.set_mode(&primary.root(), 0o755).expect("set_mode");
        let (firn, _) = primary
            .lookup(&primary.root(), OsStr::new(".firn"))
            .expect("lookup");
        let (staging, _) = primary
            .lookup(&firn, OsStr::new("placing"))
            .expect("lookup");
        let lanes = (0..LANES)
            .map(|number| {
                let path = sub(&format!("lane{number}"));
                let backing = DirBacking::open(&path).expect("open");
                Lane::new(backing, path.into_os_string())
            })
            .collect();
        kept.borrow_mut().push(dir);
        PlainBacking::new(Lanes::open(primary, setup(staging, lanes)).expect("open"))
    });
}

fn write_file<B: Backing>(backing: &B, name: &str, content: &[u8]) -> B::Inode {
    let me = suite::own_caller();
    let (inode, file, _) = backing
        .create(&me, &backing.root(), OsStr::new(name), 0o640)
        .expect("create");
    let written = backing.write_at(&file, &[IoSlice::new(content)], 0);
    assert_eq!(written, Ok(content.len()));
    inode
}

fn read_file<B: Backing>(backing: &B, name: &str) -> Vec<u8> {
    let (inode, attr) = backing
        .lookup(&backing.root(), OsStr::new(name))
        .expect("lookup");
    let file = backing.open(&inode, Access::Read).expect("open");
    let mut content = vec![0; attr.size as usize];
    let count = backing.read_at(&file, &mut content, 0).expect("read");
    content.truncate(count);
    content
}

#[test]
fn files_go_whole_to_the_lane_of_their_number_and_are_readable_by_their_link() {
    let world = World::new();
    let lanes = world.open();
    for rank in 0..2 * LANES {
        let content = format!("content of {rank}");
        let inode = write_file(&lanes, &format!("rank{rank}"), content.as_bytes());
        assert_eq!(
            lanes.facts(&inode).lane,
            LaneIndex::new((rank % LANES) as u16)
        );
        // The same file without Firn: a link in the primary, and a file in the lane.
        let (link, attr) = world
            .primary
            .lookup(&world.primary.root(), OsStr::new(&format!("rank{rank}")))
            .expect("lookup");
        assert_eq!(attr.kind, Kind::Symlink);
        let target = world.primary.readlink(&link).expect("readlink");
        let target = String::from_utf8(target).expect("text");
        let entry = target
            .strip_prefix(&format!("/lanes/{}/", rank % LANES))
            .expect("in its lane");
        assert_eq!(
            read_file(&world.lanes[rank % LANES], entry),
            content.as_bytes()
        );
    }
}

#[test]
fn a_file_leaves_its_lane_with_its_last_name_and_stays_while_it_is_open() {
    let world = World::new();
    let lanes = world.open();
    let root = lanes.root();
    let name = OsStr::new;
    let inode = write_file(&lanes, "a", b"held");
    lanes.link(&inode, &root, name("b")).expect("link");
    lanes.unlink(&root, name("a")).expect("unlink");
    assert_eq!(read_file(&lanes, "b"), b"held");
    let open = lanes.open(&inode, Access::Read).expect("open");
    lanes.unlink(&root, name("b")).expect("unlink");
    assert_eq!(lanes.attr(&inode).map(|attr| attr.nlink), Ok(0));
    lanes.sync_all().expect("sync");
    assert_eq!(world.files_in_lanes(), 0);
    let mut content = [0; 4];
    assert_eq!(lanes.read_at(&open, &mut content, 0), Ok(4));
    assert_eq!(&content, b"held");
    write_file(&lanes, "c", b"old");
    write_file(&lanes, "d", b"new");
    lanes
        .rename(&root, name("d"), &root, name("c"), RenameFlags::empty())
        .expect("rename");
    assert_eq!(read_file(&lanes, "c"), b"new");
    lanes.finish_removals().expect("remove");
    assert_eq!(world.files_in_lanes(), 1);
}

#[test]
fn a_link_that_firn_did_not_make_stays_a_link_and_its_removal_removes_no_file() {
    let world = World::new();
    let lanes = world.open();
    let me = suite::own_caller();
    let root = world.primary.root();
    write_file(&lanes, "rank0", b"mine");
    let (link, _) = world
        .primary
        .lookup(&root, OsStr::new("rank0"))
        .expect("lookup");
    let target = world.primary.readlink(&link).expect("readlink");
    let target = OsString::from(String::from_utf8(target).expect("text"));
    let made = [
        ("copied", target),
        ("elsewhere", "/lanes/0/../1/x".into()),
        ("dangling", "/lanes/0/no.0123456789abcdef".into()),
        ("top", "/lanes/0/".into()),
    ];
    for (name, target) in &made {
        world
            .primary
            .symlink(&me, &root, OsStr::new(name), target)
            .expect("symlink");
        let (inode, attr) = lanes
            .lookup(&lanes.root(), OsStr::new(name))
            .expect("lookup");
        assert_eq!(attr.kind, Kind::Symlink, "{name}");
        assert!(lanes.readlink(&inode).is_ok(), "{name}");
        lanes
            .unlink(&lanes.root(), OsStr::new(name))
            .expect("unlink");
    }
    assert_eq!(read_file(&lanes, "rank0"), b"mine");
}

#[test]
fn the_mark_is_not_shown_and_cannot_be_changed() {
    let world = World::new();
    let lanes = world.open();
    let inode = write_file(&lanes, "a", b"");
    let mark = OsStr::new(XATTR);
    assert_eq!(lanes.list_xattr(&inode), Ok(Vec::new()));
    assert_eq!(lanes.get_xattr(&inode, mark), Err(Errno::NODATA));
    assert_eq!(lanes.remove_xattr(&inode, mark), Err(Errno::NODATA));
    assert_eq!(lanes.set_xattr(&inode, mark, b"x", 0), Err(Errno::PERM));
    assert_eq!(
        lanes.set_xattr(&inode, OsStr::new("user.x"), b"x", 0),
        Ok(())
    );
    assert_eq!(lanes.list_xattr(&inode), Ok(b"user.x\0".to_vec()));
}

/// The maximum time that a test waits for a condition.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until the condition holds. `what` is the message of the failure if it never does.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lane_of_name(lanes: &Lanes<SimBacking>, name: &str) -> usize {
    let (inode, _) = lanes
        .lookup(&lanes.root(), OsStr::new(name))
        .expect("lookup");
    lanes.facts(&inode).lane.index()
}

fn create(lanes: &Lanes<SimBacking>, name: &str) -> Result<LanesFile<SimBacking>, Errno> {
    let me = suite::own_caller();
    let made = lanes.create(&me, &lanes.root(), OsStr::new(name), 0o644);
    made.map(|(_, file, _)| file)
}

fn write(
    lanes: &Lanes<SimBacking>,
    file: &LanesFile<SimBacking>,
    bytes: usize,
) -> Result<usize, Errno> {
    lanes.write_at(file, &[IoSlice::new(&vec![1; bytes])], 0)
}

/// Writes to a file until there is no room.
fn fill(lanes: &Lanes<SimBacking>, file: &LanesFile<SimBacking>) {
    let data = vec![1; 4 << 20];
    let mut end = 0;
    loop {
        match lanes.write_at(file, &[IoSlice::new(&data)], end) {
            Ok(count) => end += count as u64,
            Err(error) => break assert_eq!(error, Errno::NOSPC),
        }
    }
}

/// Proves S-place-6.
#[test]
fn regression_a_lane_that_had_no_room_for_a_file_got_the_next_ones() {
    const FILE_BYTES: usize = 4 << 20;
    let world = World::new();
    let lanes = world.open();
    // Room for one and a half files.
    let capacity = (FILE_BYTES + FILE_BYTES / 2) as u64;
    world.lanes[0].set_capacity(Some(capacity));
    let first = create(&lanes, "f_0").expect("create");
    assert_eq!(write(&lanes, &first, FILE_BYTES), Ok(FILE_BYTES));
    let second = create(&lanes, "f_3").expect("create");
    fill(&lanes, &second);
    assert_eq!(lanes.lanes()[0].figures().state, LaneState::Full);
    // The second file is truncated: the lane has room again, but not for a whole file.
    lanes.set_len(&second, 0).expect("set_len");
    for rank in [6, 9, 12, 15] {
        let file = create(&lanes, &format!("f_{rank}")).expect("create");
        assert_eq!(write(&lanes, &file, FILE_BYTES), Ok(FILE_BYTES), "f_{rank}");
        assert_ne!(lane_of_name(&lanes, &format!("f_{rank}")), 0, "f_{rank}");
    }
    // Once there is room for a file of the usual size, the lane gets files again.
    world.lanes[0].set_capacity(Some(16 * capacity));
    create(&lanes, "f_18").expect("create");
    assert_eq!(lane_of_name(&lanes, "f_18"), 0);
    assert_eq!(lanes.lanes()[0].figures().state, LaneState::Ok);
}

/// Proves S-place-6.
#[test]
fn a_lane_is_not_full_any_more_once_what_waited_for_it_is_written_and_there_is_room() {
    let world = World::new();
    let lanes = world.open();
    world.lanes[0].set_capacity(Some(1 << 20));
    let file = create(&lanes, "f_0").expect("create");
    fill(&lanes, &file);
    assert_eq!(lanes.lanes()[0].figures().state, LaneState::Full);
    world.lanes[0].set_capacity(None);
    wait_until("it has room", || {
        write(&lanes, &file, 4096).expect("write");
        lanes.lanes()[0].figures().state == LaneState::Ok
    });
}

/// statfs(2) ignores quotas: it reports room that this user cannot use. Proves S-place-6.
#[test]
fn a_lane_whose_quota_is_used_up_is_tried_before_it_gets_a_file() {
    let world = World::new();
    let lanes = world.open();
    let file = create(&lanes, "f_0").expect("create");
    let is_over = Arc::new(AtomicBool::new(true));
    let over = Arc::clone(&is_over);
    world.lanes[0].set_plan(move |call, _| {
        let takes_room = call == "write_at" || call == "allocate";
        (takes_room && over.load(Ordering::SeqCst)).then_some(Fault::Error(Errno::DQUOT))
    });
    assert_eq!(write(&lanes, &file, 4096), Err(Errno::DQUOT));
    for rank in [3, 6] {
        create(&lanes, &format!("f_{rank}")).expect("create");
        assert_ne!(lane_of_name(&lanes, &format!("f_{rank}")), 0, "f_{rank}");
    }
    is_over.store(false, Ordering::SeqCst);
    create(&lanes, "f_9").expect("create");
    assert_eq!(lane_of_name(&lanes, "f_9"), 0);
    let (inode, attr) = lanes
        .lookup(&lanes.root(), OsStr::new("f_9"))
        .expect("lookup");
    assert_eq!(attr.size, 0);
    assert_eq!(lanes.facts(&inode).lane, LaneIndex::new(0));
}

/// If no lane has room for a file of the usual size, a new file goes to the lane with the most room. Proves S-place-6.
#[test]
fn files_are_made_as_long_as_any_lane_has_room() {
    let world = World::new();
    let lanes = world.open();
    for (number, lane) in world.lanes.iter().enumerate() {
        let file = create(&lanes, &format!("f_{number}")).expect("create");
        lane.set_capacity(Some(1 << 20));
        fill(&lanes, &file);
        lanes.set_len(&file, 0).expect("set_len");
    }
    world.lanes[1].set_capacity(Some(2 << 20));
    create(&lanes, "f_3").expect("create");
    assert_eq!(lane_of_name(&lanes, "f_3"), 1);
    for lane in &world.lanes {
        lane.set_capacity(Some(0));
    }
    assert_eq!(create(&lanes, "f_4").err(), Some(Errno::NOSPC));
}

/// Proves S-place-12.
#[test]
fn regression_a_lane_that_hangs_kept_files_of_other_lanes_from_being_made() {
    let world = World::new();
    let lanes = world.open();
    write_file(&lanes, "f_0", b"there");
    let hang = world.lanes[0].hang("create");
    // The creation waits for its lane until the timeout, and then uses the next lane.
    create(&lanes, "f_3").expect("create");
    assert_eq!(lane_of_name(&lanes, "f_3"), 1);
    assert_eq!(lanes.lanes()[0].figures().state, LaneState::Hung);
    // Other creations do not wait for the hanging lane, and existing files can be removed.
    for rank in 4..10 {
        create(&lanes, &format!("f_{rank}")).expect("create");
        assert_ne!(lane_of_name(&lanes, &format!("f_{rank}")), 0, "f_{rank}");
    }
    let names = list_names(&lanes);
    assert_eq!(names.len(), 8, "{names:?}");
    for name in ["f_0", "f_3"] {
        lanes
            .unlink(&lanes.root(), OsStr::new(name))
            .expect("unlink");
    }
    lanes.finish_removals().expect("those of other lanes");
    // The lane answers again, and the file that it created too late is removed.
    drop(hang);
    wait_until("the lane answers", || {
        lanes.lanes()[0].figures().state == LaneState::Ok
    });
    wait_until("what was made too late is gone", || {
        lanes.finish_removals().expect("remove");
        world.files_in_lanes() == 6
    });
    create(&lanes, "f_12").expect("create");
    assert_eq!(lane_of_name(&lanes, "f_12"), 0);
    drop(lanes);
    let again = world.open();
    assert_eq!(again.find_orphans().expect("walk"), []);
}

/// Lists the root as programs see it.
fn list_names(lanes: &Lanes<SimBacking>) -> Vec<OsString> {
    let mut names = Vec::new();
    let stream = lanes.open_dir(&lanes.root()).expect("open_dir");
    let listed = lanes.read_dir(&stream, 0, &mut |entry| {
        names.push(entry.name.to_owned());
        true
    });
    listed.expect("read_dir");
    names.retain(|name| name != ".firn" && name != "." && name != "..");
    names
}

/// Proves S-place-12.
#[test]
fn where_all_lanes_hang_a_new_file_waits_for_the_first_that_answers() {
    let world = World::new();
    let lanes = world.open();
    let mut hangs: Vec<_> = world.lanes.iter().map(|lane| lane.hang("create")).collect();
    std::thread::scope(|scope| {
        let made = scope.spawn(|| create(&lanes, "f_0").map(drop));
        hangs.iter().for_each(Hang::await_call);
        drop(hangs.remove(2));
        assert_eq!(made.join().expect("no panic"), Ok(()));
    });
    assert_eq!(lane_of_name(&lanes, "f_0"), 2);
    drop(hangs);
    wait_until("what was made too late is gone", || {
        lanes.finish_removals().expect("remove");
        world.files_in_lanes() == 1
    });
}

/// A lane with a hanging write still gets new files, but the status reports the lane as hung.
#[test]
fn a_status_says_of_a_lane_that_a_call_of_it_hangs() {
    let world = World::new();
    let lanes = world.open();
    let file = create(&lanes, "f_0").expect("create");
    let hang = world.lanes[0].hang("write_at");
    std::thread::scope(|scope| {
        scope.spawn(|| write(&lanes, &file, 100).expect("write"));
        hang.await_call();
        wait_until("it is seen to hang", || {
            lanes.lanes()[0].figures().state == LaneState::Hung
        });
        create(&lanes, "f_3").expect("create");
        assert_eq!(lane_of_name(&lanes, "f_3"), 0);
        drop(hang);
    });
    assert_eq!(lanes.lanes()[0].figures().state, LaneState::Ok);
}

/// Makes the calls that [`a_crash_at_any_call_leaves_each_file_whole_and_no_unexplained_orphan`] interrupts.
fn change<B: Backing>(backing: &B) -> Result<(), Errno> {
    let me = suite::own_caller();
    let root = backing.root();
    let name = OsStr::new;
    backing.create(&me, &root, name("new3"), 0o600)?;
    backing.rename(
        &root,
        name("old1"),
        &root,
        name("old2"),
        RenameFlags::empty(),
    )?;
    let (inode, _) = backing.lookup(&root, name("old0"))?;
    backing.link(&inode, &root, name("also"))?;
    backing.unlink(&root, name("old0"))?;
    backing.unlink(&root, name("also"))?;
    backing.set_owner(&backing.lookup(&root, name("old2"))?.0, Some(7), None)?;
    backing.sync_dir(&root)
}

#[test]
fn a_crash_at_any_call_leaves_each_file_whole_and_no_unexplained_orphan() {
    let world = World::new();
    let lanes = world.open();
    for rank in 0..LANES {
        write_file(&lanes, &format!("old{rank}"), &vec![rank as u8; 5000]);
    }
    lanes.sync_all().expect("sync");
    let mut crashes = 0;
    for which in 0..=LANES {
        for step in 1.. {
            let crashed = world.fork();
            let backing = crashed.backings().nth(which).expect("a backing").clone();
            let lanes = crashed.open();
            let first_step = backing.steps();
            backing.set_plan(move |_, now| (now - first_step >= step).then_some(Fault::Crash));
            let result = change(&lanes);
            let has_crashed = backing.is_dead();
            backing.revive();
            for seed in 0..3 {
                check_after_crash(&crashed.fork(), step * 3 + seed);
            }
            if !has_crashed {
                // The calls ended before this step, so all steps of this backing are tested.
                result.expect("nothing went wrong");
                break;
            }
            crashes += 1;
        }
    }
    assert!(crashes > 20, "only {crashes} calls were cut off");
}

/// Runs after a power loss. Asserts that each file has its old or its new contents, and that an interrupted call
/// explains each orphan. Removes the orphans; asserts that no file is removed with them.
fn check_after_crash(world: &World, seed: u64) {
    for backing in world.backings() {
        backing.power_loss(seed);
    }
    let lanes = world.open();
    let mut objects = tree(&world.open_for_programs()).expect("tree");
    objects.retain(|path, _| !path.is_empty());
    for (path, entry) in &objects {
        let path = String::from_utf8_lossy(path);
        if path == "new3" && entry.kind == Kind::Symlink {
            // This file was not synced. Its lane may have lost it, which leaves a dangling link.
            continue;
        }
        assert_eq!(
            entry.kind,
            Kind::File,
            "seed {seed}: {path} is no file any more"
        );
        let content = read_file(&lanes, &path);
        let is_whole = content.is_empty() && path == "new3"
            || content.len() == 5000 && content.iter().all(|byte| *byte == content[0]);
        assert!(is_whole, "seed {seed}: {path} has {} bytes", content.len());
    }
    let mut expected = objects.len();
    for orphan in lanes.find_orphans().expect("walk") {
        lanes.remove_orphan(&orphan).expect("remove");
        if let Orphan::Dangling { path } = &orphan {
            assert_eq!(path, Path::new("new3"), "seed {seed}");
            expected -= 1;
        }
        if let Orphan::File { entry, .. } = &orphan {
            let entry = entry.to_string_lossy();
            assert!(
                ["new3", "old0", "old1", "old2"]
                    .iter()
                    .any(|name| entry.starts_with(name)),
                "{entry}"
            );
        }
    }
    assert_eq!(lanes.find_orphans().expect("walk"), []);
    assert_eq!(
        tree(&world.open_for_programs()).expect("tree").len(),
        expected + 1,
        "seed {seed}: no file goes with the orphans"
    );
}

/// Lanes fail in turn, for some calls or for all, while files are created, written, renamed and removed.
///
/// A call that succeeded has its effect, and a call that failed changed nothing that programs see. Once no lane fails
/// any more, no unnamed file is left.
#[test]
fn lanes_that_fail_one_by_one_cost_no_file() {
    for seed in 0..200 {
        let mut random = StdRng::seed_from_u64(seed);
        let world = World::new();
        let lanes = world.open();
        let root = lanes.root();
        let mut expected: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut failures = 0;
        for step in 0..80 {
            if step % 10 == 0 {
                world.lanes.iter().for_each(SimBacking::clear_plan);
                let errors = [Errno::IO, Errno::NOSPC, Errno::ROFS, Errno::STALE];
                let error = errors[random.random_range(0..errors.len())];
                let one_in = random.random_range(1..4);
                let lane = &world.lanes[random.random_range(0..LANES)];
                lane.set_plan(move |_, step| (step % one_in == 0).then_some(Fault::Error(error)));
            }
            let name = format!("rank_{}", random.random_range(0..9));
            let name_of = |text: &str| OsString::from(text);
            let outcome = match random.random_range(0..4) {
                0 | 1 => {
                    let content = vec![step as u8; random.random_range(1..5000)];
                    write_whole(&lanes, &name, &content, &mut expected)
                }
                2 => {
                    let to = format!("rank_{}", random.random_range(0..9));
                    let (from_name, to_name) = (name_of(&name), name_of(&to));
                    let flags = RenameFlags::empty();
                    let renamed = lanes.rename(&root, &from_name, &root, &to_name, flags);
                    if renamed.is_ok() {
                        let content = expected.remove(&name).expect("it was there");
                        expected.insert(to, content);
                    }
                    renamed
                }
                _ => {
                    let removed = lanes.unlink(&root, &name_of(&name));
                    if removed.is_ok() {
                        expected.remove(&name).expect("it was there");
                    }
                    removed
                }
            };
            failures += usize::from(outcome.is_err());
        }
        assert!(failures > 0, "seed {seed}: nothing failed");
        world.lanes.iter().for_each(SimBacking::clear_plan);
        lanes.sync_all().expect("sync");
        for rank in 0..9 {
            let name = format!("rank_{rank}");
            match expected.get(&name) {
                Some(content) => {
                    assert!(read_file(&lanes, &name) == *content, "seed {seed}: {name}");
                }
                None => {
                    let looked_up = lanes.lookup(&root, OsStr::new(&name));
                    assert!(
                        matches!(looked_up, Err(Errno::NOENT)),
                        "seed {seed}: {name}"
                    );
                }
            }
        }
        drop(lanes);
        let again = world.open();
        again.sync_all().expect("sync");
        let orphans = again.find_orphans().expect("walk");
        assert!(orphans.is_empty(), "seed {seed}: {orphans:?}");
        assert_eq!(world.files_in_lanes(), expected.len(), "seed {seed}");
    }
}

/// Creates a file if it is missing, truncates it and writes `content`. Updates `expected` to the contents that the
/// successful calls leave, even if a later call fails.
fn write_whole(
    lanes: &Lanes<SimBacking>,
    name: &str,
    content: &[u8],
    expected: &mut BTreeMap<String, Vec<u8>>,
) -> Result<(), Errno> {
    let root = lanes.root();
    let me = suite::own_caller();
    let file = match lanes.lookup(&root, OsStr::new(name)) {
        Ok((inode, _)) => lanes.open(&inode, Access::ReadWrite)?,
        Err(Errno::NOENT) => {
            let (_, file, _) = lanes.create(&me, &root, OsStr::new(name), 0o644)?;
            expected.insert(name.to_owned(), Vec::new());
            file
        }
        Err(error) => return Err(error),
    };
    lanes.set_len(&file, 0)?;
    let bytes = expected.entry(name.to_owned()).or_default();
    bytes.clear();
    let count = lanes.write_at(&file, &[IoSlice::new(content)], 0)?;
    bytes.extend(&content[..count]);
    Ok(())
}
