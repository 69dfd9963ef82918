//! File locks of several hosts on one simulated disk.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firn_backing::{Backing, DirBacking, Errno, LockMode, LockRange, Volume};
use firn_hosts::{
    ConflictingLock, FileLocks, HeldLock, KeptLockFile, KeptLocks, LockFileKey, LockKeeping,
    LockKind, LockRequestId, LockSetup, OnConflict, Owner, ReleasedLocks, WantedLock, own,
};
use firn_sim::LockReach;
use firn_sim::SimBacking;
use firn_sim::suite::own_caller;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Longer than any step of these tests; only a hang takes this long.
const LIMIT: Duration = Duration::from_secs(60);
const DIR: &str = "locks";
const FILE: u64 = 7;

fn disk() -> SimBacking {
    let disk = SimBacking::new();
    let root = disk.root();
    disk.set_owner(&root, Some(own_caller().uid), None)
        .expect("set_owner");
    own::make_dir(&disk, &root, DIR).expect("mkdir");
    disk
}

/// Starts the locks of the host `name`, to which the hosts `others` count as alive.
fn host(disk: &SimBacking, name: &str, others: &[&str]) -> Arc<FileLocks> {
    let base = disk.another_process();
    host_on(base, name, others)
}

fn host_on(base: SimBacking, name: &str, others: &[&str]) -> Arc<FileLocks> {
    let dir = own::must_find_dir(&base, &base.root(), DIR).expect("the directory");
    let others: Vec<String> = others.iter().map(|&other| other.to_owned()).collect();
    let setup = LockSetup {
        base,
        dir,
        host: name.to_owned(),
        other_hosts: Box::new(move || Ok(others.clone())),
        keeping: None,
        kept: KeptLocks::default(),
    };
    FileLocks::start(setup).expect("start")
}

fn owner(number: u64) -> Owner {
    Owner {
        number,
        handle: number,
        pid: number as u32,
    }
}

fn wanted(number: u64, range: LockRange, mode: LockMode) -> WantedLock {
    WantedLock {
        file: FILE,
        kind: LockKind::Bytes,
        owner: owner(number),
        range,
        mode,
    }
}

type Answer = Receiver<Result<(), Errno>>;

fn begin(locks: &FileLocks, wanted: WantedLock, waits: bool) -> (LockRequestId, Answer) {
    let (answered, answer) = mpsc::channel();
    let ticket = locks.next_ticket();
    let done = Box::new(move |outcome| {
        let _ = answered.send(outcome);
    });
    locks.register(ticket, done);
    let on_conflict = if waits {
        OnConflict::Wait
    } else {
        OnConflict::Fail
    };
    locks.acquire(ticket, wanted, on_conflict);
    (ticket, answer)
}

fn acquire(locks: &FileLocks, wanted: WantedLock, waits: bool) -> Result<(), Errno> {
    let (_, answer) = begin(locks, wanted, waits);
    answer.recv_timeout(LIMIT).expect("an answer")
}

fn release(locks: &FileLocks, what: ReleasedLocks) {
    let (answered, answer) = mpsc::channel();
    let done = Box::new(move |outcome| {
        let _ = answered.send(outcome);
    });
    locks.release(FILE, LockKind::Bytes, what, done);
    answer
        .recv_timeout(LIMIT)
        .expect("an answer")
        .expect("release");
}

fn begin_test(
    locks: &FileLocks,
    wanted: WantedLock,
) -> Receiver<Result<Option<ConflictingLock>, Errno>> {
    let (answered, answer) = mpsc::channel();
    let done = Box::new(move |found| {
        let _ = answered.send(found);
    });
    locks.test(wanted, done);
    answer
}

fn has_conflict(locks: &FileLocks, wanted: WantedLock) -> bool {
    let answer = begin_test(locks, wanted);
    let found = answer.recv_timeout(LIMIT).expect("an answer");
    found.expect("test").is_some()
}

