//! Logs over lanes: each host's logs lie in a lane of their own. What is promised of files in lanes holds for logs too.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::time::Duration;

use crate::common;

use common::{Ground, SimLanes, containers, open_or_create, read};
use firn_backing::{Access, Backing, Errno, Files, Names, Placement, Volume};
use firn_lanes::Lanes;
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{SimBacking, suite};
use firn_transact::PlainBacking;

type Logged = LogBacking<Lanes<SimBacking>>;

fn logged(ground: &SimLanes, host: &str) -> Logged {
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|name: &OsStr| name != "plain"),
        is_alive: Box::new(|host| Ok(host != "dead")),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 4096,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let opened = LogBacking::open(ground.open(host), setup).expect("open");
    // Little memory, so that indexes are sorted.
    opened.with_memory(64 << 10)
}

#[test]
fn logs_over_lanes_do_what_every_backing_does() {
    suite::run(|| PlainBacking::new(logged(&SimLanes::new(), "a")));
}

#[test]
fn logs_over_lanes_do_what_a_plain_directory_does() {
    for seed in 0..15 {
        let plain = SimBacking::new();
        let over = PlainBacking::new(logged(&SimLanes::new(), "a"));
        suite::differential::run(&over, &plain, seed, 300);
    }
}

fn write(host: &Logged, file: &<Logged as Volume>::File, data: &[u8], offset: u64) {
    let count = host.write_at(file, &[IoSlice::new(data)], offset);
    assert_eq!(count, Ok(data.len()));
}

/// Returns the hosts that have files of a kind in a lane: `d` for logs, `i` for indexes, `t` for tables.
fn hosts_in(ground: &SimLanes, lane: usize, kind: &str) -> BTreeSet<String> {
    let names = ground.files_in(lane).into_iter();
    let rest = names.filter_map(|name| Some(name.strip_prefix(&format!("{kind}-"))?.to_owned()));
    rest.filter_map(|name| Some(name.split_once('-')?.0.to_owned()))
        .collect()
}

/// The logs and indexes of different hosts lie in different lanes, whatever the names of the hosts are. The drain
/// queries that lane.
#[test]
fn logs_of_different_hosts_lie_in_different_lanes() {
    for name in ["shared", "field7", "other"] {
        let ground = SimLanes::new();
        let hosts = ["a", "b", "c", "d"].map(|host| logged(&ground.another_process(), host));
        let mut files = Vec::new();
        for (host, at) in hosts.iter().zip(0..) {
            let file = open_or_create(host, name).expect("open");
            for step in 0..40 {
                write(
                    host,
                    &file,
                    &[at as u8; 100],
                    (step * 7 % 40 * 4 + at) * 100,
                );
            }
            host.sync(&file, false).expect("sync");
            files.push(file);
        }
        for kind in ["d", "i"] {
            let [first, second] = [0, 1].map(|lane| hosts_in(&ground, lane, kind));
            assert!(first.is_disjoint(&second), "{kind}: {first:?}, {second:?}");
            assert_eq!((first.len(), second.len()), (2, 2), "{kind} of {name}");
        }
        for (host, letter) in hosts.iter().zip(["a", "b", "c", "d"]) {
            let (inode, _) = host.lookup(&host.root(), OsStr::new(name)).expect("lookup");
            let lane = host.facts(&inode).lane.index();
            assert!(hosts_in(&ground, lane, "d").contains(letter));
        }
        // Logs, indexes and tables lie in lanes; a table is made under a temporary name. Heads and marks lie in the
        // primary.
        let names = [0, 1].map(|lane| ground.files_in(lane)).concat();
        let is_log = |entry: &&String| {
            ["d-", "i-", "new-"]
                .iter()
                .any(|kind| entry.starts_with(kind))
        };
        let rest: Vec<_> = names.iter().filter(|entry| !is_log(entry)).collect();
        assert_eq!(rest.len(), 1, "{names:?}");
    }
}

/// A full lane is skipped, as it is for files, and all bytes are written.
#[test]
fn a_full_lane_is_passed_over() {
    let ground = SimLanes::new();
    for lane in &ground.lanes {
        lane.set_capacity(Some(0));
        let host = logged(&ground, "a");
        drop(open_or_create(&host, "plain").expect("open"));
        let file = open_or_create(&host, "shared").expect("open");
        let data = vec![7; 5000];
        let _ = host.write_at(&file, &[IoSlice::new(&data)], 0);
        lane.set_capacity(None);
        write(&host, &file, &data, 0);
        host.sync(&file, false).expect("sync");
        assert_eq!(read(&host, "shared"), Ok(Some(data)));
        drop(file);
        assert_eq!(host.settle().error, None);
    }
}

/// Two hosts write, sync, flatten and remove files.
fn change(hosts: &[Logged; 2]) -> Result<(), Errno> {
    for (host, at) in hosts.iter().zip(0_u64..) {
        let file = open_or_create(host, "shared")?;
        for step in 0..6 {
            let data = vec![b'a' + at as u8; 700];
            let offset = (2 * step + at) * 700;
            let count = host.write_at(&file, &[IoSlice::new(&data)], offset)?;
            assert_eq!(count, data.len());
        }
        host.sync(&file, false)?;
    }
    for host in hosts {
        let left = host.settle();
        left.error.map_or(Ok(()), Err)?;
    }
    let host = &hosts[0];
    let file = open_or_create(host, "gone")?;
    host.write_at(&file, &[IoSlice::new(&[1; 300])], 0)?;
    host.sync(&file, false)?;
    drop(file);
    host.unlink(&host.root(), OsStr::new("gone"))?;
    host.sync_all()?;
    let left = host.settle();
    left.error.map_or(Ok(()), Err)?;
    host.sync_all()
}

