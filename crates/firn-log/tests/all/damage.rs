//! Containers that are damaged, of another version, of another user or open to others. Reads return the bytes written
//! or an error, and checks report what is wrong.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use firn_backing::{Access, Backing, Errno, Files, Kind, Names, Volume};
use firn_hosts::own;
use firn_log::{Fault, Finding, LogBacking, Loss, LostPart, Report, Setup, WhenClosed, verify};
use firn_sim::{SimBacking, suite};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::first_container;

type Logged = LogBacking<SimBacking>;
type Inode = <SimBacking as Volume>::Inode;

const FILE_BYTES: usize = 20_000;

fn begin_host(disk: &SimBacking, host: &str) -> (SimBacking, Logged) {
    let disk = disk.another_process();
    let writes = host == "a" || host == "b";
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|name: &OsStr| name == "file"),
        // The hosts that wrote are dead when the other hosts mount.
        is_alive: Box::new(move |_: &str| Ok(writes)),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 4096,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let backing = LogBacking::open(disk.clone(), setup).expect("open");
    (disk, backing.with_memory(64 << 10))
}

/// Makes a disk with a file that two hosts wrote and may have begun to flatten. Returns it with the file's bytes, and
/// with all bytes that the file ever had.
fn written(random: &mut StdRng) -> (SimBacking, Vec<u8>, History) {
    let disk = SimBacking::new();
    let mut expected = Vec::new();
    let mut history = History::new();
    let (a_disk, a) = begin_host(&disk, "a");
    let (_, b) = begin_host(&disk, "b");
    let me = suite::own_caller();
    let made = a.create(&me, &a.root(), OsStr::new("file"), 0o644);
    drop(made.expect("create"));
    for host in [&a, &b, &a] {
        let (inode, _) = host
            .lookup(&host.root(), OsStr::new("file"))
            .expect("lookup");
        let file = host.open(&inode, Access::ReadWrite).expect("open");
        for _ in 0..random.random_range(1..15) {
            let at = random.random_range(0..FILE_BYTES);
            let mut data = vec![0; random.random_range(1..3000)];
            random.fill(&mut data[..]);
            host.write_at(&file, &[IoSlice::new(&data)], at as u64)
                .expect("write");
            expected.resize(expected.len().max(at + data.len()), 0);
            expected[at..at + data.len()].copy_from_slice(&data);
            history.note(at, &data);
        }
        host.sync(&file, false).expect("sync");
    }
    assert_eq!(b.settle().error, None);
    if random.random_ratio(1, 2) {
        a_disk.crash_at(a_disk.steps() + random.random_range(20..150));
        let _ = a.settle();
        a_disk.begin_new_process();
    }
    (disk, expected, history)
}

/// Returns the container if the file is not flat.
fn container(disk: &SimBacking) -> Option<Inode> {
    Some(first_container(disk)?.1)
}

fn names(disk: &SimBacking, dir: &Inode) -> Vec<String> {
    let listed = own::list(disk, dir).expect("list").into_iter();
    let mut names: Vec<String> = listed
        .map(|(name, ..)| String::from_utf8(name).expect("a name"))
        .collect();
    names.sort();
    names
}

