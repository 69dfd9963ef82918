//! Locks and appends of programs on several hosts that have one file in logs: several firnd, each on a host of its own
//! (network namespace, host name), over one shared backing, with the options that users have.
//!
//! Needs root and FUSE.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firn_tests::fsops::errno;
use firn_tests::preloaded::{Frontend, python};
use firn_tests::random::{env_count, generator};
use firn_tests::stop::StopAtEnd;
use firn_tests::{FirnMount, Sandbox, run, seed, wait_until};
use rand::RngExt;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const OPTIONS: &str = "arena-size=64M,chunk-size=4M,layout=log";
/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Hosts and the directory that they share.
struct Hosts {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
}

impl Hosts {
    fn new(name: &str) -> Self {
        let host = |at: usize| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}"));
        Self {
            shared: Sandbox::new(name),
            hosts: (0..2).map(host).collect(),
        }
    }

    fn backing(&self) -> PathBuf {
        self.shared.join("backing")
    }

    fn mount(&self, at: usize) -> FirnMount<'_> {
        FirnMount::over(&self.hosts[at], &self.backing(), OPTIONS)
    }

    fn mounts(&self) -> [FirnMount<'_>; 2] {
        [self.mount(0), self.mount(1)]
    }

    /// Lock files that exclude no other host any more go some time after they were used, and with the mounts.
    fn assert_nothing_is_left(&self) {
        let names = fs::read_dir(self.backing().join(".firn/locks")).expect("list");
        let names: Vec<_> = names
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        assert!(names.is_empty(), "{names:?}");
    }
}

fn umount<'a>(mounts: impl IntoIterator<Item = FirnMount<'a>>) {
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

fn open(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).expect("open")
}

fn open_to_append(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

/// A line that names its writer, of one of several lengths.
fn line(host: usize, number: u64) -> Vec<u8> {
    let width = [8, 300, 5000][number as usize % 3];
    let mut line = format!("{host} {number:0width$}").into_bytes();
    line.push(b'\n');
    line
}

/// The numbers of each host's lines, in the order in which they stand in the file; each must be whole.
#[track_caller]
fn numbers_of(bytes: &[u8]) -> [Vec<u64>; 2] {
    let mut numbers = [Vec::new(), Vec::new()];
    for text in bytes.split_inclusive(|&byte| byte == b'\n') {
        let host = usize::from(text[0].wrapping_sub(b'0'));
        let digits = std::str::from_utf8(&text[2..text.len() - 1]).expect("digits");
        let number = digits.parse().expect("a number");
        assert_eq!(text, line(host, number), "a line is not whole");
        numbers[host].push(number);
    }
    numbers
}

/// Proves S-log-43.
#[test]
fn lines_that_two_hosts_append_are_all_there_and_whole() {
    const LINES: u64 = 60;
    let cluster = Hosts::new("append");
    let mounts = cluster.mounts();
    std::thread::scope(|scope| {
        for (host, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                let kept = open_to_append(&mount.join("lines")).expect("open");
                for number in 0..LINES {
                    let anew = open_to_append(&mount.join("lines")).expect("open");
                    let mut file = if number % 2 == 0 { &kept } else { &anew };
                    file.write_all(&line(host, number)).expect("append");
                }
            });
        }
    });
    let all: Vec<u64> = (0..LINES).collect();
    for mount in &mounts {
        let bytes = fs::read(mount.join("lines")).expect("read");
        assert_eq!(numbers_of(&bytes), [all.clone(), all.clone()]);
    }
    // The position is behind what was appended last, by any host.
    let mut first = open_to_append(&mounts[0].join("lines")).expect("open");
    let mut second = open_to_append(&mounts[1].join("lines")).expect("open");
    first.write_all(&line(0, LINES)).expect("append");
    second.write_all(&line(1, LINES)).expect("append");
    first.write_all(&line(0, LINES + 1)).expect("append");
    let len = first.metadata().expect("stat").len();
    assert_eq!(first.seek(SeekFrom::End(0)).expect("seek"), len);
    drop((first, second));
    umount(mounts);
    let bytes = fs::read(cluster.backing().join("lines")).expect("read");
    let numbers = numbers_of(&bytes);
    assert_eq!(
        [numbers[0].len(), numbers[1].len()].map(|len| len as u64),
        [LINES + 2, LINES + 1]
    );
    assert_eq!(bytes.len() as u64, len);
    cluster.assert_nothing_is_left();
}

