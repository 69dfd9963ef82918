//! Hosts that give a lane one writer among them (`tokens=flock|etcd`): several real firnd, each under a host name of
//! its own, over one backing that records which host writes when.
//!
//! Needs root, FUSE and etcd (`scripts/setup` installs it).

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use firn_protocol::{TokenState, TokenStatus};
use firn_testfs::BackgroundSession;
use firn_testfs::trace::{Event, HeldBack, Trace};
use firn_tests::etcd::{Cable, Etcd};
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::{SMALL, mount_args};
use firn_tests::sandbox::kill;
use firn_tests::{FirnMount, Outcome, Sandbox, run, wait_until};

/// Nothing here takes this long; only a hang does.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// Hosts wait for their turns and never give up.
const PATIENT: &str = "token-hold=50ms,token-wait=10min";
/// Hosts give up soon.
const HASTY: &str = "token-hold=50ms,token-wait=300ms";
/// Rounds of a test in which a machine that stands still for the time of a lease spoils one.
const ROUNDS_MAX: usize = 5;
const FILE_BYTES: usize = 3 << 20;

/// Hosts, and the backing that they share.
struct Hosts {
    hosts: Vec<Sandbox>,
    trace: Trace,
    backing: PathBuf,
    _session: BackgroundSession,
    shared: Sandbox,
}

impl Hosts {
    fn new(name: &str, count: usize) -> Self {
        let shared = Sandbox::new(name);
        let trace = Trace::new(Duration::from_millis(1));
        let backing = shared.mkdir("traced");
        let session = trace
            .serve(&shared.join("backing"), &backing)
            .expect("serve the backing");
        let hosts = (0..count).map(|at| Sandbox::new(&format!("{name}{at}")));
        Self {
            hosts: hosts.collect(),
            trace,
            backing,
            _session: session,
            shared,
        }
    }

    fn options(at: usize, more: &str) -> String {
        format!("{SMALL},io-threads=2,host=n{at},{more}")
    }

    fn mount(&self, at: usize, more: &str) -> FirnMount<'_> {
        FirnMount::over(&self.hosts[at], &self.backing, &Self::options(at, more))
    }

    fn mounts(&self, more: &str) -> Vec<FirnMount<'_>> {
        (0..self.hosts.len())
            .map(|at| self.mount(at, more))
            .collect()
    }

    /// The file as it is behind the server.
    fn source(&self, name: &str) -> PathBuf {
        self.shared.join("backing").join(name)
    }

    /// Makes a file whose writes the server holds back.
    fn hold_writes_of(&self, name: &str) -> HeldBack {
        fs::write(self.source(name), "").expect("make the file");
        let file = fs::metadata(self.source(name)).expect("stat").ino();
        self.trace.hold(file)
    }

    fn check_contents(&self, at: usize, names: &[String]) {
        for name in names {
            let found = fs::read(self.source(name)).expect("read");
            assert!(found == contents(at), "{name} is not what host {at} wrote");
        }
    }
}

fn contents(at: usize) -> Vec<u8> {
    vec![b'0' + at as u8; FILE_BYTES]
}

fn token(mount: &FirnMount<'_>) -> TokenStatus {
    let lane = mount.status().lanes.remove(0);
    lane.token.expect("the lane has a token")
}

/// Each host writes some files at once, and closes them, which waits for their drain.
fn write_together(mounts: &[FirnMount<'_>], files: usize) -> Vec<Vec<String>> {
    let names = |at: usize| {
        (0..files)
            .map(move |file| format!("rank_{at}_{file}"))
            .collect()
    };
    let names: Vec<Vec<String>> = (0..mounts.len()).map(names).collect();
    std::thread::scope(|scope| {
        for (at, mount) in mounts.iter().enumerate() {
            let names = &names[at];
            scope.spawn(move || {
                for name in names {
                    fs::write(mount.join(name), contents(at)).expect("write");
                }
            });
        }
    });
    names
}

/// Host `at` writes a file; what came of it. A process of its own does, as each process that this one starts would have
/// its descriptors until execve(2), which closes them: that would wait for the drain of the file.
fn begin_to_write<'scope>(
    scope: &'scope Scope<'scope, '_>,
    hosts: &Hosts,
    mount: &FirnMount<'_>,
    name: &str,
    at: usize,
) -> ScopedJoinHandle<'scope, Outcome> {
    let source = hosts.shared.join(format!("contents-{at}"));
    fs::write(&source, contents(at)).expect("write the contents");
    let target = mount.join(name);
    scope.spawn(move || run(Command::new("cp").args([source, target])))
}