fn read(backing: &impl Backing) -> Result<Vec<u8>, Errno> {
    let (inode, attr) = backing.lookup(&backing.root(), OsStr::new("file"))?;
    let file = backing.open(&inode, Access::Read)?;
    let mut bytes = vec![0; attr.size as usize + 10];
    let count = backing.read_at(&file, &mut bytes, 0)?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Damages a file of a container at random.
fn damage(disk: &SimBacking, dir: &Inode, name: &str, random: &mut StdRng) -> bool {
    let (inode, attr) = disk.lookup(dir, OsStr::new(name)).expect("lookup");
    if attr.size > 0 && attr.kind == Kind::File && random.random_ratio(1, 6) {
        disk.set_mode(&inode, 0o666).expect("mode");
        return true;
    }
    damage_bytes(disk, dir, name, random)
}

/// Damages the bytes of a file at random.
fn damage_bytes(disk: &SimBacking, dir: &Inode, name: &str, random: &mut StdRng) -> bool {
    let (inode, attr) = disk.lookup(dir, OsStr::new(name)).expect("lookup");
    if attr.kind == Kind::Symlink {
        damage_link(disk, dir, name, random);
        return true;
    }
    if attr.size == 0 {
        return false;
    }
    // An index that ends early looks like one with fewer changes, unless the seal counts more of it.
    let is_sealed = disk.lookup(dir, OsStr::new("decision")).is_ok();
    let may_be_shortened = !name.starts_with("i-") || is_sealed;
    let may_be_removed = name.starts_with("d-") || (name.starts_with("i-") && is_sealed);
    let at = random.random_range(0..attr.size);
    let file = disk.open(&inode, Access::ReadWrite).expect("open");
    match random.random_range(0..5) {
        0 if may_be_shortened => disk.set_len(&file, at).expect("cut"),
        1 if may_be_removed => disk.unlink(dir, OsStr::new(name)).expect("remove"),
        _ => {
            let mut byte = [0];
            disk.read_at(&file, &mut byte, at).expect("read");
            byte[0] ^= 1 << random.random_range(0..8);
            disk.write_at(&file, &[IoSlice::new(&byte)], at)
                .expect("write");
        }
    }
    true
}

/// Damages a link at random: changes its text, or removes it.
fn damage_link(disk: &SimBacking, dir: &Inode, name: &str, random: &mut StdRng) {
    let (inode, _) = disk.lookup(dir, OsStr::new(name)).expect("lookup");
    let mut text = disk.readlink(&inode).expect("read");
    disk.unlink(dir, OsStr::new(name)).expect("remove");
    // Another version is not damage, so the version stays.
    let at = random.random_range("firn-log-5 ".len()..text.len());
    match random.random_range(0..5) {
        0 => text.truncate(at),
        1 => return,
        _ => text[at] ^= 1 << random.random_range(0..7),
    }
    let me = suite::own_caller();
    disk.symlink(&me, dir, OsStr::new(name), OsStr::from_bytes(&text))
        .expect("symlink");
}

/// Proves S-log-31, S-log-32.
#[test]
fn damage_is_named_and_never_shown() {
    let mut failed = 0;
    let mut harmless = 0;
    for seed in 0..400 {
        let mut random = StdRng::seed_from_u64(seed);
        let (disk, expected, _) = written(&mut random);
        let Some(dir) = container(&disk) else {
            continue;
        };
        assert_eq!(verify(&disk).expect("verify").findings, [], "seed {seed}");
        let names = names(&disk, &dir);
        let name = &names[random.random_range(0..names.len())];
        if !damage(&disk, &dir, name, &mut random) {
            continue;
        }
        let (_, host) = begin_host(&disk, "c");
        let found = read(&host);
        let is_decided = names.iter().any(|name| name == "done-all");
        let findings = verify(&disk).expect("verify").findings;
        match found {
            Ok(found) => {
                assert!(found == expected, "seed {seed}: {name}: {findings:?}");
                harmless += 1;
            }
            Err(error) => {
                let known = [Errno::IO, Errno::PERM];
                assert!(known.contains(&error), "seed {seed}: {name}: {error}");
                assert!(!is_decided, "seed {seed}: {name}: {error}");
                // A host that died while it put the seal left the seal with a second name.
                let is_seal = name.starts_with("put-seal.");
                let named = if is_seal { "decision" } else { name };
                let names_it = |finding: &Finding| finding.file.as_deref() == Some(named);
                assert!(
                    findings.iter().any(names_it),
                    "seed {seed}: {name} is not in {findings:?}"
                );
                failed += 1;
            }
        }
        // A file that can be flattened has the right bytes.
        let (inode, _) = host
            .lookup(&host.root(), OsStr::new("file"))
            .expect("lookup");
        drop(host.open(&inode, Access::ReadWrite));
        let _ = host.settle();
        if container(&disk).is_none() {
            assert!(read(&disk) == Ok(expected), "seed {seed}: {name}: flat");
        }
    }
    assert!(failed > 50 && harmless > 50, "{failed} {harmless}");
}

/// Proves S-log-32.
#[test]
fn an_index_that_is_gone_is_named() {
    let mut removed = 0;
    for seed in 0..100 {
        let mut random = StdRng::seed_from_u64(seed);
        let (disk, ..) = written(&mut random);
        let Some(dir) = container(&disk) else {
            continue;
        };
        let names = names(&disk, &dir);
        // Without a seal, a missing index looks like a host without writes.
        let is_sealed = names.iter().any(|name| name == "decision");
        let index = names.iter().find(|name| name.starts_with("i-"));
        let Some(index) = index.filter(|_| is_sealed) else {
            continue;
        };
        disk.unlink(&dir, OsStr::new(index)).expect("remove");
        let findings = verify(&disk).expect("verify").findings;
        let names_it = |finding: &Finding| {
            finding.file.as_ref() == Some(index) && finding.fault == Fault::Missing
        };
        assert!(findings.iter().any(names_it), "seed {seed}: {findings:?}");
        removed += 1;
    }
    assert!(removed > 20, "{removed}");
}

/// All values that each byte of a file ever had. A byte may have any of them where changes are lost.
struct History(Vec<Vec<u8>>);

impl History {
    fn new() -> Self {
        Self(vec![Vec::new(); 2 * FILE_BYTES])
    }

    fn note(&mut self, at: usize, data: &[u8]) {
        for (known, byte) in self.0[at..].iter_mut().zip(data) {
            known.push(*byte);
        }
    }

    fn contains(&self, at: usize, byte: u8) -> bool {
        byte == 0 || self.0[at].contains(&byte)
    }
}

/// Checks a file against its bytes from before a salvage: each difference must have been reported.
fn assert_reported(found: &[u8], expected: &[u8], history: &History, losses: &[Loss], seed: u64) {
    let zeros = losses.iter().filter_map(|loss| match &loss.lost {
        LostPart::Bytes { range, .. } => Some(range.start as usize..range.end as usize),
        LostPart::Changes { .. } | LostPart::Seal | LostPart::Head { .. } => None,
    });
    let has_unknown_changes = losses
        .iter()
        .any(|loss| matches!(loss.lost, LostPart::Changes { .. } | LostPart::Seal));
    assert!(
        has_unknown_changes || found.len() == expected.len(),
        "seed {seed}"
    );
    let mut is_zero = vec![false; found.len()];
    zeros.for_each(|range| is_zero[range].fill(true));
    for (at, byte) in found.iter().enumerate() {
        let is_allowed = if is_zero[at] {
            *byte == 0
        } else if has_unknown_changes {
            history.contains(at, *byte)
        } else {
            *byte == expected[at]
        };
        assert!(is_allowed, "seed {seed}: byte {at} is {byte}: {losses:?}");
    }
}

/// A process that dies at any call salvages a damaged file, and the next process finishes. Each byte is as it was, or
/// was reported.
///
/// Proves S-log-36, S-log-40.
#[test]
fn what_is_given_up_is_told_and_all_else_is_flat() {
    let mut zeros = 0;
    let mut changes = 0;
    let mut seals = 0;
    let mut heads = 0;
    let mut nothing = 0;
    for seed in 0..400 {
        let mut random = StdRng::seed_from_u64(seed);
        let (disk, expected, history) = written(&mut random);
        let Some(dir) = container(&disk) else {
            continue;
        };
        let names = names(&disk, &dir);
        let logs = names.iter().filter(|name| {
            ["d-", "i-", "t-", "decision", "head"]
                .iter()
                .any(|kind| name.starts_with(kind))
        });
        let mut logs: Vec<&String> = logs.collect();
        // One place in each file: an index that has no frame noting a sync looks like one with fewer changes.
        for _ in 0..random.random_range(1..4).min(logs.len()) {
            let name = logs.swap_remove(random.random_range(0..logs.len()));
            damage_bytes(&disk, &dir, name, &mut random);
        }
        let mut losses: Vec<Loss> = Vec::new();
        if random.random_ratio(1, 2) {
            let (process, host) = begin_host(&disk, "c");
            let mut told = Vec::new();
            process.crash_at(process.steps() + random.random_range(0..150));
            let _ = host.flatten_with_loss(&host.root(), &mut told);
            process.begin_new_process();
            losses = told;
        }
        let (_, host) = begin_host(&disk, "d");
        let left = host.flatten_with_loss(&host.root(), &mut losses);
        let left = left.expect("walk");
        assert!(left.is_empty(), "seed {seed}: {left:?}, {losses:?}");
        assert!(container(&disk).is_none(), "seed {seed}");
        let found = read(&disk).expect("read");
        assert_reported(&found, &expected, &history, &losses, seed);
        for loss in &losses {
            match loss.lost {
                LostPart::Bytes { .. } => zeros += 1,
                LostPart::Changes { .. } => changes += 1,
                LostPart::Seal => seals += 1,
                LostPart::Head { .. } => heads += 1,
            }
        }
        nothing += usize::from(losses.is_empty());
    }
    let counts = [zeros, changes, seals, heads, nothing];
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
}

/// Nothing is given up if the report fails.
#[test]
fn what_cannot_be_told_is_not_given_up() {
    struct Broken(bool);
    impl Report for Broken {
        fn add(&mut self, _: Loss) -> Result<(), Errno> {
            if self.0 { Ok(()) } else { Err(Errno::NOSPC) }
        }
        fn sync(&mut self) -> Result<(), Errno> {
            Err(Errno::NOSPC)
        }
    }
    let mut tried = 0;
    for seed in 0..20 {
        let mut random = StdRng::seed_from_u64(seed);
        let (disk, expected, history) = written(&mut random);
        let Some(dir) = container(&disk) else {
            continue;
        };
        for name in names(&disk, &dir) {
            if name.starts_with("d-") {
                disk.unlink(&dir, OsStr::new(&name)).expect("remove");
            }
        }
        let (_, host) = begin_host(&disk, "c");
        let before = (names(&disk, &dir), read(&disk));
        for adds in [false, true] {
            let left = host.flatten_with_loss(&host.root(), &mut Broken(adds));
            let left = left.expect("walk");
            assert_eq!((left.failed, left.error), (1, Some(Errno::NOSPC)));
            assert!(read(&host).is_err(), "seed {seed}");
        }
        let is_new = |name: &&String| !before.0.contains(name);
        let made: Vec<String> = names(&disk, &dir).iter().filter(is_new).cloned().collect();
        assert!(
            made.iter().all(
                |name| ["closing", "whole", "decision", "done-cut", "time-0"].contains(&&**name)
                    || name.starts_with("claim-")
            ),
            "seed {seed}: {made:?}"
        );
        assert!(read(&disk) == before.1, "seed {seed}");
        let mut losses: Vec<Loss> = Vec::new();
        let left = host.flatten_with_loss(&host.root(), &mut losses);
        assert!(left.expect("walk").is_empty(), "seed {seed}");
        assert_reported(
            &read(&disk).expect("read"),
            &expected,
            &history,
            &losses,
            seed,
        );
        tried += 1;
    }
    assert!(tried > 10, "{tried}");
}

/// A file whose container cannot be read fails with an error, and can be removed. Other files are read.
///
/// Proves S-log-33.
#[test]
fn a_container_of_another_user_is_not_believed() {
    type Change = fn(&SimBacking, &Inode, &Inode);
    const VERSION: usize = 4;
    let changes: [Change; 8] = [
        |disk, parent, _| disk.set_mode(parent, 0o755).expect("mode"),
        |disk, parent, _| disk.set_owner(parent, Some(12345), None).expect("owner"),
        |disk, _, dir| disk.set_mode(dir, 0o755).expect("mode"),
        |disk, _, dir| disk.set_owner(dir, Some(12345), None).expect("owner"),
        // Removes the head. A host that has opened the container does not read the head again.
        |disk, _, dir| {
            disk.unlink(dir, OsStr::new("head")).expect("remove");
            let me = suite::own_caller();
            let later = OsStr::new("firn-log-9 whatever");
            disk.symlink(&me, dir, OsStr::new("head"), later)
                .expect("symlink");
        },
        |disk, _, dir| {
            let names = names(disk, dir);
            let name = names.iter().find(|name| name.starts_with("i-"));
            let name = OsStr::new(name.expect("an index"));
            let (index, _) = disk.lookup(dir, name).expect("lookup");
            disk.set_mode(&index, 0o666).expect("mode");
        },
        // The container is half removed.
        |disk, _, dir| disk.unlink(dir, OsStr::new("head")).expect("remove"),
        // The container is of the version whose heads were regular files.
        |disk, _, dir| {
            disk.unlink(dir, OsStr::new("head")).expect("remove");
            let me = suite::own_caller();
            disk.create(&me, dir, OsStr::new("head"), 0o600)
                .expect("create");
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut random = StdRng::seed_from_u64(0);
        let (disk, ..) = written(&mut random);
        let (_, host) = begin_host(&disk, "d");
        let me = suite::own_caller();
        let other = host.create(&me, &host.root(), OsStr::new("other"), 0o644);
        drop(other.expect("create"));
        let (parent, container) = first_container(&disk).expect("there");
        change(&disk, &parent, &container);
        assert!(number >= VERSION || read(&host).is_err(), "change {number}");
        let (_, host) = begin_host(&disk, "e");
        assert!(read(&host).is_err(), "change {number}");
        let findings = verify(&disk).expect("verify").findings;
        let is_serious = |finding: &Finding| !finding.fault.is_harmless();
        assert!(findings.iter().any(is_serious), "change {number}");
        let says_version = findings.iter().any(|finding| {
            matches!(finding.fault, Fault::Head(_)) && finding.to_string().contains("version 9")
        });
        assert_eq!(says_version, number == VERSION, "{findings:?}");
        let (inode, _) = host
            .lookup(&host.root(), OsStr::new("other"))
            .expect("lookup");
        drop(host.open(&inode, Access::ReadWrite).expect("open"));
        let removed = host.unlink(&host.root(), OsStr::new("file"));
        assert_eq!(removed, Ok(()), "change {number}");
        assert_eq!(host.settle().error, None, "change {number}");
        assert_eq!(read(&host), Err(Errno::NOENT), "change {number}");
    }
}