fn names<B: Backing>(disk: &B) -> Vec<String> {
    let dir = own::must_find_dir(disk, &disk.root(), DIR).expect("the directory");
    let listed = own::list(disk, &dir).expect("list");
    let names = listed.into_iter().map(|(name, ..)| name);
    names
        .map(|name| String::from_utf8(name).expect("a name"))
        .collect()
}

const HOSTS: [(&str, [&str; 2]); 3] = [("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"])];

#[test]
fn locks_of_three_hosts_are_those_of_one() {
    let disk = disk();
    let mut hosts = HOSTS.map(|(name, others)| host(&disk, name, &others));
    compare_with_model(&mut hosts, |_| {});
    assert_eq!(names(&disk), Vec::<String>::new(), "lock files stay");
}

/// What a dead firnd leaves: duplicates of the descriptors of its lock files, and its recorded locks.
#[derive(Default)]
struct KeptByTest {
    files: Mutex<HashMap<u64, OwnedFd>>,
    locks: Mutex<HashMap<LockFileKey, Vec<HeldLock>>>,
}

struct KeepingOfTest(Arc<KeptByTest>);

impl LockKeeping for KeepingOfTest {
    fn keep_lock_file(&self, lock_file: u64, descriptor: BorrowedFd<'_>) {
        let descriptor = descriptor.try_clone_to_owned().expect("a duplicate");
        self.0
            .files
            .lock()
            .expect("files")
            .insert(lock_file, descriptor);
    }

    fn drop_lock_file(&self, lock_file: u64) {
        self.0.files.lock().expect("files").remove(&lock_file);
    }

    fn record_locks(&self, _: u64, key: LockFileKey, locks: &[HeldLock]) -> bool {
        let mut noted = self.0.locks.lock().expect("locks");
        noted.insert(key, locks.to_vec());
        true
    }
}

impl KeptByTest {
    fn copy(&self) -> KeptLocks {
        let files = self.files.lock().expect("files");
        KeptLocks {
            files: files
                .iter()
                .map(|(&ino, file)| KeptLockFile {
                    ino,
                    descriptor: file.try_clone().expect("a duplicate"),
                })
                .collect(),
            locks: self.locks.lock().expect("locks").clone(),
        }
    }
}

/// A host that starts has its file, and no lock in it yet. Another host that starts takes the file for one of a dead host.
///
/// Proves S-log-44.
#[test]
fn regression_hosts_that_start_at_the_same_time_have_locks() {
    let disk = disk();
    let slow = disk.another_process();
    let hang = slow.hang("lock_range");
    let first = host_on(slow, "a", &["b"]);
    hang.await_call();
    let second = host(&disk, "b", &["a"]);
    let dir = own::must_find_dir(&disk, &disk.root(), DIR).expect("the directory");
    let has_file = || {
        let found = own::find_file(&disk, &dir, "host-a").expect("look");
        found.is_some()
    };
    while has_file() {
        std::thread::yield_now();
    }
    hang.release();
    for (number, locks) in (0..).zip([&first, &second]) {
        let range = LockRange {
            first: number,
            last: number,
        };
        let wanted = wanted(number, range, LockMode::Exclusive);
        assert_eq!(acquire(locks, wanted, true), Ok(()), "host {number}");
    }
    for locks in [first, second] {
        locks.stop(LIMIT);
    }
}

/// Starts the locks of a host in a directory, and takes over what an earlier process of the host left.
fn host_in(dir: &Path, at: usize, keeping: &Arc<KeptByTest>) -> Arc<FileLocks> {
    let base = DirBacking::open(dir).expect("open");
    let lock_dir = own::must_find_dir(&base, &base.root(), DIR).expect("the directory");
    let (host, others) = HOSTS[at];
    let setup = LockSetup {
        base,
        dir: lock_dir,
        host: host.to_owned(),
        other_hosts: Box::new(move || Ok(others.map(str::to_owned).to_vec())),
        kept: keeping.copy(),
        keeping: Some(Box::new(KeepingOfTest(Arc::clone(keeping)))),
    };
    FileLocks::start(setup).expect("start")
}