/// Proves S-log-43: also when firnd of one of them is killed, again and again.
#[test]
fn lines_that_were_appended_survive_kills_of_a_host() {
    const KILLS: usize = 4;
    let cluster = Hosts::new("append-kill");
    let steady = cluster.mount(0);
    let is_over = AtomicBool::new(false);
    let acknowledged: [AtomicU64; 2] = Default::default();
    let append = |host: usize, path: &Path| -> bool {
        let number = acknowledged[host].load(Ordering::Acquire);
        let appended = open_to_append(path).and_then(|mut file| {
            let line = line(host, number);
            // One call, of which nothing is known if it fails.
            assert_eq!(file.write(&line)?, line.len());
            Ok(())
        });
        // A number that was not acknowledged is not used again: its line may be there.
        acknowledged[host].store(number + 1, Ordering::Release);
        appended.is_ok()
    };
    let mut lost = Vec::new();
    std::thread::scope(|scope| {
        let _ended = StopAtEnd(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                assert!(append(0, &steady.join("lines")), "the host that lives");
            }
        });
        for _ in 0..KILLS {
            let dying = cluster.mount(1);
            let path = dying.join("lines");
            let before = acknowledged[1].load(Ordering::Acquire);
            let writer = scope.spawn({
                let append = &append;
                let acknowledged = &acknowledged;
                move || {
                    while append(1, &path) {}
                    acknowledged[1].load(Ordering::Acquire) - 1
                }
            });
            wait_until("some lines are appended", LIMIT, || {
                acknowledged[1].load(Ordering::Acquire) > before + 5
            });
            dying.kill();
            lost.push(writer.join().expect("a writer"));
        }
    });
    let back = cluster.mount(1);
    let found = fs::read(back.join("lines")).expect("read");
    let numbers = numbers_of(&found);
    for (host, numbers) in numbers.iter().enumerate() {
        let all = 0..acknowledged[host].load(Ordering::Acquire);
        let expected: Vec<u64> = all
            .filter(|number| host == 0 || !lost.contains(number) || numbers.contains(number))
            .collect();
        assert_eq!(*numbers, expected, "host {host}");
    }
    umount([back, steady]);
    let plain = fs::read(cluster.backing().join("lines")).expect("read");
    assert_eq!(plain, found);
    cluster.assert_nothing_is_left();
}

/// Appends lines, and tries each kind of lock.
const APPEND_AND_LOCK: &str = "
import errno, fcntl, os, sys
path = sys.argv[1] + '/lines'
for number in range(int(sys.argv[2])):
    line = b'%d %0*d\\n' % (1, (8, 300, 5000)[number % 3], number)
    with open(path, 'ab', 0) as file:
        assert file.write(line) == len(line)
with open(path, 'r+') as file:
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(file, fcntl.LOCK_EX)
        except OSError as error:
            print(errno.errorcode[error.errno])
        lock(file, fcntl.LOCK_UN)
";

/// Proves S-log-43, S-log-44: in a stub tree, where the kernel would keep locks on the host.
#[test]
fn in_a_stub_tree_lines_are_appended_for_all_hosts_and_locks_refused() {
    const LINES: u64 = 40;
    let cluster = Hosts::new("append-stub");
    let mount = cluster.mount(0);
    drop(open_to_append(&mount.join("lines")).expect("create"));
    let options = format!("{OPTIONS},frontend=preload");
    let tree = FirnMount::over(&cluster.hosts[1], &cluster.backing(), &options);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..LINES {
                let mut file = open_to_append(&mount.join("lines")).expect("open");
                file.write_all(&line(0, number)).expect("append");
            }
        });
        let mut append = python(APPEND_AND_LOCK, tree.path());
        append.arg(LINES.to_string());
        let said = run(Frontend::Tree.preload(&cluster.hosts[1], &mut append)).ok();
        assert_eq!(said.stdout, "ENOLCK\nENOLCK\n");
    });
    let all: Vec<u64> = (0..LINES).collect();
    let bytes = fs::read(mount.join("lines")).expect("read");
    assert_eq!(numbers_of(&bytes), [all.clone(), all]);
    umount([mount, tree]);
    let plain = fs::read(cluster.backing().join("lines")).expect("read");
    assert_eq!(plain, bytes);
    cluster.assert_nothing_is_left();
}