/// How many batches there were; panics where writes of two hosts overlap.
fn count_batches(hosts: &Hosts, names: &[Vec<String>]) -> usize {
    let mut host_of = HashMap::new();
    for (at, name) in names
        .iter()
        .enumerate()
        .flat_map(|(at, names)| names.iter().map(move |name| (at, name)))
    {
        host_of.insert(fs::metadata(hosts.source(name)).expect("stat").ino(), at);
    }
    let mut batches = 0;
    let mut writer = None;
    let mut under_way = 0_usize;
    for Event { file, begins } in hosts.trace.events() {
        // Files of Firn's own are no file of a host.
        let Some(host) = host_of.get(&file) else {
            continue;
        };
        if begins {
            if writer != Some(*host) {
                assert_eq!(
                    under_way, 0,
                    "hosts {writer:?} and {host} write at the same time"
                );
                writer = Some(*host);
                batches += 1;
            }
            under_way += 1;
        } else {
            under_way -= 1;
        }
    }
    batches
}

/// Whether a host has lost its token: it may after its lease, if the machine stood still for that long.
fn has_lost(mounts: &[FirnMount<'_>]) -> bool {
    let is_lost = |mount| token(mount).errors > 0;
    mounts.iter().any(is_lost)
}

fn one_writes_at_a_time(name: &str, count: usize, more: &str) {
    let is_over = |_| one_writes_at_a_time_in_a_round(name, count, more);
    assert!(
        (0..ROUNDS_MAX).any(is_over),
        "each time a lease ended too early"
    );
}

/// False: a lease ended too early.
fn one_writes_at_a_time_in_a_round(name: &str, count: usize, more: &str) -> bool {
    let hosts = Hosts::new(name, count);
    let mounts = hosts.mounts(more);
    let names = write_together(&mounts, 4);
    for (at, mount) in mounts.iter().enumerate() {
        let token = token(mount);
        assert!(token.granted > 0 && token.went_without == 0, "{token:?}");
        hosts.check_contents(at, &names[at]);
    }
    let has_lost = has_lost(&mounts);
    if !has_lost {
        let batches = count_batches(&hosts, &names);
        println!("{count} hosts wrote in {batches} batches");
        assert!(batches >= count);
    }
    for mount in mounts {
        mount.umount();
    }
    !has_lost
}

/// Proves S-token-1.
#[test]
fn eight_hosts_with_locks_in_the_backing_write_one_at_a_time() {
    one_writes_at_a_time("flock8", 8, &format!("tokens=flock,{PATIENT}"));
}

/// Proves S-token-1.
#[test]
fn four_hosts_with_etcd_write_one_at_a_time() {
    let etcd = Etcd::start();
    let more = format!("tokens=etcd,token-endpoints={},{PATIENT}", etcd.endpoint());
    one_writes_at_a_time("etcd4", 4, &more);
}

/// Host 0 is killed while it writes with the token, and host 1 waits for it.
fn holder_is_killed(name: &str, more: &str) {
    let is_over = |_| holder_is_killed_in_a_round(name, more);
    assert!(
        (0..ROUNDS_MAX).any(is_over),
        "each time a lease ended too early"
    );
}

/// False: the lease of the holder ended before it was killed.
fn holder_is_killed_in_a_round(name: &str, more: &str) -> bool {
    let hosts = Hosts::new(name, 2);
    let mut mounts = hosts.mounts(more);
    let is_in_time = std::thread::scope(|scope| {
        let held_back = hosts.hold_writes_of("held");
        let held = begin_to_write(scope, &hosts, &mounts[0], "held", 0);
        wait_until("host 0 writes", HANGS_AFTER, || {
            hosts.trace.held_count() > 0
        });
        let next = begin_to_write(scope, &hosts, &mounts[1], "next", 1);
        let mut is_waiting = false;
        wait_until("host 1 waits for host 0", HANGS_AFTER, || {
            let token = token(&mounts[1]);
            is_waiting =
                token.state == TokenState::Waiting && token.holder.as_deref() == Some("n0");
            is_waiting || next.is_finished()
        });
        let killed = Instant::now();
        kill(mounts[0].pid(), libc::SIGKILL);
        // A process that waits for an answer of a FUSE server does not end before it.
        drop(held_back);
        next.join().expect("a thread").ok();
        println!(
            "{name}: the next host had written {:?} after kill -9 of the holder",
            killed.elapsed()
        );
        mounts.remove(0).kill();
        let _ = held.join().expect("a thread");
        is_waiting
    });
    let token = token(&mounts[0]);
    assert!(token.granted > 0 && token.went_without == 0, "{token:?}");
    hosts.check_contents(1, &["next".into()]);
    // What the dead host held is drained by its next mount.
    let back = hosts.mount(0, more);
    back.umount();
    let left = fs::read(hosts.source("held")).expect("read");
    assert!(!left.is_empty() && left.iter().all(|byte| *byte == b'0'));
    mounts.remove(0).umount();
    is_in_time
}

/// Proves S-token-3.
#[test]
fn a_holder_that_is_killed_leaves_its_lock_to_the_next_host() {
    holder_is_killed("flock", &format!("tokens=flock,{PATIENT}"));
}

/// Proves S-token-3.
#[test]
fn a_holder_that_is_killed_costs_its_lease_in_etcd() {
    let etcd = Etcd::start();
    let more = format!("tokens=etcd,token-endpoints={},{PATIENT}", etcd.endpoint());
    holder_is_killed("etcd", &more);
}

/// Two hosts write while `fail` was done to etcd, and again after `heal`.
fn without_etcd(name: &str, fail: impl Fn(&mut Etcd, &Cable), heal: impl Fn(&mut Etcd, &Cable)) {
    let mut etcd = Etcd::start();
    let cable = Cable::to(&etcd.endpoint());
    let hosts = Hosts::new(name, 2);
    let mounts = hosts.mounts(&format!(
        "tokens=etcd,token-endpoints={},{HASTY}",
        cable.endpoint()
    ));
    let names = write_together(&mounts, 1);
    fail(&mut etcd, &cable);
    let names_without = write_together(&mounts, 3);
    for (at, mount) in mounts.iter().enumerate() {
        hosts.check_contents(at, &names[at]);
        hosts.check_contents(at, &names_without[at]);
        // What was written at once may have been written with the last token.
        wait_until("the host goes without", HANGS_AFTER, || {
            fs::write(mount.join("without"), "without").expect("write");
            token(mount).went_without > 0
        });
        assert_eq!(mount.status().held_bytes, 0);
    }
    heal(&mut etcd, &cable);
    for mount in &mounts {
        let before = token(mount).granted;
        wait_until("the token is granted again", HANGS_AFTER, || {
            fs::write(mount.join("again"), "again").expect("write");
            token(mount).granted > before
        });
    }
    fail(&mut etcd, &cable);
    for mount in mounts {
        mount.umount();
    }
    heal(&mut etcd, &cable);
}

/// Proves S-token-2.
#[test]
fn with_etcd_stopped_or_cut_off_or_dead_hosts_go_on_and_lose_nothing() {
    without_etcd("stalled", |etcd, _| etcd.stall(), |etcd, _| etcd.go_on());
    without_etcd("cut", |_, cable| cable.cut(), |_, cable| cable.mend());
    without_etcd("dead", |etcd, _| etcd.kill(), |etcd, _| etcd.restart());
}

/// Proves S-token-3.
#[test]
fn a_holder_that_is_cut_off_loses_its_token_and_no_byte() {
    let etcd = Etcd::start();
    let cable = Cable::to(&etcd.endpoint());
    let hosts = Hosts::new("cutoff", 2);
    let through = |endpoint: String| format!("tokens=etcd,token-endpoints={endpoint},{PATIENT}");
    let cut_off = hosts.mount(0, &through(cable.endpoint()));
    let other = hosts.mount(1, &through(etcd.endpoint()));
    std::thread::scope(|scope| {
        let held_back = hosts.hold_writes_of("held");
        let held = begin_to_write(scope, &hosts, &cut_off, "held", 0);
        wait_until("host 0 writes", HANGS_AFTER, || {
            hosts.trace.held_count() > 0
        });
        cable.cut();
        fs::write(other.join("other"), contents(1)).expect("the other host goes on");
        assert_eq!(token(&other).went_without, 0);
        wait_until("host 0 knows", HANGS_AFTER, || {
            token(&cut_off).state != TokenState::Held
        });
        cable.mend();
        drop(held_back);
        held.join().expect("a thread").ok();
    });
    hosts.check_contents(0, &["held".into()]);
    hosts.check_contents(1, &["other".into()]);
    cut_off.umount();
    other.umount();
}

/// Proves S-token-2.
#[test]
fn a_host_that_is_stuck_keeps_no_other_from_writing_or_unmounting() {
    let hosts = Hosts::new("stuck", 2);
    let mut mounts = hosts.mounts(&format!("tokens=flock,{HASTY}"));
    std::thread::scope(|scope| {
        let held_back = hosts.hold_writes_of("held");
        let held = begin_to_write(scope, &hosts, &mounts[0], "held", 0);
        wait_until("host 0 writes", HANGS_AFTER, || {
            hosts.trace.held_count() > 0
        });
        // It gives its token back in the end; stopped, it cannot.
        kill(mounts[0].pid(), libc::SIGSTOP);
        fs::write(mounts[1].join("next"), contents(1)).expect("write");
        let token = token(&mounts[1]);
        assert!(token.went_without > 0, "{token:?}");
        mounts.remove(1).umount();
        kill(mounts[0].pid(), libc::SIGCONT);
        drop(held_back);
        held.join().expect("a thread").ok();
    });
    hosts.check_contents(1, &["next".into()]);
    hosts.check_contents(0, &["held".into()]);
    mounts.remove(0).umount();
}

/// Proves S-token-4: two servers over one directory whose kernel keeps locks for each mount by itself.
#[test]
fn locks_that_do_not_reach_other_hosts_are_refused_with_the_reason() {
    let shared = Sandbox::new("tokenreach");
    let hosts = [0, 1].map(|at| Sandbox::new(&format!("tokenreach{at}")));
    let servers = [0, 1].map(|at| FaultFs::of(&hosts[at], shared.join("backing")));
    let options = |at| Hosts::options(at, &format!("tokens=flock,{PATIENT}"));
    let first = FirnMount::over(&hosts[0], servers[0].path(), &options(0));
    let point = hosts[1].mkdir("second");
    let refused =
        |options: &str| run(&mut hosts[1].firn(mount_args(servers[1].path(), &point, options)));
    refused(&options(1))
        .code(2)
        .says("n0 is alive, and its lock does not keep this host out")
        .says("tokens=etcd");
    first.umount();
}

/// Proves S-token-4.
#[test]
fn mistakes_in_the_options_are_told_and_a_service_that_is_not_there_is_no_obstacle() {
    let hosts = Hosts::new("mistakes", 2);
    let point = hosts.hosts[1].join("mnt");
    let mount =
        |options: &str| run(&mut hosts.hosts[1].firn(mount_args(&hosts.backing, &point, options)));
    for (options, why) in [
        ("tokens=etcd", "token-endpoints=HOST:PORT"),
        (
            "tokens=etcd,token-endpoints=https://127.0.0.1:2379",
            "HTTPS",
        ),
        ("tokens=etcd,token-endpoints=etcd", "HOST:PORT"),
        ("tokens=flock,token-endpoints=127.0.0.1:2379", "tokens=etcd"),
        ("tokens=flock,token-group=a", "tokens=etcd"),
        ("tokens=redis", "`flock`"),
        (
            "tokens=flock,token-hold=2s,token-wait=3s",
            "lower token-hold",
        ),
        ("tokens=flock,token-hold=1ms", "out of range"),
    ] {
        mount(options).code(2).says(why);
    }
    let first = hosts.mount(0, &format!("tokens=flock,{PATIENT}"));
    mount(&Hosts::options(0, "tokens=flock"))
        .code(11)
        .says("host n0 has");
    first.umount();
    planted_directory_is_refused(&hosts, &mount);
    // A port without a listener.
    let told = mount(&Hosts::options(
        1,
        &format!("tokens=etcd,token-endpoints=127.0.0.1:9,{HASTY}"),
    ))
    .ok();
    assert!(
        told.stderr.contains("127.0.0.1:9 does not answer"),
        "{told}"
    );
    fs::write(point.join("file"), contents(1)).expect("write");
    hosts.check_contents(1, &["file".into()]);
    hosts.hosts[1]
        .run(["umount".as_ref(), point.as_os_str()])
        .ok();
}

fn planted_directory_is_refused(hosts: &Hosts, mount: &dyn Fn(&str) -> Outcome) {
    let tokens = hosts.source(".firn/tokens");
    let aside = hosts.source(".firn/aside");
    fs::rename(&tokens, &aside).expect("rename");
    std::os::unix::fs::symlink(Path::new("/tmp"), &tokens).expect("symlink");
    mount(&Hosts::options(1, "tokens=flock"))
        .code(10)
        .says("symbolic link");
    fs::remove_file(&tokens).expect("unlink");
    fs::rename(&aside, &tokens).expect("rename");
}