/// The same comparison with hosts whose firnd is replaced again and again. The replaced firnds are dropped, not
/// stopped: a process that dies releases no lock of a file that another process has open.
#[test]
fn locks_of_three_hosts_go_on_when_a_firnd_is_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = DirBacking::open(dir.path()).expect("open");
    own::make_dir(&base, &base.root(), DIR).expect("mkdir");
    let kept: [Arc<KeptByTest>; 3] = Default::default();
    let mut hosts = [0, 1, 2].map(|at| host_in(dir.path(), at, &kept[at]));
    let mut step = 0;
    compare_with_model(&mut hosts, |hosts| {
        step += 1;
        if step % 10 == 0 {
            let at = step / 10 % HOSTS.len();
            hosts[at] = host_in(dir.path(), at, &kept[at]);
        }
    });
}

/// Takes and releases random locks of owners on three hosts, and compares with a model that has an entry for each byte
/// and owner. Calls `change` before each step.
fn compare_with_model(
    hosts: &mut [Arc<FileLocks>; 3],
    mut change: impl FnMut(&mut [Arc<FileLocks>; 3]),
) {
    const BYTES: u64 = 10;
    const OWNERS: usize = 6;
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut model = [[None; OWNERS]; BYTES as usize];
    for step in 0..1500 {
        change(hosts);
        let number = random.random_range(0..OWNERS);
        let locks = &hosts[number % hosts.len()];
        let ends = [random.random_range(0..BYTES), random.random_range(0..BYTES)];
        let range = LockRange {
            first: ends[0].min(ends[1]),
            last: ends[0].max(ends[1]),
        };
        let bytes = range.first as usize..=range.last as usize;
        let excludes = |model: &[[Option<LockMode>; OWNERS]], mode| {
            bytes.clone().any(|byte| {
                (0..OWNERS).any(|other| {
                    let held = model[byte][other];
                    let is_alone = mode == LockMode::Exclusive || held == Some(LockMode::Exclusive);
                    other != number && held.is_some() && is_alone
                })
            })
        };
        let mode = match random.random_range(0..4) {
            0 => LockMode::Exclusive,
            1 => LockMode::Shared,
            2 => {
                release(locks, ReleasedLocks::Range(number as u64, range));
                bytes.clone().for_each(|byte| model[byte][number] = None);
                continue;
            }
            _ => {
                let mode = LockMode::Exclusive;
                let found = has_conflict(locks, wanted(number as u64, range, mode));
                assert_eq!(found, excludes(&model, mode), "seed {seed}, step {step}");
                continue;
            }
        };
        let is_free = !excludes(&model, mode);
        let locked = acquire(locks, wanted(number as u64, range, mode), false);
        let expected = if is_free { Ok(()) } else { Err(Errno::AGAIN) };
        assert_eq!(locked, expected, "seed {seed}, step {step}");
        if is_free {
            bytes.for_each(|byte| model[byte][number] = Some(mode));
        }
    }
    for number in 0..OWNERS {
        release(
            &hosts[number % hosts.len()],
            ReleasedLocks::Owner(number as u64),
        );
    }
    for locks in hosts {
        locks.stop(LIMIT);
    }
}

/// Threads of two hosts increment a counter by a read and a write under a lock. A third host dies while it holds the
/// lock.
#[test]
fn a_waiting_host_gets_the_lock_whichever_host_dies() {
    const ROUNDS: u64 = 25;
    let disk = disk();
    let dying = disk.another_process();
    let hosts = [
        host(&disk, "a", &["b"]),
        host(&disk, "b", &["a"]),
        host_on(dying.clone(), "c", &["a", "b"]),
    ];
    let counter = Mutex::new(0);
    let add = || {
        let read = *counter.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::yield_now();
        *counter.lock().unwrap_or_else(PoisonError::into_inner) = read + 1;
    };
    // Host `c` has the lock at first, and dies with it.
    acquire(
        &hosts[2],
        wanted(99, LockRange::WHOLE, LockMode::Exclusive),
        true,
    )
    .expect("lock");
    std::thread::scope(|scope| {
        for (index, locks) in hosts[..2].iter().enumerate() {
            for thread in 0..2 {
                let number = (index * 2 + thread) as u64;
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let wanted = wanted(number, LockRange::WHOLE, LockMode::Exclusive);
                        acquire(locks, wanted, true).expect("lock");
                        add();
                        release(locks, ReleasedLocks::Owner(number));
                    }
                });
            }
        }
        dying.crash_at(0);
        assert_eq!(dying.attr(&dying.root()).err(), Some(Errno::IO));
    });
    assert_eq!(counter.into_inner().expect("a counter"), 4 * ROUNDS);
}