/// fcntl(2) with a lock of the file description.
fn lock_range(file: &File, kind: i32, range: (i64, i64), waits: bool) -> io::Result<()> {
    let command = if waits {
        libc::F_OFD_SETLKW
    } else {
        libc::F_OFD_SETLK
    };
    fcntl(file, command, kind, range).map(drop)
}

fn fcntl(
    file: &File,
    command: i32,
    kind: i32,
    (start, len): (i64, i64),
) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: these commands read and write one `flock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

const WHOLE: (i64, i64) = (0, 0);

#[track_caller]
fn assert_refused(outcome: io::Result<()>) {
    let error = outcome.expect_err("somebody else has it");
    assert_eq!(errno(&error), Errno::AGAIN);
}

/// Adds to a number that the file has, as two steps.
fn count(file: &File) {
    let mut digits = [0; 8];
    file.read_exact_at(&mut digits, 0).expect("read");
    let number: u64 = std::str::from_utf8(&digits)
        .expect("digits")
        .parse()
        .expect("a number");
    let next = format!("{:08}", number + 1);
    file.write_all_at(next.as_bytes(), 0).expect("write");
}

/// Proves S-log-44: the holder of a lock sees what the last one wrote, on whatever host.
#[test]
fn a_counter_under_a_lock_counts_each_host() {
    const ROUNDS: u64 = 20;
    const THREADS: u64 = 2;
    let cluster = Hosts::new("counter");
    let mounts = cluster.mounts();
    for (name, locks) in [("fcntl", true), ("flock", false)] {
        fs::write(mounts[0].join(name), "00000000").expect("write");
        std::thread::scope(|scope| {
            for mount in &mounts {
                for _ in 0..THREADS {
                    scope.spawn(move || {
                        let file = open(&mount.join(name));
                        for _ in 0..ROUNDS {
                            if locks {
                                lock_range(&file, libc::F_WRLCK, WHOLE, true).expect("lock");
                                count(&file);
                                lock_range(&file, libc::F_UNLCK, WHOLE, true).expect("unlock");
                            } else {
                                flock(&file, FlockOperation::LockExclusive).expect("lock");
                                count(&file);
                                flock(&file, FlockOperation::Unlock).expect("unlock");
                            }
                        }
                    });
                }
            }
        });
        let expected = format!("{:08}", 2 * THREADS * ROUNDS);
        for mount in &mounts {
            assert_eq!(
                fs::read_to_string(mount.join(name)).expect("read"),
                expected
            );
        }
    }
    umount(mounts);
    cluster.assert_nothing_is_left();
}

/// Proves S-log-44.
#[test]
fn ranges_that_are_locked_on_one_host_are_locked_on_the_other() {
    let cluster = Hosts::new("ranges");
    let mounts = cluster.mounts();
    let [here, there] = [&mounts[0], &mounts[1]].map(|mount| open(&mount.join("file")));
    let (read, write, none) = (libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK);
    lock_range(&here, write, (10, 10), false).expect("lock");
    assert_refused(lock_range(&there, read, (19, 1), false));
    lock_range(&there, write, (20, 0), false).expect("lock");
    lock_range(&there, write, (0, 10), false).expect("lock");
    assert_refused(lock_range(&here, write, (9, 2), false));
    let found = fcntl(&there, libc::F_OFD_GETLK, read, WHOLE).expect("getlk");
    assert_eq!(i32::from(found.l_type), write);
    // Shared by both, and exclusive for neither.
    lock_range(&here, read, (10, 10), false).expect("lock");
    lock_range(&there, read, (10, 10), false).expect("lock");
    assert_refused(lock_range(&here, write, (12, 1), false));
    lock_range(&there, none, WHOLE, false).expect("unlock");
    lock_range(&here, write, (12, 1), false).expect("lock");
    // Locks of flock(2) are others.
    flock(&there, FlockOperation::NonBlockingLockExclusive).expect("lock");
    let refused = flock(&here, FlockOperation::NonBlockingLockShared);
    assert_eq!(refused, Err(Errno::WOULDBLOCK));
    // They end with the last descriptor of the open file.
    let again = there.try_clone().expect("dup");
    drop(there);
    let refused = flock(&here, FlockOperation::NonBlockingLockShared);
    assert_eq!(refused, Err(Errno::WOULDBLOCK));
    drop(again);
    wait_until("the lock is free", LIMIT, || {
        flock(&here, FlockOperation::NonBlockingLockShared).is_ok()
    });
    // Those of a process end with its first close.
    let other = open(&mounts[1].join("file"));
    fcntl(&other, libc::F_SETLK, write, (100, 1)).expect("lock");
    assert_refused(lock_range(&here, write, (100, 1), false));
    drop(open(&mounts[1].join("file")));
    lock_range(&here, write, (100, 1), false).expect("lock");
    drop((here, other));
    umount(mounts);
    cluster.assert_nothing_is_left();
}

/// Proves S-log-44: the locks of a host that dies are free.
#[test]
fn locks_of_a_host_that_is_killed_are_free() {
    let cluster = Hosts::new("lock-kill");
    let [dying, mount] = cluster.mounts();
    let (held, file) = (open(&dying.join("file")), open(&mount.join("file")));
    lock_range(&held, libc::F_WRLCK, WHOLE, true).expect("lock");
    flock(&held, FlockOperation::LockExclusive).expect("lock");
    assert_refused(lock_range(&file, libc::F_RDLCK, WHOLE, false));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            lock_range(&file, libc::F_WRLCK, WHOLE, true).expect("lock");
            flock(&file, FlockOperation::LockExclusive).expect("lock");
        });
        dying.kill();
        waiting.join().expect("a lock");
    });
    drop((held, file));
    umount([mount, cluster.mount(0)]);
    cluster.assert_nothing_is_left();
}

/// Proves S-log-44, S-crash-11: firnd dies on one host, and programs of no host notice, also while no firnd is there.
#[test]
fn locks_go_on_while_firnd_is_killed() {
    let cluster = Hosts::new("lock-on");
    let [mut mount, other] = cluster.mounts();
    let (read, write, none) = (libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK);
    let [here, there] = [&mount, &other].map(|mount| open(&mount.join("file")));
    let [shared_here, shared_there] = [&mount, &other].map(|mount| open(&mount.join("shared")));
    lock_range(&here, write, (10, 10), false).expect("lock");
    flock(&here, FlockOperation::LockExclusive).expect("lock");
    for shared in [&shared_here, &shared_there] {
        lock_range(shared, read, (5, 5), false).expect("lock");
    }
    let assert_held = || {
        assert_refused(lock_range(&there, read, (19, 1), false));
        lock_range(&there, write, (20, 0), false).expect("what is free stays free");
        let refused = flock(&there, FlockOperation::NonBlockingLockShared);
        assert_eq!(refused, Err(Errno::WOULDBLOCK));
        assert_refused(lock_range(&shared_there, write, (5, 1), false));
    };
    for _ in 0..3 {
        let keeper = mount.kill_under_stopped_keeper();
        assert_held();
        mount.continue_keeper(keeper);
        assert_held();
        // The owner's locks are its own as before, and one host's programs exclude each other.
        lock_range(&here, write, (12, 4), false).expect("lock");
        let beside = open(&mount.join("file"));
        assert_refused(lock_range(&beside, read, (10, 1), false));
    }
    // Waiting requests go on: one gets its lock from the other host, and one is killed.
    lock_range(&there, write, (40, 10), false).expect("lock");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| lock_range(&here, write, (45, 1), true));
        let mut killed = waiter(&mount);
        mount.kill_and_go_on();
        killed.kill().expect("kill");
        wait_until("it is gone", LIMIT, || {
            killed.try_wait().expect("wait").is_some()
        });
        assert!(!waiting.is_finished(), "the lock is not free yet");
        lock_range(&there, none, (40, 10), false).expect("unlock");
        waiting.join().expect("a thread").expect("lock");
    });
    assert_refused(lock_range(&there, read, (45, 1), false));
    // A part of it is released, and firnd dies again.
    lock_range(&here, none, (14, 2), false).expect("unlock");
    mount.kill_and_go_on();
    lock_range(&there, write, (14, 2), false).expect("lock");
    assert_refused(lock_range(&there, write, (13, 1), false));
    assert_refused(lock_range(&there, write, (16, 1), false));
    assert_eq!(mount.status().lost_open_files, 0);
    drop((here, shared_here));
    lock_range(&there, write, WHOLE, true).expect("lock");
    flock(&there, FlockOperation::LockExclusive).expect("lock");
    lock_range(&shared_there, write, WHOLE, true).expect("lock");
    drop((there, shared_there));
    umount([mount, other]);
    cluster.assert_nothing_is_left();
}

/// Writes to a file, takes its name away, and reads it when the input ends.
const NAMELESS: &str = "
import os, sys
with open(sys.argv[1], 'r+b', buffering=0) as file:
    file.write(bytes([9]) * 50_000)
    os.fsync(file)
    os.unlink(sys.argv[1])
    print('unlinked', flush=True)
    sys.stdin.read()
    file.seek(0)
    found = file.read()
    print(found.count(9), found.count(7), flush=True)
    file.write(b'on')
";

/// While no firnd is there, another host does not take this one for dead: it leaves the logs of its open files alone.
///
/// Proves S-crash-11, S-log-35.
#[test]
fn regression_a_host_counts_as_alive_while_its_firnd_is_replaced() {
    let cluster = Hosts::new("pause");
    let mut mount = cluster.mount(0);
    let file = mount.join("file");
    fs::write(&file, [7; 100_000]).expect("write");
    // The children of this process would wait for the firnd that is not there, if this process had the file open.
    let mut program = Command::new("python3")
        .args(["-c", NAMELESS])
        .arg(&file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let mut answers = BufReader::new(program.stdout.take().expect("piped"));
    let mut answer = || {
        let mut line = String::new();
        answers.read_line(&mut line).expect("an answer");
        line.trim().to_owned()
    };
    assert_eq!(answer(), "unlinked");
    let keeper = mount.kill_under_stopped_keeper();
    // The mount looks for what dead hosts have left, and its end does so again.
    let other = cluster.mount(1);
    fs::write(other.join("other"), "there").expect("write");
    other.umount();
    mount.continue_keeper(keeper);
    drop(program.stdin.take());
    assert_eq!(answer(), "50000 50000");
    assert!(program.wait().expect("wait").success());
    // The lease ends with the mount: the next one begins at once.
    umount([mount]);
    umount([cluster.mount(0)]);
    cluster.assert_nothing_is_left();
}

/// Proves S-crash-11, S-crash-12, S-log-43: each line is there once, in its writer's order, and no append fails.
#[test]
fn lines_are_appended_once_while_firnd_is_killed() {
    let kills = env_count("FIRN_TAKEOVER_KILLS", 6);
    let seed = seed("appends under kills");
    let mut rng = generator(seed);
    let cluster = Hosts::new("append-on");
    let mut mounts = cluster.mounts();
    let paths = [0, 1].map(|host| mounts[host].join("lines"));
    let is_over = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let _ended = StopAtEnd(&is_over);
        let writers = [0, 1].map(|host| {
            let (path, is_over) = (&paths[host], &is_over);
            scope.spawn(move || {
                let kept = open_to_append(path).expect("open");
                let mut number = 0;
                while !is_over.load(Ordering::Acquire) {
                    let anew = open_to_append(path).expect("open");
                    let mut file = if number % 2 == 0 { &kept } else { &anew };
                    file.write_all(&line(host, number)).expect("append");
                    number += 1;
                }
                number
            })
        });
        for _ in 0..kills {
            // The random moment is the point of the test, not a wait for a condition.
            std::thread::sleep(Duration::from_millis(rng.random_range(250..600)));
            let host = rng.random_range(0..2);
            mounts[host].note_progress();
            mounts[host].kill_and_go_on();
        }
        is_over.store(true, Ordering::Release);
        writers.map(|writer| writer.join().expect("a writer"))
    });
    let all = counts.map(|count| (0..count).collect::<Vec<u64>>());
    for path in &paths {
        assert_eq!(numbers_of(&fs::read(path).expect("read")), all);
    }
    println!("{kills} kills, {counts:?} lines");
    umount(mounts);
    let plain = fs::read(cluster.backing().join("lines")).expect("read");
    assert_eq!(numbers_of(&plain), all);
    cluster.assert_nothing_is_left();
}

/// Waits for a lock until it is killed.
fn waiter(mount: &FirnMount<'_>) -> Child {
    let mut command = Command::new("flock");
    command.arg(mount.join("file")).args(["echo", "locked"]);
    let child = command.stdout(Stdio::piped()).spawn().expect("flock");
    let wchan = format!("/proc/{}/wchan", child.id());
    wait_until("it waits for the lock", LIMIT, || {
        fs::read_to_string(&wchan).is_ok_and(|name| name.contains("request_wait_answer"))
    });
    child
}

/// Waits for a lock until an alarm, as programs do that wait for a limited time.
const WITH_ALARM: &str = "
import fcntl, signal, sys
class Late(Exception): pass
def ring(*_): raise Late
signal.signal(signal.SIGALRM, ring)
file = open(sys.argv[1], 'r+')
for wait in (fcntl.flock, fcntl.lockf):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        wait(file, fcntl.LOCK_EX)
    except Late:
        print('late')
";

/// Proves S-log-45.
#[test]
fn a_wait_for_a_lock_ends_with_an_alarm() {
    let cluster = Hosts::new("lock-alarm");
    let mounts = cluster.mounts();
    let held = open(&mounts[0].join("file"));
    flock(&held, FlockOperation::LockExclusive).expect("lock");
    lock_range(&held, libc::F_WRLCK, WHOLE, true).expect("lock");
    for mount in &mounts {
        let mut command = Command::new("python3");
        command.args(["-c", WITH_ALARM]).arg(mount.join("file"));
        assert_eq!(run(&mut command).ok().stdout, "late\nlate\n");
    }
    // Nothing of it is left in the way.
    flock(&held, FlockOperation::Unlock).expect("unlock");
    lock_range(&held, libc::F_UNLCK, WHOLE, true).expect("unlock");
    let there = open(&mounts[1].join("file"));
    flock(&there, FlockOperation::NonBlockingLockExclusive).expect("lock");
    lock_range(&there, libc::F_WRLCK, WHOLE, false).expect("lock");
    drop((held, there));
    umount(mounts);
    cluster.assert_nothing_is_left();
}

/// Proves S-log-45: a waiting program is killed by a signal, and holds nothing then.
#[test]
fn who_waits_for_a_lock_is_killed_by_a_signal() {
    let cluster = Hosts::new("lock-wait");
    let mounts = cluster.mounts();
    let held = open(&mounts[0].join("file"));
    flock(&held, FlockOperation::LockExclusive).expect("lock");
    for mount in &mounts {
        let mut waiting = waiter(mount);
        waiting.kill().expect("kill");
        wait_until("it is gone", LIMIT, || {
            waiting.try_wait().expect("wait").is_some()
        });
    }
    let mut last = waiter(&mounts[1]);
    flock(&held, FlockOperation::Unlock).expect("unlock");
    assert!(last.wait().expect("wait").success());
    let mut said = String::new();
    last.stdout
        .take()
        .expect("its output")
        .read_to_string(&mut said)
        .expect("read");
    assert_eq!(said, "locked\n");
    drop(held);
    umount(mounts);
    cluster.assert_nothing_is_left();
}