/// The power fails at each call to the primary or a lane in turn. Each synced byte is there, or the file is as it was
/// before. The file can be flattened, and each file in a lane has a name in the primary.
#[test]
fn without_power_at_any_call_no_byte_is_wrong() {
    let mut cuts = 0;
    for which in 0..3 {
        for step in 1.. {
            let ground = SimLanes::new();
            let old = logged(&ground, "a");
            let file = open_or_create(&old, "shared").expect("open");
            write(&old, &file, &[b'x'; 3000], 0);
            drop(file);
            assert_eq!(old.settle().error, None);
            old.sync_all().expect("sync");
            drop(old);
            let world = ground.fork();
            let hosts = ["a", "b"].map(|host| logged(&world, host));
            let one = world.disks()[which].clone();
            one.crash_at(one.steps() + step);
            let done = change(&hosts);
            let was_cut = one.is_dead();
            for disk in world.disks() {
                disk.revive();
            }
            drop(hosts);
            check_after_power_loss(&world, which, step, was_cut);
            if !was_cut {
                done.expect("nothing went wrong");
                break;
            }
            cuts += 1;
        }
    }
    assert!(cuts > 100, "only {cuts} calls were cut off");
}

fn check_after_power_loss(world: &SimLanes, which: usize, step: u64, was_cut: bool) {
    world.power_loss(step);
    let at = format!("disk {which}, call {step}");
    let hosts = ["a", "b"].map(|host| logged(world, host));
    let shown = match read(&hosts[1], "shared") {
        Ok(shown) => shown.expect("it was synced"),
        // Bytes that were not synced are lost. A read fails and shows no other bytes.
        Err(error) => {
            assert_eq!(error, Errno::IO, "{at}");
            return;
        }
    };
    check_bytes(&shown, &at);
    if !was_cut {
        let whole = (0..12).all(|record| shown[record * 700] == b'a' + (record % 2) as u8);
        assert!(whole && shown.len() == 8400, "{at}");
    }
    for _ in 0..3 {
        for host in &hosts {
            let left = host.flatten_below(&host.root()).expect("flatten");
            assert_eq!(left.error, None, "{at}");
        }
    }
    let mut lost = Vec::new();
    for host in &hosts {
        lost = host.find_orphans().expect("find").lost;
        host.sync_all().expect("sync");
    }
    let plain = world.open("plain");
    let flat = read(&plain, "shared").expect("read").expect("a file");
    assert!(flat == shown, "{at}: the flat file is another");
    let gone = read(&plain, "gone").unwrap_or_default().is_some();
    assert!(was_cut || !gone, "{at}");
    assert_eq!(containers(&plain), lost, "{at}");
    // The name of that file was not synced.
    assert!(
        lost.is_empty() || (was_cut && !gone && lost.len() == 1),
        "{at}: {lost:?}"
    );
    // Files that were not synced may be left in a lane. The walk finds them.
    for orphan in plain.find_orphans().expect("walk") {
        plain.remove_orphan(&orphan).expect("remove");
    }
    let count: usize = world.lanes.iter().map(count_marked).sum();
    let logs_of_lost = 2 * lost.len();
    assert!(
        (1 + usize::from(gone)..=1 + usize::from(gone) + logs_of_lost).contains(&count),
        "{at}: {count}"
    );
    for disk in world.disks() {
        disk.fsck().expect("fsck");
    }
}

/// Counts the files in a lane whose mark names their file. Files without a mark are left alone: this disk may lose a
/// mark and keep bytes that were written later.
fn count_marked(lane: &SimBacking) -> usize {
    firn_lanes::count_files(lane, common::PRIMARY_ID).expect("list")
}

/// Checks that each byte is what the file had before, or what one of the hosts wrote there.
fn check_bytes(bytes: &[u8], at: &str) {
    for (offset, byte) in bytes.iter().enumerate() {
        let written = b'a' + (offset / 700 % 2) as u8;
        let is_right = match offset {
            ..3000 => *byte == b'x' || *byte == written,
            _ => *byte == 0 || *byte == written,
        };
        assert!(is_right, "{at}: byte {offset} is {byte}");
    }
}

/// A lane is missing at a mount. A file whose logs lie in it cannot be read, and nothing of it is lost.
#[test]
fn logs_in_a_missing_lane_come_back_with_it() {
    let ground = SimLanes::new();
    let host = logged(&ground, "a");
    let file = open_or_create(&host, "shared").expect("open");
    write(&host, &file, b"in a log", 0);
    host.sync(&file, false).expect("sync");
    let (inode, _) = host
        .lookup(&host.root(), OsStr::new("shared"))
        .expect("lookup");
    let lane = host.facts(&inode).lane.index();
    ground.lanes[lane].set_plan(|_, _| Some(firn_sim::Fault::Error(Errno::IO)));
    let other = logged(&ground, "b");
    let opened = other
        .lookup(&other.root(), OsStr::new("shared"))
        .and_then(|(inode, _)| other.open(&inode, Access::Read));
    let seen = opened.and_then(|file| other.read_at(&file, &mut [0; 10], 0));
    assert_eq!(seen, Err(Errno::IO));
    let left = other.flatten_below(&other.root()).map(|left| left.error);
    assert!(
        matches!(left, Err(Errno::IO) | Ok(Some(Errno::IO))),
        "{left:?}"
    );
    ground.lanes[lane].clear_plan();
    assert_eq!(read(&other, "shared"), Ok(Some(b"in a log".to_vec())));
}
