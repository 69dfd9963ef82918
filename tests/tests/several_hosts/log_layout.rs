//! One file that several hosts write at the same time, each to a log of its own: several firnd, each on a host of its own
//! (network namespace, host name), over one shared backing.
//!
//! Needs root and FUSE.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_tests::ack::returned_operations;
use firn_tests::command::write_program;
use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{Mapping, assert_becomes_plain, read_at};
use firn_tests::lanes::place_in;
use firn_tests::mount::mount_args;
use firn_tests::preloaded::{Frontend, direct_bytes};
use firn_tests::random::{env_count, generator};
use firn_tests::sandbox::is_mounted;
use firn_tests::stop::StopAtEnd;
use firn_tests::{FirnMount, Sandbox, helper_binary, run, seed, striped, wait_until};
use rand::RngExt;
use rustix::fs::{
    FallocateFlags, FlockOperation, SeekFrom, copy_file_range, fallocate, flock, getxattr, seek,
};
use rustix::mm::MapFlags;

/// As users have them.
const OPTIONS: &str = "arena-size=64M,chunk-size=4M,layout=log";
/// For tests that look again and again without opening or syncing: what they see may be this old.
const SHORT: &str = "attr-timeout=200ms";
/// Bytes of one record: neighbours are another host's.
const RECORD: usize = 4097;
/// Longer than a host takes for what is left to do after a close.
const LIMIT: Duration = Duration::from_secs(60);
/// Records of each host.
const RECORDS: u64 = 100;

/// Hosts and the directory that they share, and the lanes in which its files and logs lie, if there are any.
struct Hosts {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
    lanes: Vec<PathBuf>,
}

impl Hosts {
    fn new(name: &str, hosts: usize) -> Self {
        Self {
            shared: Sandbox::new(name),
            hosts: (0..hosts)
                .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}")))
                .collect(),
            lanes: Vec::new(),
        }
    }

    fn over_lanes(name: &str, hosts: usize) -> Self {
        let mut cluster = Self::new(&format!("{name}-lanes"), hosts);
        for lane in ["lane0", "lane1"] {
            let lane = cluster.shared.mkdir(lane);
            fs::set_permissions(&lane, PermissionsExt::from_mode(0o755)).expect("chmod");
            cluster.lanes.push(lane);
        }
        cluster
    }

    /// Over one directory, and then over two lanes.
    fn on_each(name: &str, hosts: usize) -> impl Iterator<Item = Self> {
        let make = [Self::new, Self::over_lanes].into_iter();
        make.map(move |make| make(name, hosts))
    }

    /// Names of the files in a lane that hold data.
    fn files_in(&self, lane: usize) -> Vec<String> {
        let names = fs::read_dir(&self.lanes[lane]).expect("list a lane");
        let names = names.map(|entry| entry.expect("entry").file_name());
        let names = names.map(|name| name.into_string().expect("a name of Firn's"));
        names.filter(|name| !name.starts_with(".firn-")).collect()
    }

    /// Nothing is in the lanes that `firn check --orphans` finds to lead nowhere, or that is a log.
    fn assert_lanes_are_clean(&self) {
        if self.lanes.is_empty() {
            return;
        }
        let backing = self.backing();
        let args = ["check".as_ref(), "--orphans".as_ref(), backing.as_path()];
        self.hosts[0].run(args).ok();
        let is_log = |name: &String| {
            ["d-", "i-", "new-"]
                .iter()
                .any(|kind| name.starts_with(kind))
        };
        for lane in 0..self.lanes.len() {
            let logs: Vec<_> = self.files_in(lane).into_iter().filter(is_log).collect();
            assert_eq!(logs, Vec::<String>::new());
        }
    }

    fn backing(&self) -> PathBuf {
        self.shared.join("backing")
    }

    fn plain(&self, name: &str) -> PathBuf {
        self.backing().join(name)
    }

    fn mount(&self, at: usize, more: &str) -> FirnMount<'_> {
        let comma = if more.is_empty() { "" } else { "," };
        let options = format!("{OPTIONS}{comma}{more}");
        let options = if self.lanes.is_empty() {
            options
        } else {
            place_in(&self.lanes, &options)
        };
        FirnMount::over(&self.hosts[at], &self.backing(), &options)
    }

    fn mounts(&self, more: &str) -> Vec<FirnMount<'_>> {
        (0..self.hosts.len())
            .map(|at| self.mount(at, more))
            .collect()
    }

    /// With the options that users have.
    fn usual_mounts(&self) -> Vec<FirnMount<'_>> {
        let hosts = self.hosts.iter();
        hosts
            .map(|host| FirnMount::over(host, &self.backing(), "arena-size=64M,layout=log"))
            .collect()
    }

    /// Another host may still be removing what is flat.
    fn wait_until_clean(&self) {
        wait_until("no container is left", LIMIT, || {
            self.containers().is_empty()
        });
    }

    /// The logs of a file become the plain file, with these bytes, after its last close.
    fn assert_becomes_plain(&self, name: &str, expected: &[u8]) {
        assert_becomes_plain(&self.plain(name), expected);
    }

    /// Directories of files with containers.
    fn containers(&self) -> Vec<String> {
        let names = fs::read_dir(self.backing().join(".firn/log")).expect("list .firn/log");
        let names = names.map(|entry| entry.expect("entry").file_name());
        let names = names.map(|name| name.into_string().expect("a name of Firn's"));
        let is_other = |name: &String| name.starts_with("host-") || name.starts_with("turn-");
        names.filter(|name| !is_other(name)).collect()
    }

    /// The directory of a file's only container.
    fn container_of(&self, file: &str) -> PathBuf {
        // In lanes a file has the number of its link.
        let link = fs::symlink_metadata(self.plain(file)).expect("stat");
        let ino = link.ino();
        let mut files = self.containers();
        files.retain(|name| name.starts_with(&format!("{ino:016x}-")));
        assert_eq!(files.len(), 1, "{files:?}");
        let dir = self.backing().join(".firn/log").join(&files[0]);
        let containers: Vec<_> = fs::read_dir(&dir).expect("list").flatten().collect();
        assert_eq!(containers.len(), 1, "{containers:?}");
        containers[0].path()
    }

    /// The only log of a host in a container.
    fn log_of(&self, container: &Path, host: &str) -> File {
        let names = fs::read_dir(container).expect("list");
        let names = names.map(|entry| entry.expect("entry").path());
        let is_log = |path: &PathBuf| {
            let name = path.file_name().expect("a name").as_encoded_bytes();
            name.starts_with(format!("d-{host}-").as_bytes())
        };
        let logs: Vec<PathBuf> = names.filter(is_log).collect();
        assert_eq!(logs.len(), 1, "{logs:?}");
        let mut options = File::options();
        options.read(true).write(true);
        options.open(&logs[0]).expect("open a log")
    }
}

/// Makes a byte of a file another one, and gives what it was.
fn damage(file: &File, offset: u64) -> u8 {
    let before = read_at(file, offset, 1)[0];
    file.write_all_at(&[!before], offset).expect("damage");
    before
}

fn record(at: u64) -> Vec<u8> {
    (0..RECORD as u64).map(|n| (at * 7 + n) as u8).collect()
}

/// Every `hosts`-th record of a file, out of order.
fn write_records(file: &File, host: u64, hosts: u64) {
    for step in 0..RECORDS {
        let number = (step * 37 % RECORDS) * hosts + host;
        let offset = number * RECORD as u64;
        file.write_all_at(&record(number), offset).expect("write");
    }
}

fn all_records(hosts: u64) -> Vec<u8> {
    (0..RECORDS * hosts).flat_map(record).collect()
}

fn create(mount: &FirnMount<'_>, name: &str) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(mount.join(name)).expect("open")
}

#[track_caller]
fn assert_same(path: &Path, expected: &[u8]) {
    let found = fs::read(path).expect("read");
    assert_eq!(found.len(), expected.len(), "{}", path.display());
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{}", path.display());
}