#[test]
fn an_interrupted_wait_has_no_lock_and_blocks_no_host() {
    let disk = disk();
    let (a, b) = (host(&disk, "a", &["b"]), host(&disk, "b", &["a"]));
    let whole = |number| wanted(number, LockRange::WHOLE, LockMode::Exclusive);
    acquire(&a, whole(1), true).expect("lock");
    let (here, answer_here) = begin(&a, whole(2), true);
    let (there, answer_there) = begin(&b, whole(3), true);
    assert!(a.interrupt(here) && b.interrupt(there));
    for answer in [answer_here, answer_there] {
        assert_eq!(answer.recv_timeout(LIMIT), Ok(Err(Errno::INTR)));
    }
    release(&a, ReleasedLocks::Handle(1));
    assert_eq!(acquire(&b, whole(4), true), Ok(()));
    // A request that was granted cannot be interrupted any more.
    assert!(!b.interrupt(there));
    assert_eq!(acquire(&a, whole(5), false), Err(Errno::AGAIN));
}

#[test]
fn locks_that_do_not_reach_a_host_are_refused() {
    for (reach, others) in [
        (LockReach::Host, ["b"].as_slice()),
        (LockReach::Refused(Errno::OPNOTSUPP), &[]),
    ] {
        let disk = disk();
        disk.set_lock_reach(reach);
        let (a, _b) = (host(&disk, "a", others), host(&disk, "b", &[]));
        let whole = wanted(1, LockRange::WHOLE, LockMode::Exclusive);
        for waits in [false, true] {
            assert_eq!(acquire(&a, whole, waits), Err(Errno::NOLCK), "{reach:?}");
        }
    }
    let whole = wanted(1, LockRange::WHOLE, LockMode::Exclusive);
    assert_eq!(
        acquire(&FileLocks::refused(), whole, true),
        Err(Errno::NOLCK)
    );
}

/// Locks and tests wait for a host that has its lease but has not locked its `host-NAME` file yet.
#[test]
fn a_host_that_is_starting_is_waited_for() {
    let disk = disk();
    let a = host(&disk, "a", &["b"]);
    let whole = wanted(1, LockRange::WHOLE, LockMode::Exclusive);
    let (_, locked) = begin(&a, wanted(2, LockRange::WHOLE, LockMode::Shared), false);
    let tested = begin_test(&a, whole);
    // The lock thread answers in order, so after this release it has handled both earlier requests.
    release(&a, ReleasedLocks::Owner(1));
    assert!(tested.try_recv().is_err() && locked.try_recv().is_err());
    let _b = host(&disk, "b", &["a"]);
    locked
        .recv_timeout(LIMIT)
        .expect("an answer")
        .expect("lock");
    tested
        .recv_timeout(LIMIT)
        .expect("an answer")
        .expect("test");
}

/// Lock files that a dead host left are removed by the next host; lock files that another host uses are not.
#[test]
fn lock_files_of_a_dead_host_are_removed() {
    let disk = disk();
    let dir = own::must_find_dir(&disk, &disk.root(), DIR).expect("the directory");
    for name in ["1", "1.end", "host-dead"] {
        drop(own::open_or_create(&disk, &dir, name).expect("create"));
    }
    let a = host(&disk, "a", &[]);
    acquire(&a, wanted(1, LockRange::WHOLE, LockMode::Shared), true).expect("lock");
    let b = host(&disk, "b", &["a"]);
    acquire(&b, wanted(2, LockRange::WHOLE, LockMode::Shared), true).expect("lock");
    let mut left = names(&disk);
    left.sort();
    assert_eq!(left, ["7", "host-a", "host-b"]);
}