/// Proves S-log-1, S-log-2, S-log-5, S-log-6: several hosts write one file strided, and when the last one has closed it,
/// it is an ordinary file.
#[test]
fn a_file_of_several_hosts_is_an_ordinary_file_when_all_have_closed_it() {
    let clusters =
        [2, 3, 4].map(|hosts| Hosts::on_each("strided", hosts).map(move |on| (hosts, on)));
    for (hosts, cluster) in clusters.into_iter().flatten() {
        let mounts = cluster.mounts("");
        let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
        std::thread::scope(|scope| {
            for (host, file) in files.iter().enumerate() {
                scope.spawn(move || write_records(file, host as u64, hosts as u64));
            }
        });
        let expected = all_records(hosts as u64);
        let ino = fs::metadata(cluster.plain("shared")).expect("stat").ino();
        let mut files = files;
        let last = files.pop().expect("a host");
        drop(files);
        last.sync_all().expect("sync");
        // Every host sees all bytes, and nothing else.
        for mount in &mounts {
            assert_same(&mount.join("shared"), &expected);
            let len = fs::metadata(mount.join("shared")).expect("stat").len();
            assert_eq!(len, expected.len() as u64);
        }
        assert_eq!(
            fs::metadata(cluster.plain("shared")).expect("stat").len(),
            0
        );
        drop(last);
        cluster.assert_becomes_plain("shared", &expected);
        assert_eq!(
            fs::metadata(cluster.plain("shared")).expect("stat").ino(),
            ino
        );
        for mount in &mounts {
            assert_same(&mount.join("shared"), &expected);
        }
        cluster.wait_until_clean();
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-5: with the options that users have, what a host has closed outlives that host before it is plain.
#[test]
fn what_is_closed_outlives_its_host() {
    for cluster in Hosts::on_each("closed", 2) {
        let mut mounts = cluster.mounts("").into_iter();
        let dead = mounts.next().expect("a host");
        let reader = mounts.next().expect("a host");
        for number in 0..20 {
            fs::write(dead.join(format!("file{number}")), record(number)).expect("write");
        }
        dead.kill();
        for number in 0..20 {
            assert_same(&reader.join(format!("file{number}")), &record(number));
        }
        reader.umount();
        cluster.mount(0, "").umount();
        for number in 0..20 {
            assert_same(&cluster.plain(&format!("file{number}")), &record(number));
        }
        cluster.wait_until_clean();
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-2, S-log-5: the file is short for all others until the last host has closed it; then, with `flatten=close`,
/// its close has made it plain, whichever host that is.
#[test]
fn the_last_close_of_all_hosts_makes_it_plain() {
    for cluster in Hosts::on_each("last", 3) {
        let mounts = cluster.mounts("flatten=close");
        fs::write(cluster.plain("shared"), b"before").expect("write");
        let plain = || fs::read(cluster.plain("shared")).expect("read");
        for last in 0..3 {
            let before = plain();
            let mut files: Vec<Option<File>> = mounts
                .iter()
                .map(|mount| Some(create(mount, "shared")))
                .collect();
            for (host, file) in files.iter().flatten().enumerate() {
                let offset = 10 + 5 * host as u64;
                let data = [b'0' + last as u8, b'a' + host as u8, 0, 1, 2];
                file.write_all_at(&data, offset).expect("write");
            }
            for host in (0..3).filter(|host| *host != last) {
                files[host] = None;
                assert_eq!(plain(), before, "host {host} of {last}");
            }
            files[last] = None;
            let now = plain();
            assert_eq!(now.len(), 25);
            for host in 0..3 {
                let at = 10 + 5 * host;
                assert_eq!(now[at..at + 2], [b'0' + last as u8, b'a' + host as u8]);
            }
            assert_eq!(now[..10], *b"before\0\0\0\0");
        }
        cluster.wait_until_clean();
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-3, S-log-4: sync, barrier, sync: hosts overwrite the same bytes in turn, and each sees what the one
/// before it has synced.
#[test]
fn what_is_written_after_a_sync_is_newer() {
    for cluster in Hosts::on_each("order", 3) {
        let mounts = cluster.mounts("");
        let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
        let mut expected = vec![0; 2000];
        files[0].set_len(2000).expect("truncate");
        files[0].sync_all().expect("sync");
        for turn in 0..30_usize {
            let file = &files[turn * 7 % 3];
            file.sync_all().expect("sync");
            assert_eq!(read_at(file, 0, 2000), expected);
            let at = turn * 613 % 1500;
            let data = vec![turn as u8 + 1; 300 + turn * 5];
            file.write_all_at(&data, at as u64).expect("write");
            expected[at..at + data.len()].copy_from_slice(&data);
            // Its own at once.
            assert_eq!(read_at(file, 0, 2000), expected);
            file.sync_all().expect("sync");
        }
        drop(files);
        cluster.assert_becomes_plain("shared", &expected);
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// What a process of each host sees that has had a file open since it was flat.
struct Readers {
    paths: Vec<PathBuf>,
    files: Vec<File>,
    uncached: Vec<File>,
    maps: Vec<Mapping>,
}

impl Readers {
    fn open(mounts: &[FirnMount<'_>], name: &str, len: usize) -> Self {
        let paths: Vec<PathBuf> = mounts.iter().map(|mount| mount.join(name)).collect();
        let open = |flags| {
            let mut options = File::options();
            options.read(true).custom_flags(flags);
            let files = paths
                .iter()
                .map(|path| options.open(path).expect("open to read"));
            files.collect::<Vec<_>>()
        };
        let files = open(0);
        let uncached = open(libc::O_DIRECT);
        let map = |file| Mapping::new(file, len, MapFlags::PRIVATE).expect("mmap");
        let maps = files.iter().map(map).collect();
        Self {
            paths,
            files,
            uncached,
            maps,
        }
    }

    /// Each comes to see it, `attr-timeout` after it was made known.
    #[track_caller]
    fn assert_see(&self, expected: &[u8]) {
        wait_until("open readers see what is new", LIMIT, || self.see(expected));
    }

    fn see(&self, expected: &[u8]) -> bool {
        let is_read = |file: &File| {
            let len = file.metadata().expect("fstat").len();
            // One more byte than there is to be.
            let mut found = vec![0; expected.len() + 1];
            let count = file.read_at(&mut found, 0).expect("read");
            len == expected.len() as u64 && found[..count] == *expected
        };
        let is_mapped = |(path, map): (&PathBuf, &Mapping)| {
            // A query of the attributes makes mappings see what is new, too.
            let len = fs::metadata(path).expect("stat").len();
            len == expected.len() as u64 && map.read(0, expected.len()) == expected
        };
        let mut files = self.files.iter().chain(&self.uncached);
        files.all(is_read) && self.paths.iter().zip(&self.maps).all(is_mapped)
    }
}

/// Proves S-log-4: a process that has a file open for reading, and pages of it from before, sees what other hosts have
/// synced and closed, and cut: flat, in logs, and flat again; by read(2), with O_DIRECT and mapped.
#[test]
fn an_open_reader_sees_what_other_hosts_write() {
    let cluster = Hosts::new("readers", 2);
    let mounts = cluster.mounts(SHORT);
    let mut expected: Vec<u8> = (0..300_000).map(|at| (at / 1000) as u8).collect();
    fs::write(mounts[0].join("file"), &expected).expect("write");
    cluster.wait_until_clean();
    let readers = Readers::open(&mounts, "file", expected.len());
    readers.assert_see(&expected);
    for turn in 0..6_usize {
        let writer = create(&mounts[turn % 2], "file");
        if turn % 3 == 1 {
            expected.truncate(299_000 - turn * 100);
            writer.set_len(expected.len() as u64).expect("truncate");
            writer.sync_all().expect("sync");
            readers.assert_see(&expected);
        }
        for part in 0..5 {
            let at = (turn * 7919 + part * 50_021) % 290_000;
            let data = vec![(turn * 16 + part) as u8; 10_000];
            writer.write_all_at(&data, at as u64).expect("write");
            let end = (at + data.len()).max(expected.len());
            expected.resize(end, 0);
            expected[at..at + data.len()].copy_from_slice(&data);
            writer.sync_all().expect("sync");
            readers.assert_see(&expected);
        }
        drop(writer);
        readers.assert_see(&expected);
    }
    cluster.wait_until_clean();
    readers.assert_see(&expected);
    drop(readers);
    assert_same(&cluster.plain("file"), &expected);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-log-3, S-log-4: of two hosts that write the same bytes and do not know of each other, each reads its own
/// until it syncs, and then all the same, whichever that is, in pages of a file that was open before.
#[test]
fn open_readers_agree_on_what_hosts_wrote_at_the_same_time() {
    let cluster = Hosts::new("agree", 2);
    let mounts = cluster.mounts(SHORT);
    let mut winners = BTreeSet::new();
    for (name, first, second) in [("one", 0, 1), ("other", 1, 0)] {
        fs::write(mounts[0].join(name), [0; 9000]).expect("write");
        cluster.wait_until_clean();
        let readers = Readers::open(&mounts, name, 9000);
        readers.assert_see(&[0; 9000]);
        let writers = [create(&mounts[0], name), create(&mounts[1], name)];
        let write = |host: usize| {
            let data = [host as u8 + 1; 9000];
            writers[host].write_all_at(&data, 0).expect("write");
            assert!(read_at(&readers.files[host], 0, 9000) == data);
        };
        write(first);
        writers[first].sync_all().expect("sync");
        readers.assert_see(&[first as u8 + 1; 9000]);
        write(second);
        writers[second].sync_all().expect("sync");
        writers[first].sync_all().expect("sync");
        let winner = read_at(&readers.uncached[0], 0, 1)[0];
        readers.assert_see(&[winner; 9000]);
        winners.insert(winner == first as u8 + 1);
        drop(writers);
        readers.assert_see(&[winner; 9000]);
        cluster.assert_becomes_plain(name, &[winner; 9000]);
    }
    // The host decides, not the order of the writes.
    assert_eq!(winners.len(), 2);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-log-4, S-log-9: names, attributes and lengths from another host than the one that writes.
#[test]
fn other_hosts_rename_link_cut_and_remove_what_is_being_written() {
    for cluster in Hosts::on_each("calls", 2) {
        let mounts = cluster.mounts("");
        let here = &mounts[0];
        let there = &mounts[1];
        let file = create(here, "file");
        file.write_all_at(b"0123456789", 0).expect("write");
        file.sync_all().expect("sync");
        fs::rename(there.join("file"), there.join("renamed")).expect("rename");
        fs::hard_link(there.join("renamed"), there.join("link")).expect("link");
        fs::set_permissions(there.join("link"), PermissionsExt::from_mode(0o640)).expect("chmod");
        file.write_all_at(b"abc", 10).expect("write");
        file.sync_all().expect("sync");
        for mount in [here, there] {
            assert_same(&mount.join("renamed"), b"0123456789abc");
            let metadata = fs::metadata(mount.join("link")).expect("stat");
            assert_eq!((metadata.len(), metadata.nlink()), (13, 2));
            assert_eq!(metadata.mode() & 0o777, 0o640);
        }
        // Cut by the other host, and written again by this one.
        let other = create(there, "renamed");
        other.set_len(4).expect("truncate");
        other.sync_all().expect("sync");
        file.sync_all().expect("sync");
        assert_eq!(fs::read(here.join("link")).expect("read"), b"0123");
        file.write_all_at(b"xy", 6).expect("write");
        file.sync_all().expect("sync");
        assert_same(&there.join("link"), b"0123\0\0xy");
        // Appended.
        let mut appended = File::options()
            .append(true)
            .open(there.join("link"))
            .expect("open");
        std::io::Write::write_all(&mut appended, b"end").expect("append");
        drop(appended);
        assert_same(&here.join("link"), b"0123\0\0xyend");
        // Emptied at its open.
        drop(File::create(there.join("link")).expect("O_TRUNC"));
        assert_same(&here.join("link"), b"");
        file.sync_all().expect("sync");
        file.write_all_at(b"new", 0).expect("write");
        drop((file, other));
        cluster.assert_becomes_plain("renamed", b"new");
        cluster.wait_until_clean();
        // Removed elsewhere while it is open: as a file of which this host is the last to know.
        let file = create(here, "removed");
        file.write_all_at(b"some bytes", 0).expect("write");
        file.sync_all().expect("sync");
        fs::remove_file(there.join("removed")).expect("unlink");
        assert_eq!(read_at(&file, 0, 10), b"some bytes");
        file.write_all_at(b"more", 10).expect("write");
        assert_eq!(read_at(&file, 0, 14), b"some bytesmore");
        drop(file);
        assert!(!cluster.plain("removed").exists());
        cluster.wait_until_clean();
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-9: mappings, fallocate, copy_file_range and the search for data, on a file that another host writes, too.
#[test]
fn ranges_and_mappings_are_those_of_all_hosts() {
    for cluster in Hosts::on_each("ranges", 2) {
        let mounts = cluster.mounts("");
        let here = create(&mounts[0], "file");
        let there = create(&mounts[1], "file");
        here.write_all_at(&[1; 4096], 0).expect("write");
        there.write_all_at(&[2; 4096], 3 << 20).expect("write");
        there.sync_all().expect("sync");
        here.sync_all().expect("sync");
        let len = (3 << 20) + 4096;
        assert_eq!(here.metadata().expect("stat").len(), len);
        assert_eq!(seek(&here, SeekFrom::Hole(0)).expect("hole"), 4096);
        assert_eq!(seek(&here, SeekFrom::Data(4096)).expect("data"), 3 << 20);
        fallocate(
            &here,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            (3 << 20) + 100,
            50,
        )
        .expect("a hole in what the other host wrote");
        fallocate(&here, FallocateFlags::empty(), len, 1000).expect("room");
        here.sync_all().expect("sync");
        there.sync_all().expect("sync");
        assert_eq!(there.metadata().expect("stat").len(), len + 1000);
        let mut expected = vec![2; 4096];
        expected[100..150].fill(0);
        expected.extend([0; 1000]);
        assert_eq!(read_at(&there, 3 << 20, 5096), expected);
        let copy = create(&mounts[1], "copy");
        let mut from = 3 << 20;
        let mut copied = 0;
        while copied < 5096 {
            let left = 5096 - copied as usize;
            let count = copy_file_range(&there, Some(&mut from), &copy, Some(&mut copied), left);
            assert!(count.expect("copy") > 0);
        }
        drop(copy);
        cluster.assert_becomes_plain("copy", &expected);
        let map = Mapping::new(&there, 8192, MapFlags::SHARED).expect("mmap");
        map.write(4000, b"through a mapping, into a hole, over the end of the first page of it all................................");
        let mapped = map.read(0, 8192);
        map.sync().expect("msync");
        drop(map);
        there.sync_all().expect("sync");
        here.sync_all().expect("sync");
        assert_eq!(read_at(&here, 0, 8192), mapped);
        drop((here, there));
        let is_plain = || {
            fs::read(cluster.plain("file"))
                .expect("read")
                .starts_with(&mapped)
        };
        wait_until("the file is plain", LIMIT, is_plain);
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-7: whatever the options of the next mount, and of `firn recover`.
#[test]
fn a_mount_without_the_layout_has_logged_files_as_they_are() {
    for cluster in Hosts::on_each("serve", 1) {
        let mount = cluster.mount(0, "flatten=off");
        fs::write(mount.join("file"), record(3)).expect("write");
        mount.umount();
        assert_eq!(fs::metadata(cluster.plain("file")).expect("stat").len(), 0);
        assert_eq!(cluster.containers().len(), 1);
        let plain = |options: &str| FirnMount::over(&cluster.hosts[0], &cluster.backing(), options);
        let mount = plain("ro");
        assert_same(&mount.join("file"), &record(3));
        mount.umount();
        let mount = plain("close=held,drain-age=10min,flatten=off");
        assert_same(&mount.join("file"), &record(3));
        let file = create(&mount, "file");
        file.write_all_at(b"changed", 100).expect("write");
        fs::write(mount.join("other"), "not logged").expect("write");
        mount.kill();
        drop(file);
        let args = [Path::new("recover"), &cluster.backing()];
        cluster.hosts[0].run(args).ok();
        let mut expected = record(3);
        expected[100..107].copy_from_slice(b"changed");
        assert_same(&cluster.plain("file"), &expected);
        assert_same(&cluster.plain("other"), b"not logged");
        cluster.wait_until_clean();
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-33: its files would be read without what is in it.
#[test]
fn a_backing_with_a_container_of_an_earlier_version_is_refused() {
    let cluster = Hosts::new("earlier", 1);
    let mount = cluster.mount(0, "flatten=off");
    fs::write(mount.join("file"), "in a log").expect("write");
    mount.umount();
    let host = &cluster.hosts[0];
    let top = cluster.backing().join(".firn/log");
    let earlier = top.join("0000000000000123-0000000000000456-00000000");
    fs::create_dir(&earlier).expect("mkdir");
    let args = || mount_args(&cluster.backing(), &host.join("mnt"), OPTIONS);
    host.run(args())
        .code(10)
        .says("by an earlier version of Firn");
    let mut python = Command::new("python3");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/read_log.py");
    python.arg(&script).arg(cluster.backing()).arg("file");
    assert_eq!(
        run(&mut python).ok().stdout,
        "in a log",
        "the others are untouched"
    );
    fs::remove_dir(&earlier).expect("rmdir");
    let mount = cluster.mount(0, "");
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"in a log");
    mount.umount();
}

/// Proves S-log-8.
#[test]
fn what_cannot_go_together_is_refused_with_the_reason() {
    let cluster = Hosts::new("refused", 2);
    let refused = |host: usize, options: &str, why: &str| {
        let host = &cluster.hosts[host];
        let args = mount_args(&cluster.backing(), &host.join("mnt"), options);
        host.run(args).code(2).says(why);
    };
    refused(0, "log-files=*.h5,layout=plain", "layout=log");
    refused(0, "layout=log,log-files=a/b", "without directories");
    let mount = cluster.mount(0, "flatten=off");
    fs::write(mount.join("file"), "in a log").expect("write");
    mount.umount();
    let mount = cluster.mount(0, "");
    // A host of the same name.
    let args = mount_args(
        &cluster.backing(),
        &cluster.hosts[1].join("mnt"),
        "layout=log,host=n0",
    );
    cluster.hosts[1].run(args).code(11).says("host n0");
    mount.umount();
}

/// Proves S-log-10: a host that is killed does not block the closing of a file, and has what it wrote at its next
/// mount.
#[test]
fn a_host_that_is_killed_holds_no_host_up() {
    for cluster in Hosts::on_each("killed", 2) {
        let mounts = cluster.mounts("");
        let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
        files[0].write_all_at(&record(0), 0).expect("write");
        files[0].sync_all().expect("sync");
        files[1]
            .write_all_at(&record(1), RECORD as u64)
            .expect("write");
        files[1].sync_all().expect("sync");
        let mut mounts = mounts.into_iter();
        let dead = mounts.next().expect("a host");
        let mount = mounts.next().expect("a host");
        dead.kill();
        let mut files = files;
        drop(files.pop());
        drop(files);
        let mut expected = record(0);
        expected.extend(record(1));
        cluster.assert_becomes_plain("shared", &expected);
        cluster.wait_until_clean();
        let back = cluster.mount(0, "");
        assert_same(&back.join("shared"), &expected);
        // Held only, when it is killed: it comes with the next mount.
        back.umount();
        let back = cluster.mount(0, "close=held,drain-age=10min");
        create(&back, "shared")
            .write_all_at(b"late", 5)
            .expect("write");
        back.kill();
        create(&mount, "shared")
            .write_all_at(b"early", 50)
            .expect("write");
        expected[50..55].copy_from_slice(b"early");
        cluster.assert_becomes_plain("shared", &expected);
        cluster.mount(0, "").umount();
        expected[5..9].copy_from_slice(b"late");
        cluster.assert_becomes_plain("shared", &expected);
        cluster.wait_until_clean();
        mount.umount();
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-6: a reader sees the whole file before, while and after it is flattened, again and again.
#[test]
fn it_is_read_while_it_is_flattened() {
    for cluster in Hosts::on_each("reading", 2) {
        let mounts = cluster.mounts("");
        let expected = all_records(2);
        for round in 0..5 {
            let name = format!("shared{round}");
            let files: Vec<File> = mounts.iter().map(|mount| create(mount, &name)).collect();
            for (host, file) in files.iter().enumerate() {
                write_records(file, host as u64, 2);
                file.sync_all().expect("sync");
            }
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let _ended = StopAtEnd(&is_over);
                for mount in &mounts {
                    let name = &name;
                    let expected = &expected;
                    let is_over = &is_over;
                    scope.spawn(move || {
                        let file = File::open(mount.join(name)).expect("open");
                        while !is_over.load(Ordering::Acquire) {
                            let found = read_at(&file, 0, expected.len());
                            assert!(found == *expected, "an open file");
                            assert_same(&mount.join(name), expected);
                        }
                    });
                }
                drop(files);
                cluster.assert_becomes_plain(&name, &expected);
            });
        }
        cluster.wait_until_clean();
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-11: a file that another host writes is logged, and flat when the wait after its close is over.
#[test]
fn a_wait_for_drained_lasts_until_the_file_is_flat() {
    for flatten in ["close", "demand", "off"] {
        let cluster = Hosts::new(&format!("drained-{flatten}"), 2);
        let mounts = cluster.mounts(&format!("close=held,drain-age=10min,flatten={flatten}"));
        let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
        for (host, file) in files.iter().enumerate() {
            write_records(file, host as u64, 2);
        }
        let mut files = files;
        let last = files.pop().expect("a host");
        drop(files);
        for mount in &mounts {
            mount.wait("logged", mount.path()).ok();
            assert_eq!(mount.status().held_bytes, 0);
            assert_eq!(mount.status().logged_files, 1);
        }
        let early = mounts[0].wait("drained", &mounts[0].join("shared"));
        early.code(3).says("open for writing");
        let plain = fs::metadata(cluster.plain("shared")).expect("stat");
        assert_eq!(plain.len(), 0);
        let listed = cluster.hosts[0].run([Path::new("ls"), mounts[0].path()]);
        assert!(listed.stdout.starts_with("logged"), "{listed}");
        drop(last);
        let path = mounts[1].join("shared");
        let args = [Path::new("drain"), Path::new("--wait"), &path];
        cluster.hosts[1].run(args).ok();
        assert_same(&cluster.plain("shared"), &all_records(2));
        mounts[0].wait("durable", mounts[0].path()).ok();
        cluster.wait_until_clean();
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
    }
}

/// Proves S-log-12.
#[test]
fn files_are_flattened_on_request_with_a_mount_and_without() {
    for cluster in Hosts::on_each("flatten", 1) {
        let run = |args: &[&Path]| cluster.hosts[0].run([&[Path::new("flatten")], args].concat());
        let all = Path::new("--all");
        let below = Path::new("--backing");
        let backing = cluster.backing();
        let dir = Path::new("dir");
        let mount = cluster.mount(0, "flatten=off");
        fs::create_dir(mount.join(dir)).expect("mkdir");
        let names = ["dir/one", "dir/two", "three", "four"];
        for (at, name) in (0..).zip(names) {
            fs::write(mount.join(name), record(at)).expect("write");
        }
        assert_eq!(cluster.containers().len(), 4);
        run(&[&mount.join("dir/one")]).ok();
        assert_same(&cluster.plain("dir/one"), &record(0));
        assert_eq!(cluster.containers().len(), 3);
        run(&[&mount.join(dir)]).ok();
        assert_same(&cluster.plain("dir/two"), &record(1));
        assert_eq!(cluster.containers().len(), 2);
        run(&[&mount.join("nowhere")]).code(1);
        let open = create(&mount, "three");
        open.write_all_at(b"more", RECORD as u64).expect("write");
        run(&[all, &mount.join(dir)])
            .code(3)
            .says("open for writing");
        assert_same(&cluster.plain("four"), &record(3));
        assert_eq!(fs::metadata(cluster.plain("three")).expect("stat").len(), 0);
        run(&[below, &backing, all]).code(11);
        drop(open);
        mount.umount();
        assert_eq!(cluster.containers().len(), 1);
        run(&[&backing]).code(10);
        run(&[below, &backing, all, dir]).code(2);
        run(&[below, &backing, Path::new("/etc/passwd")]).code(2);
        run(&[below, &backing, Path::new("nowhere")])
            .code(1)
            .says("no such file");
        run(&[below, &backing, dir]).ok();
        assert_eq!(cluster.containers().len(), 1);
        run(&[below, &backing, &cluster.plain("three")]).ok();
        let mut expected = record(2);
        expected.extend(b"more");
        assert_same(&cluster.plain("three"), &expected);
        assert!(cluster.containers().is_empty());
        run(&[below, &backing, all]).ok();
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-32, S-log-35.
#[test]
fn a_check_names_what_is_damaged_or_lost_in_logs() {
    for cluster in Hosts::on_each("check", 1) {
        let backing = cluster.backing();
        let check = |option: &str| {
            let args = [Path::new("check"), Path::new(option), &backing];
            cluster.hosts[0].run(args)
        };
        let mount = cluster.mount(0, "flatten=off");
        fs::write(mount.join("file"), record(1)).expect("write");
        mount.umount();
        let dir = cluster.containers().pop().expect("a file in logs");
        let container = format!("{dir}-00000000");
        let sound = check("--json").ok().json();
        assert_eq!(sound["logs"]["containers"], 1);
        assert_eq!(sound["logs"]["findings"].as_array().map(Vec::len), Some(0));
        let log = cluster.log_of(&cluster.container_of("file"), "n0");
        let before = damage(&log, 99);
        let found = check("--json").code(1).says("1 damaged place").json();
        let found = &found["logs"]["findings"][0];
        assert_eq!(found["container"], container.as_str());
        assert_eq!(found["host"], "n0");
        assert_eq!(found["file"], "d-n0-0000000000000001-00000000");
        assert_eq!(
            (found["offset"].as_u64(), found["is_harmless"].as_bool()),
            (Some(0), Some(false))
        );
        // It stays in logs, and the undamaged bytes make it plain.
        let args = [
            "flatten".as_ref(),
            "--backing".as_ref(),
            backing.as_path(),
            "--all".as_ref(),
        ];
        cluster.hosts[0]
            .run(args)
            .code(1)
            .says("its bytes stay in logs");
        log.write_all_at(&[before], 99).expect("mend");
        check("--orphans").ok();
        // Removed past Firn.
        fs::remove_file(cluster.plain("file")).expect("unlink");
        let lost = check("--orphans").code(1);
        assert!(lost.stdout.contains(&container), "{lost}");
        assert_eq!(cluster.containers(), [dir]);
    }
}

/// The host whose log or index this is, by its name in a lane.
fn host_of(entry: &str) -> Option<&str> {
    let rest = entry
        .strip_prefix("d-")
        .or_else(|| entry.strip_prefix("i-"))?;
    rest.split('-').next()
}

/// Proves S-log-37: whatever the hosts and the file are called, as many hosts write to each lane.
#[test]
fn logs_of_different_hosts_lie_in_different_lanes() {
    for (hosts, more) in [
        (2, ""),
        (3, ""),
        (2, "tokens=flock,order=sequential,lane-writers=1"),
    ] {
        let cluster = Hosts::over_lanes("lanes", hosts);
        let more = format!(
            "{more}{}flatten=off",
            if more.is_empty() { "" } else { "," }
        );
        let mounts = cluster.mounts(&more);
        for name in ["shared", "rank_7"] {
            let files: Vec<File> = mounts.iter().map(|mount| create(mount, name)).collect();
            for (host, file) in files.iter().enumerate() {
                write_records(file, host as u64, hosts as u64);
                file.sync_all().expect("sync");
            }
            let [first, second] = [0, 1].map(|lane| -> BTreeSet<String> {
                let names = cluster.files_in(lane);
                names
                    .iter()
                    .filter_map(|entry| host_of(entry).map(str::to_owned))
                    .collect()
            });
            assert!(first.is_disjoint(&second), "{first:?}, {second:?}");
            assert_eq!(first.len() + second.len(), hosts);
            assert!(
                first.len().abs_diff(second.len()) <= 1,
                "{first:?}, {second:?}"
            );
            for mount in &mounts {
                assert_same(&mount.join(name), &all_records(hosts as u64));
            }
            drop(files);
            cluster.hosts[0]
                .run([Path::new("flatten"), &mounts[0].join(name)])
                .ok();
            assert_same(&cluster.plain(name), &all_records(hosts as u64));
            wait_until("the logs left their lanes", LIMIT, || {
                let entries = [0, 1].map(|lane| cluster.files_in(lane)).concat();
                !entries.iter().any(|entry| host_of(entry).is_some())
            });
        }
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        cluster.assert_lanes_are_clean();
    }
}

/// Proves S-log-38: a lane that is not there at a mount; what lies in it comes back with it.
#[test]
fn logs_in_a_lane_that_is_missing_wait_for_it() {
    let cluster = Hosts::over_lanes("gone", 2);
    let mounts = cluster.mounts("flatten=off");
    let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
    for (host, file) in files.iter().enumerate() {
        write_records(file, host as u64, 2);
        file.sync_all().expect("sync");
    }
    drop(files);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let away = cluster.shared.join("away");
    fs::rename(&cluster.lanes[1], &away).expect("rename");
    // Without the options: what the backing says is enough.
    let mount = FirnMount::over(&cluster.hosts[0], &cluster.backing(), "flatten=off");
    let read = fs::read(mount.join("shared")).map_err(|error| error.raw_os_error());
    assert_eq!(read, Err(Some(libc::EIO)));
    let args = [Path::new("flatten"), Path::new("--all"), mount.path()];
    cluster.hosts[0].run(args).code(1);
    mount.umount();
    let backing = cluster.backing();
    let check = || cluster.hosts[0].run([Path::new("check"), &backing]);
    check().code(1).says("cannot be used");
    fs::rename(&away, &cluster.lanes[1]).expect("rename");
    check().ok();
    cluster.mount(1, "flatten=demand").umount();
    assert_same(&cluster.plain("shared"), &all_records(2));
    cluster.wait_until_clean();
    cluster.assert_lanes_are_clean();
}

/// Proves S-log-37 where the file system is told of the server: here by a program, which writes down what it was told.
#[test]
fn logs_are_steered_to_different_servers() {
    let cluster = Hosts::new("steered", 2);
    let told = cluster.shared.join("told");
    let program = cluster.shared.join("place");
    let text = format!(
        "#!/bin/sh\nset -e\nset -C\n: > \"$2/$3\"\necho \"$1 $3\" >> {}\n",
        told.display()
    );
    write_program(&program, &text);
    let options = format!(
        "placement=command,servers=left:right,place-command={}",
        program.display()
    );
    let mounts = cluster.mounts(&options);
    let files: Vec<File> = mounts.iter().map(|mount| create(mount, "shared")).collect();
    for (host, file) in files.iter().enumerate() {
        write_records(file, host as u64, 2);
    }
    drop(files);
    cluster.assert_becomes_plain("shared", &all_records(2));
    let told = fs::read_to_string(&told).expect("read");
    let mut servers = BTreeSet::new();
    for line in told.lines() {
        let (server, name) = line.split_once(' ').expect("a server and a name");
        if let Some(host) = host_of(name) {
            servers.insert((host, server));
        }
    }
    let of_host = |host: &str| -> Vec<&str> {
        let of = servers.iter().filter(|(one, _)| *one == host);
        of.map(|(_, server)| *server).collect()
    };
    let first = of_host("n0");
    let second = of_host("n1");
    assert_eq!((first.len(), second.len()), (1, 1), "{told}");
    assert_ne!(first, second, "{told}");
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-log-14: the message and the exit status of `firn umount` for files that cannot be made plain.
#[test]
fn an_unmount_says_what_stays_in_logs() {
    let cluster = Hosts::new("umount", 2);
    // Another host still writes.
    let mounts = cluster.mounts("flatten=demand");
    let files: Vec<File> = mounts.iter().map(|mount| create(mount, "file")).collect();
    for (host, file) in files.iter().enumerate() {
        write_records(file, host as u64, 2);
    }
    let mut files = files;
    drop(files.remove(0));
    mounts[0]
        .try_umount()
        .ok()
        .says("1 file in logs: other hosts write");
    assert_eq!(fs::metadata(cluster.plain("file")).expect("stat").len(), 0);
    drop(files);
    // A log is damaged.
    mounts[1].wait("logged", mounts[1].path()).ok();
    let log = cluster.log_of(&cluster.container_of("file"), "n0");
    let before = damage(&log, 99);
    mounts[1]
        .try_umount()
        .code(3)
        .says("files stay in logs")
        .says("firn flatten --all --backing");
    assert!(!is_mounted(mounts[1].path()));
    mounts.iter().for_each(FirnMount::wait_for_end);
    assert!(cluster.hosts[1].arenas().is_empty());
    // Every byte is there still.
    log.write_all_at(&[before], 99).expect("mend");
    cluster.mount(1, "flatten=demand").umount();
    assert_same(&cluster.plain("file"), &all_records(2));
    assert!(cluster.containers().is_empty());
}

/// Proves S-log-11: a read-only mount makes nothing plain, and says so.
#[test]
fn a_read_only_mount_does_not_say_that_files_in_logs_are_drained() {
    let cluster = Hosts::new("read-only", 1);
    let mount = cluster.mount(0, "flatten=off");
    fs::create_dir(mount.join("dir")).expect("mkdir");
    fs::write(mount.join("dir/file"), record(5)).expect("write");
    fs::write(cluster.plain("plain"), record(6)).expect("write");
    mount.umount();
    let mount = FirnMount::over(&cluster.hosts[0], &cluster.backing(), "ro");
    assert_same(&mount.join("dir/file"), &record(5));
    mount.wait("logged", mount.path()).ok();
    mount.wait("drained", &mount.join("plain")).ok();
    for path in ["", "dir", "dir/file"] {
        let said = mount.wait("drained", &mount.join(path)).code(3);
        said.says("1 file").says("read-only");
        let args = [Path::new("flatten"), &mount.join(path)];
        cluster.hosts[0].run(args).code(3).says("read-only");
    }
    assert_eq!(cluster.containers().len(), 1);
    mount.umount();
    cluster.mount(0, "").umount();
    assert_same(&cluster.plain("dir/file"), &record(5));
}

/// Proves S-log-11: a caller whose time for the wait is over is told that the flattening goes on.
#[test]
fn a_wait_for_a_flattening_ends_in_time() {
    let cluster = Hosts::new("timeout", 1);
    let mount = cluster.mount(0, "flatten=off");
    fs::write(mount.join("file"), record(7)).expect("write");
    mount.wait("logged", mount.path()).ok();
    // As a host that is at it, and does not come to its end.
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let whole = options
        .open(cluster.container_of("file").join("whole"))
        .expect("create");
    flock(&whole, FlockOperation::LockExclusive).expect("lock");
    let wait = |until: &str| {
        let file = mount.join("file");
        let args = ["wait", "--until", until, "--timeout", "300ms"].map(Path::new);
        cluster.hosts[0].run([&args[..], &[&file]].concat())
    };
    wait("logged").ok();
    for until in ["drained", "durable"] {
        wait(until).code(3).says("still being flattened");
    }
    assert_eq!(fs::metadata(cluster.plain("file")).expect("stat").len(), 0);
    drop(whole);
    mount.wait("drained", mount.path()).ok();
    assert_same(&cluster.plain("file"), &record(7));
    cluster.wait_until_clean();
    mount.umount();
}

/// Proves S-log-36: what a log has lost for good is named in a report and becomes zeros, and only on demand.
#[test]
fn a_loss_that_is_accepted_is_reported_and_becomes_zeros() {
    let cluster = Hosts::new("accept", 2);
    let mounts = cluster.mounts("flatten=off");
    for (host, mount) in mounts.iter().enumerate() {
        write_records(&create(mount, "shared"), host as u64, 2);
    }
    fs::write(mounts[0].join("whole"), record(9)).expect("write");
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let dir = cluster.container_of("shared");
    let log = cluster.log_of(&dir, "n1");
    damage(&log, 5);
    let backing = cluster.backing();
    let report = cluster.shared.join("lost.json");
    let flatten = |more: &[&Path]| {
        let args = ["flatten", "--backing"].map(Path::new);
        cluster.hosts[0].run([&args[..], &[&backing], more].concat())
    };
    let all = Path::new("--all");
    let accept = Path::new("--accept-loss");
    flatten(&[all])
        .code(1)
        .says("cannot flatten 1 file")
        .says("firn check");
    assert_same(&cluster.plain("whole"), &record(9));
    let check = [Path::new("check"), &backing];
    cluster.hosts[0].run(check).code(1).says("--accept-loss");
    // A report is never written over, and a mount gives nothing up.
    fs::write(&report, "another").expect("write");
    flatten(&[all, accept, &report]).code(1).says("lost.json");
    fs::remove_file(&report).expect("unlink");
    let mounted = ["flatten", "--all", "--accept-loss", "x"].map(Path::new);
    cluster.hosts[0].run(mounted).code(2);
    flatten(&[all, accept, &report])
        .code(3)
        .says("1 file")
        .says("lost.json");
    assert!(cluster.containers().is_empty());
    let mut expected = all_records(2);
    let text = fs::read_to_string(&report).expect("read");
    let mut zeros = 0;
    for line in text.lines() {
        let loss: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(loss["path"], "shared");
        assert_eq!(loss["host"], "n1");
        assert_eq!(loss["becomes"], "zeros");
        let [offset, bytes] = ["offset", "bytes"].map(|key| loss[key].as_u64().expect("a number"));
        expected[offset as usize..][..bytes as usize].fill(0);
        zeros += bytes;
    }
    assert!(zeros > 0 && zeros <= RECORDS * RECORD as u64, "{text}");
    assert_same(&cluster.plain("shared"), &expected);
    // Nothing is left to be lost: no report.
    let none = cluster.shared.join("none.json");
    flatten(&[all, accept, &none]).ok();
    assert!(!none.exists());
}

/// How all hosts set the length of a file.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// ftruncate(2) to nothing, as MPI_File_set_size(file, 0).
    SetLen,
    /// open(2) with O_TRUNC.
    Truncating,
    /// fopen("w"), which makes the file if it is not there.
    Created,
    /// ftruncate(2) to the length that it is to have: before it is written.
    Grown,
    /// fallocate(2) of that.
    Allocated,
    /// ftruncate(2) to that length after it was written, by a host that has synced or not.
    AtTheEnd { syncs: bool },
}

const CUTS: [Cut; 7] = [
    Cut::SetLen,
    Cut::Truncating,
    Cut::Created,
    Cut::Grown,
    Cut::Allocated,
    Cut::AtTheEnd { syncs: true },
    Cut::AtTheEnd { syncs: false },
];

impl Cut {
    /// What a host does before all wait for each other and write, to a file that is to have `len` bytes.
    fn open(self, path: &Path, len: u64) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true);
        match self {
            Self::Truncating => options.truncate(true).open(path),
            Self::Created => options.truncate(true).create(true).open(path),
            Self::SetLen | Self::Grown | Self::Allocated | Self::AtTheEnd { .. } => {
                let file = options.open(path)?;
                match self {
                    Self::SetLen => file.set_len(0)?,
                    Self::Grown => file.set_len(len)?,
                    Self::Allocated => fallocate(&file, FallocateFlags::empty(), 0, len)?,
                    _ => {}
                }
                Ok(file)
            }
        }
    }

    /// What it does after all have written.
    fn end(self, file: &File, len: u64) -> io::Result<()> {
        match self {
            Self::AtTheEnd { .. } => file.set_len(len),
            _ => Ok(()),
        }
    }

    /// Whether old bytes beyond the new ones stay.
    fn keeps_rest(self) -> bool {
        matches!(self, Self::Allocated)
    }
}

/// What a host does with a file that all write: opens and cuts it, waits, writes its records, waits, and ends. It waits also
/// after an error, so that no other host waits for ever.
fn write_as_one_of_all(
    path: &Path,
    cut: Cut,
    host: u64,
    hosts: u64,
    all: &Barrier,
) -> io::Result<()> {
    let len = RECORDS_OF_ALL * RECORD as u64;
    let file = cut.open(path, len);
    all.wait();
    let written = file.and_then(|file| {
        for number in (host..RECORDS_OF_ALL).step_by(hosts as usize) {
            file.write_all_at(&record(number), number * RECORD as u64)?;
        }
        if let Cut::AtTheEnd { syncs: true } = cut {
            file.sync_all()?;
        }
        Ok(file)
    });
    all.wait();
    written.and_then(|file| cut.end(&file, len))
}

/// Records of all hosts together.
const RECORDS_OF_ALL: u64 = 31;

/// All hosts cut a file, or set its length, wait for each other, and write their records; as MPI_File_set_size, O_TRUNC and
/// fopen("w") of all ranks do it.
///
/// Proves S-log-64.
#[test]
fn a_file_that_all_hosts_cut_has_the_bytes_of_all() {
    let cluster = Hosts::new("cut-by-all", 3);
    let mounts = cluster.usual_mounts();
    let new: Vec<u8> = (0..RECORDS_OF_ALL).flat_map(record).collect();
    let mut names = Vec::new();
    for (round, old) in [0, new.len() / 2, 2 * new.len()].into_iter().enumerate() {
        for cut in CUTS {
            let name = format!("{cut:?}-{round}").replace(|c: char| !c.is_alphanumeric(), "-");
            let old = vec![0xcd; old];
            fs::write(mounts[round].join(&name), &old).expect("write");
            let all = Barrier::new(mounts.len());
            let outcomes = std::thread::scope(|scope| {
                let hosts = mounts.iter().enumerate();
                let hosts: Vec<_> = hosts
                    .map(|(host, mount)| {
                        let (path, all) = (mount.join(&name), &all);
                        let count = mounts.len() as u64;
                        let write =
                            move || write_as_one_of_all(&path, cut, host as u64, count, all);
                        scope.spawn(write)
                    })
                    .collect();
                hosts
                    .into_iter()
                    .try_for_each(|host| host.join().expect("a host"))
            });
            outcomes.unwrap_or_else(|error| panic!("{name}: {error}"));
            let mut expected = new.clone();
            if cut.keeps_rest() {
                expected.extend(old.get(new.len()..).unwrap_or_default());
            }
            for mount in &mounts {
                assert_same(&mount.join(&name), &expected);
            }
            names.push((name, expected));
        }
    }
    cluster.wait_until_clean();
    for (name, expected) in &names {
        assert_same(&cluster.plain(name), expected);
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-log-42: docs/read_log.py, beside what a mount reads and what becomes of the file.
#[test]
fn a_file_in_logs_is_read_by_a_program_that_knows_the_format() {
    let cluster = Hosts::new("reader", 2);
    let mut expected = vec![7; 3 * RECORD];
    fs::write(cluster.plain("shared"), &expected).expect("write");
    let mounts = cluster.mounts("flatten=off");
    let mut random = generator(seed("log_layout::reader"));
    for round in 0..25u8 {
        let mount = &mounts[random.random_range(0..2)];
        // Opened and closed each time, so that each host knows what the other one did.
        let file = create(mount, "shared");
        for _ in 0..random.random_range(1..20) {
            let at = random.random_range(0..40 * RECORD);
            if random.random_ratio(1, 20) {
                file.set_len(at as u64).expect("cut");
                expected.resize(at, 0);
                continue;
            }
            let data = vec![round + 1; random.random_range(1..3 * RECORD)];
            file.write_all_at(&data, at as u64).expect("write");
            expected.resize(expected.len().max(at + data.len()), 0);
            expected[at..at + data.len()].copy_from_slice(&data);
        }
    }
    for (host, mount) in mounts.iter().enumerate() {
        write_records(&create(mount, "strided"), host as u64, 2);
    }
    // Cuts by hosts that know nothing of what the other one writes.
    let files: Vec<File> = mounts.iter().map(|mount| create(mount, "cut")).collect();
    for _ in 0..60 {
        let host = random.random_range(0..2);
        let at = random.random_range(0..20);
        match random.random_range(0..5) {
            0 => files[host].set_len(at * RECORD as u64 + 7).expect("cut"),
            1 => files[host].sync_all().expect("sync"),
            _ => {
                let number = 2 * at + host as u64;
                let written = files[host].write_all_at(&record(number), number * RECORD as u64);
                written.expect("write");
            }
        }
    }
    drop(files);
    let cut = fs::read(mounts[0].join("cut")).expect("read");
    assert!(cut.len() > RECORD, "{} bytes are left", cut.len());
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    assert_eq!(cluster.containers().len(), 3);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/read_log.py");
    let assert_reads = |name: &str, expected: &[u8]| {
        let copy = cluster.shared.join("copy");
        let mut command = Command::new("sh");
        command.args(["-c", r#"python3 "$0" "$1" "$2" > "$3""#]);
        command.arg(&script).arg(cluster.backing()).arg(name);
        run(command.arg(&copy)).ok();
        assert_same(&copy, expected);
    };
    let strided = all_records(2);
    assert_reads("shared", &expected);
    assert_reads("strided", &strided);
    assert_reads("cut", &cut);
    cluster.mount(0, "flatten=demand").umount();
    assert_same(&cluster.plain("cut"), &cut);
    assert_same(&cluster.plain("shared"), &expected);
    assert_reads("shared", &expected);
    assert_reads("strided", &strided);
}

/// Proves S-log-40: every byte of a file whose container has lost its head is there when that is made anew.
#[test]
fn a_head_that_is_damaged_costs_no_byte() {
    let cluster = Hosts::new("head", 2);
    fs::write(cluster.plain("shared"), record(9)).expect("write");
    let mounts = cluster.mounts("flatten=off");
    for (host, mount) in mounts.iter().enumerate() {
        write_records(&create(mount, "shared"), host as u64, 2);
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let dir = cluster.container_of("shared");
    let head = dir.join("head");
    let backing = cluster.backing();
    let report = cluster.shared.join("lost.json");
    let args = ["flatten", "--backing"].map(Path::new);
    let flatten = |more: &[&Path]| cluster.hosts[0].run([&args[..], &[&backing], more].concat());
    let all = Path::new("--all");
    let accept = Path::new("--accept-loss");
    let assert_refused = |fault: &str| {
        flatten(&[all]).code(1).says("firn check");
        let checked = cluster.hosts[0].run([Path::new("check"), &backing]);
        let text = checked.code(1).says("--accept-loss").stdout.clone();
        assert!(text.contains(fault), "{text}");
    };
    fs::remove_file(&head).expect("unlink");
    assert_refused("file head: it is missing");
    symlink("firn-log-5 something else", &head).expect("symlink");
    assert_refused("file head: it is damaged");
    flatten(&[all, accept, &report]).code(3).says("lost.json");
    let text = fs::read_to_string(&report).expect("read");
    let losses = text.lines().map(|line| {
        let loss: serde_json::Value = serde_json::from_str(line).expect("JSON");
        loss["damaged"].as_str().expect("a name").to_owned()
    });
    assert_eq!(losses.collect::<Vec<_>>(), ["head"]);
    assert_same(&cluster.plain("shared"), &all_records(2));
    assert!(cluster.containers().is_empty());
}

/// Proves S-log-15: a reader on another host than the one that removes or replaces the file.
#[test]
fn a_file_that_another_host_replaces_is_whole_or_stale_for_its_readers() {
    let cluster = Hosts::new("replaced", 2);
    let mounts = cluster.mounts("flatten=demand");
    let here = &mounts[0];
    let there = &mounts[1];
    for replaces in [false, true] {
        fs::write(here.join("file"), record(1)).expect("write");
        let reader = File::open(there.join("file")).expect("open");
        assert_eq!(read_at(&reader, 0, RECORD), record(1));
        if replaces {
            fs::write(here.join("new"), record(2)).expect("write");
            fs::rename(here.join("new"), here.join("file")).expect("rename");
        } else {
            fs::remove_file(here.join("file")).expect("unlink");
        }
        wait_until("its bytes are gone", LIMIT, || {
            let mut bytes = vec![0; RECORD + 1];
            match reader.read_at(&mut bytes, 0) {
                Ok(count) => {
                    assert_eq!(count, RECORD);
                    assert!(bytes[..RECORD] == record(1));
                    false
                }
                Err(error) => error.raw_os_error() == Some(libc::ESTALE),
            }
        });
        let now = fs::read(there.join("file"));
        if replaces {
            assert_eq!(now.expect("read"), record(2))
        } else {
            assert!(now.is_err())
        }
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Options of the hosts in a round: what is acknowledged is in the logs at once, soon, or not before the end.
const CRASH_OPTIONS: [&str; 5] = [
    "",
    "flatten=demand",
    "close=held,drain-age=10min",
    "close=held,drain-age=20ms",
    "close=held,drain-age=20ms,flatten=off",
];

/// Writers of one file, one on each host.
struct Writers {
    children: Vec<Child>,
    logs: Vec<PathBuf>,
}

impl Writers {
    fn start(cluster: &Hosts, mounts: &[FirnMount<'_>], seed: u64) -> Self {
        let mut writers = Self {
            children: Vec::new(),
            logs: Vec::new(),
        };
        for (which, mount) in mounts.iter().enumerate() {
            let log = cluster.shared.join(format!("log{which}"));
            let mut command = Command::new(helper_binary());
            command.arg("striped-writer").arg(mount.join("shared"));
            command.arg(&log);
            let numbers = [seed ^ which as u64, which as u64, mounts.len() as u64];
            command.args(numbers.map(|number| number.to_string()));
            writers.children.push(command.spawn().expect("a writer"));
            writers.logs.push(log);
        }
        writers
    }

    fn wait_for_writes(&mut self) {
        wait_until("the writers are at work", LIMIT, || {
            for child in &mut self.children {
                assert_eq!(child.try_wait().expect("look after it"), None);
            }
            self.logs.iter().all(|log| returned_operations(log) >= 40)
        });
    }

    fn end(&mut self) {
        for child in &mut self.children {
            child.kill().ok();
            child.wait().expect("wait");
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.end();
    }
}

/// Proves S-log-10, S-log-16: kill -9 of one firnd or both while two hosts write one file. After the hosts have come back,
/// or their arenas were recovered, the plain file has what either had acknowledged.
#[test]
fn hosts_that_are_killed_while_they_write_one_file_lose_nothing() {
    let seed = seed("killed in logs");
    let mut random = generator(seed);
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 4) {
        let cluster = Hosts::new("kill-logs", 2);
        let options = CRASH_OPTIONS[random.random_range(0..CRASH_OPTIONS.len())];
        let mounts = cluster.mounts(options);
        let mut writers = Writers::start(&cluster, &mounts, seed ^ (round << 8));
        let mut mounts: Vec<_> = mounts.into_iter().map(Some).collect();
        writers.wait_for_writes();
        std::thread::sleep(Duration::from_micros(random.random_range(0..50_000)));
        let dead: &[usize] = [&[0][..], &[1], &[0, 1]][random.random_range(0..3)];
        for host in dead {
            mounts[*host].take().expect("a mount").kill();
            std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        }
        writers.end();
        // Those that live end before or after the others come back.
        let ends_first = random.random();
        let end = |mounts: Vec<Option<FirnMount<'_>>>| {
            mounts.into_iter().flatten().for_each(|mount| {
                mount.umount();
            });
        };
        let mut living = Some(mounts);
        if ends_first {
            end(living.take().expect("mounts"));
        }
        for host in dead {
            // A mount that lives is one of this machine for `firn recover`, whatever host it is of.
            if living.is_some() || random.random() {
                cluster.mount(*host, options).umount();
            } else {
                let args = [Path::new("recover"), &cluster.backing()];
                cluster.hosts[*host].run(args).ok();
            }
        }
        living.into_iter().for_each(end);
        let args = ["flatten", "--all", "--backing"].map(Path::new);
        cluster.hosts[0]
            .run([&args[..], &[&cluster.backing()]].concat())
            .ok();
        // What a killed host was making or removing goes at its next mount.
        let mut left = cluster.containers();
        left.retain(|name| name.starts_with(|first: char| first.is_ascii_hexdigit()));
        assert!(left.is_empty(), "round {round}: {left:?}");
        let writes = striped::verify(&cluster.plain("shared"), &writers.logs);
        println!("round {round}: {options:?}, killed {dead:?}: {writes} writes");
    }
}

/// Writes every second block of `argv[1]` to its place in `argv[2]`, from block `argv[3]` on.
const EVERY_SECOND_BLOCK: &str = "
import os, sys
data = open(sys.argv[1], 'rb').read()
file = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT, 0o644)
for at in range(int(sys.argv[3]) * 50000, len(data), 100000):
    block = data[at:at + 50000]
    assert os.pwrite(file, block, at) == len(block)
    assert os.pread(file, len(block), at) == block
os.close(file)
";

fn write_every_second(data: &Path, file: &Path, first: usize) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", EVERY_SECOND_BLOCK]).args([data, file]);
    command.arg(first.to_string());
    command
}

/// Proves S-log-17: programs with direct access on two hosts write one file in logs, and read it.
#[test]
fn programs_with_direct_access_write_one_file_in_logs() {
    let cluster = Hosts::new("direct", 2);
    let data = cluster.shared.join("data");
    let expected = all_records(2);
    fs::write(&data, &expected).expect("write");
    let mounts = cluster.mounts("flatten=demand");
    let preloaded = |host: usize, mut command: Command| {
        run(Frontend::Mount.preload(&cluster.hosts[host], &mut command)).ok()
    };
    for (host, mount) in mounts.iter().enumerate() {
        let write = write_every_second(&data, &mount.join("shared"), host);
        let said = preloaded(host, write);
        // firnd takes the lease back at times.
        assert!(direct_bytes(&said, "pwrite") > 0, "{said}");
    }
    assert_eq!(cluster.containers().len(), 1);
    for (host, mount) in mounts.iter().enumerate() {
        let mut compare = Command::new("cmp");
        compare.args([&data, &mount.join("shared")]);
        preloaded(host, compare);
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    assert_same(&cluster.plain("shared"), &expected);
    assert!(cluster.containers().is_empty());
}

/// Proves S-log-17: a stub tree drains to logs, too, also for some names only.
#[test]
fn a_stub_tree_drains_to_logs() {
    let cluster = Hosts::new("tree", 1);
    let data = cluster.shared.join("data");
    fs::write(&data, all_records(1)).expect("write");
    let mount = cluster.mount(0, "frontend=preload,flatten=off");
    for first in 0..2 {
        let mut write = write_every_second(&data, &mount.join("file"), first);
        run(Frontend::Tree.preload(&cluster.hosts[0], &mut write)).ok();
    }
    mount.wait("logged", mount.path()).ok();
    assert_eq!(cluster.containers().len(), 1);
    assert_eq!(fs::metadata(cluster.plain("file")).expect("stat").len(), 0);
    mount.wait("drained", mount.path()).ok();
    assert!(cluster.containers().is_empty());
    assert_same(&cluster.plain("file"), &all_records(1));
    mount.umount();
    assert_same(&cluster.plain("file"), &all_records(1));
    let mount = cluster.mount(0, "frontend=preload,flatten=off,log-files=*.h5");
    for name in ["new/some.h5", "new/other"] {
        let path = mount.join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
        for first in 0..2 {
            let mut write = write_every_second(&data, &path, first);
            run(Frontend::Tree.preload(&cluster.hosts[0], &mut write)).ok();
        }
    }
    mount.wait("logged", mount.path()).ok();
    assert_eq!(cluster.containers().len(), 1);
    mount.umount();
    assert_eq!(
        fs::metadata(cluster.plain("new/some.h5"))
            .expect("stat")
            .len(),
        0
    );
    assert_same(&cluster.plain("new/other"), &all_records(1));
    let mount = cluster.mount(0, "log-files=*.h5");
    mount.wait("drained", mount.path()).ok();
    mount.umount();
    assert_same(&cluster.plain("new/some.h5"), &all_records(1));
}

/// Proves S-log-1, S-log-33, S-log-41: over a file system that does not tell when a file was made (FUSE) files are told apart by a
/// number of their own, and a new file with an old inode number has nothing of the old one.
#[test]
fn files_without_a_birth_time_are_told_apart() {
    let cluster = Hosts::new("birth", 2);
    let served = FaultFs::of(&cluster.shared, cluster.backing());
    let mount = |host: usize, more: &str| {
        let options = format!("{OPTIONS},{more}");
        FirnMount::over(&cluster.hosts[host], served.path(), &options)
    };
    let mounts = [0, 1].map(|host| mount(host, "flatten=off"));
    let files = [0, 1].map(|host| create(&mounts[host], "shared"));
    for (host, file) in files.iter().enumerate() {
        write_records(file, host as u64, 2);
        file.sync_all().expect("sync");
    }
    let mut number = [0; 9];
    let found = getxattr(cluster.plain("shared"), "user.firn.log", &mut number);
    assert_eq!(found, Ok(8));
    assert!(cluster.containers()[0].contains(&format!(
        "{:016x}",
        u64::from_le_bytes(number[..8].try_into().expect("8 bytes"))
    )));
    drop(files);
    for mount in &mounts {
        assert_same(&mount.join("shared"), &all_records(2));
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let containers = cluster.containers();
    assert_eq!(containers.len(), 1);
    // Removed beside Firn; its number goes to a new file, where the file system gives it again.
    let old = fs::metadata(cluster.plain("shared")).expect("stat").ino();
    fs::remove_file(cluster.plain("shared")).expect("unlink");
    for name in ["a", "b", "c", "d"] {
        fs::write(cluster.plain(name), name).expect("write");
        let ino = fs::metadata(cluster.plain(name)).expect("stat").ino();
        println!("{name}: inode {ino}, before: {old}");
    }
    let mounts = [0, 1].map(|host| mount(host, "flatten=close"));
    for name in ["a", "b", "c", "d"] {
        for mount in &mounts {
            assert_same(&mount.join(name), name.as_bytes());
        }
        for mount in &mounts {
            create(mount, name).write_all_at(b"new", 1).expect("write");
        }
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    for name in ["a", "b", "c", "d"] {
        assert_same(&cluster.plain(name), format!("{name}new").as_bytes());
    }
    assert_eq!(cluster.containers(), containers, "the lost one is kept");
}

/// What a host leaves that died in the removal of a file, and in that of a container.
fn leave_removals(cluster: &Hosts) {
    let mount = cluster.mount(0, "flatten=off");
    fs::write(mount.join("file"), record(1)).expect("write");
    mount.umount();
    let container = cluster.container_of("file");
    let retired = container.with_file_name("over-0-0-0.n0");
    run(Command::new("cp").arg("-a").args([&container, &retired])).ok();
    let mut mark = File::options();
    mark.write(true).create_new(true).mode(0o600);
    let mark = mark.open(container.join("dying")).expect("create");
    mark.write_all_at(b"n0", 0).expect("write");
    fs::remove_file(cluster.plain("file")).expect("unlink");
}

/// Proves S-log-71.
#[test]
fn what_a_host_left_that_died_in_a_removal_goes_whatever_comes() {
    let cluster = Hosts::new("removals", 2);
    let backing = cluster.backing();
    let verb = |args: &[&str]| {
        let args = args.iter().map(Path::new).chain([backing.as_path()]);
        cluster.hosts[0].run(args.collect::<Vec<_>>())
    };
    let mount_and_wait = |options: &str| {
        let mount = FirnMount::over(&cluster.hosts[1], &backing, options);
        cluster.wait_until_clean();
        mount.umount();
    };
    let ends: [&dyn Fn(); 6] = [
        &|| drop(verb(&["recover"]).ok()),
        &|| drop(verb(&["flatten", "--all", "--backing"]).ok()),
        &|| drop(verb(&["check", "--orphans", "--repair"]).ok()),
        &|| mount_and_wait("arena-size=64M,layout=log,flatten=demand"),
        &|| mount_and_wait("arena-size=64M,layout=log"),
        &|| mount_and_wait("arena-size=64M"),
    ];
    for end in ends {
        leave_removals(&cluster);
        let check = verb(&["check"]).ok();
        assert_eq!(
            check.stdout.matches("file was removed").count(),
            2,
            "{check}"
        );
        verb(&["check", "--orphans"]).code(1);
        end();
        assert_eq!(cluster.containers(), Vec::<String>::new());
    }
}
