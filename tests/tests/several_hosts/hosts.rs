//! Several firnd, each on a host of its own (network namespace, host name), over one shared backing, with
//! workers like those of an MPI job: parts of one file, and their commit.
//!
//! Needs root and FUSE. `FIRN_HOSTS_RANGES` sets the ranges of each worker.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use firn_tests::command::{Outcome, run, wait_child, wait_until};
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::mount_args;
use firn_tests::random::{env_count, generator};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const OPTIONS: &str = "arena-size=128M,chunk-size=4M,drain=commit,participants-wait=20s";
/// What fails without others fails soon.
const HASTY: &str = "arena-size=64M,chunk-size=4M,drain=commit,participants-wait=2s";
/// Bytes of one range: neighbours are another worker's.
const RANGE: u64 = 64;

/// Hosts and the directory that they share.
struct Cluster {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
    options: String,
}

impl Cluster {
    fn new(name: &str, hosts: usize, options: &str) -> Self {
        let shared = Sandbox::new(name);
        let hosts = (0..hosts)
            .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}")))
            .collect();
        Self {
            shared,
            hosts,
            options: options.to_owned(),
        }
    }

    fn backing(&self) -> PathBuf {
        self.shared.join("backing")
    }

    fn mount(&self, at: usize) -> FirnMount<'_> {
        let options = format!("{},participants={}", self.options, self.hosts.len());
        FirnMount::over(&self.hosts[at], &self.backing(), &options)
    }

    fn mounts(&self) -> Vec<FirnMount<'_>> {
        (0..self.hosts.len()).map(|at| self.mount(at)).collect()
    }

    /// `firn VERB MOUNT ...` on each host at once.
    fn all(&self, mounts: &[FirnMount<'_>], args: &[&str]) -> Vec<Outcome> {
        std::thread::scope(|scope| {
            let one = |(host, mount): (&Sandbox, &FirnMount<'_>)| run(&mut on(host, mount, args));
            let threads: Vec<_> = self
                .hosts
                .iter()
                .zip(mounts)
                .map(|pair| scope.spawn(move || one(pair)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a host"))
                .collect()
        })
    }

    fn all_ok(&self, mounts: &[FirnMount<'_>], args: &[&str]) {
        for outcome in self.all(mounts, args) {
            outcome.ok();
        }
    }

    /// Names in `.firn/` that are about a vote.
    fn votes(&self) -> Vec<String> {
        let names = fs::read_dir(self.backing().join(".firn")).expect("list .firn");
        let names = names.map(|entry| {
            entry
                .expect("entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        });
        names.filter(|name| name.starts_with("vote-")).collect()
    }
}

fn on(host: &Sandbox, mount: &FirnMount<'_>, args: &[&str]) -> std::process::Command {
    let mut command = host.firn([args[0].as_ref(), mount.path().as_os_str()]);
    command.args(&args[1..]);
    command
}

fn begin_all(cluster: &Cluster, mounts: &[FirnMount<'_>]) {
    cluster.all_ok(mounts, &["begin"]);
}

fn open(mount: &FirnMount<'_>, name: &str) -> File {
    File::options()
        .read(true)
        .write(true)
        .open(mount.join(name))
        .expect("open")
}

/// The byte that worker `at` writes into range `range`.
fn byte(at: usize, range: u64) -> u8 {
    (at as u8) << 5 | (range % 31) as u8 | 1
}

/// Workers write every `hosts`-th range of one file, out of order, and read their own.
fn work(mounts: &[FirnMount<'_>], ranges: u64) {
    let count = mounts.len() as u64;
    std::thread::scope(|scope| {
        for (at, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                let file = open(mount, "shared");
                for step in 0..ranges {
                    let range = (step * 7919) % ranges;
                    let offset = (range * count + at as u64) * RANGE;
                    let data = [byte(at, range); RANGE as usize];
                    file.write_all_at(&data, offset).expect("write");
                    if step % 16 == 0 {
                        let mut back = [0; RANGE as usize];
                        file.read_exact_at(&mut back, offset).expect("read");
                        assert_eq!(back, data);
                    }
                }
                fs::write(mount.join(format!("own{at}")), format!("of {at}")).expect("write");
            });
        }
    });
}

fn expected(hosts: usize, ranges: u64) -> Vec<u8> {
    (0..ranges * hosts as u64)
        .flat_map(|stripe| {
            [byte((stripe % hosts as u64) as usize, stripe / hosts as u64); RANGE as usize]
        })
        .collect()
}

fn parts_apart(name: &str, hosts: usize, ranges: u64) {
    let cluster = Cluster::new(name, hosts, OPTIONS);
    fs::write(cluster.backing().join("shared"), "").expect("write");
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    work(&mounts, ranges);
    assert_eq!(
        fs::metadata(cluster.backing().join("shared"))
            .expect("stat")
            .len(),
        0
    );
    cluster.all_ok(&mounts, &["commit", "--id", "7"]);
    let expected = expected(hosts, ranges);
    assert!(fs::read(cluster.backing().join("shared")).expect("read") == expected);
    for (at, mount) in mounts.iter().enumerate() {
        assert!(
            fs::read(mount.join("shared")).expect("read") == expected,
            "host {at} sees all parts"
        );
        for other in 0..hosts {
            assert_eq!(
                fs::read_to_string(mount.join(format!("own{other}"))).unwrap(),
                format!("of {other}")
            );
        }
    }
    assert_eq!(cluster.votes(), [""; 0]);
    // And again, with the next number by itself.
    begin_all(&cluster, &mounts);
    for (at, mount) in mounts.iter().enumerate() {
        open(mount, "shared")
            .write_all_at(b"again", at as u64 * 100)
            .expect("write");
    }
    for outcome in cluster.all(&mounts, &["commit"]) {
        let outcome = outcome.ok();
        assert!(
            format!("{outcome:?}").contains("committed as 8"),
            "{outcome:?}"
        );
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-30, S-tx-67, S-tx-68.
#[test]
fn two_hosts_commit_parts_of_one_file() {
    parts_apart("two", 2, env_count("FIRN_HOSTS_RANGES", 20_000));
}

/// Proves S-tx-30, S-tx-67, S-tx-68.
#[test]
fn four_hosts_commit_parts_of_one_file() {
    parts_apart("four", 4, env_count("FIRN_HOSTS_RANGES", 25_000));
}

/// Proves S-tx-32.
#[test]
fn every_planted_conflict_is_found_and_told_on_every_host() {
    const PLANTED: u64 = 12;
    let ranges = 500;
    let mut rng = generator(seed("planted conflicts"));
    let cluster = Cluster::new("planted", 4, OPTIONS);
    let old = vec![b'.'; (ranges * 4 * RANGE) as usize];
    fs::write(cluster.backing().join("shared"), &old).expect("write");
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    work(&mounts, ranges);
    // Each in a part of its own of the file, so that none hides another.
    let mut planted = Vec::new();
    for number in 0..PLANTED {
        let range = number * (ranges / PLANTED) + rng.random_range(0..ranges / PLANTED);
        let owner = rng.random_range(0..4usize);
        let other = (owner + rng.random_range(1..4)) % 4;
        let at = (range * 4 + owner as u64) * RANGE + rng.random_range(0..RANGE);
        let writes: bool = rng.random();
        let file = open(&mounts[other], "shared");
        if writes {
            file.write_all_at(b"!", at).expect("write");
        } else {
            file.read_exact_at(&mut [0], at).expect("read");
        }
        planted.push((at, owner, other, writes));
    }
    for outcome in cluster.all(&mounts, &["prepare", "--id", "3"]) {
        assert_ne!(outcome.code, 0);
        for (at, owner, other, writes) in &planted {
            let did = if *writes { "written" } else { "read" };
            let found = outcome.stderr.lines().any(|line| {
                line.contains(&format!("shared, bytes {at} to {at}: "))
                    && line.contains(&format!("written on n{owner} by process "))
                    && line.contains(&format!(
                        "{did} on n{other} by process {}",
                        std::process::id()
                    ))
            });
            assert!(
                found,
                "planted at {at}: {did} on n{other}, owner n{owner}\n{}",
                outcome.stderr
            );
        }
        assert!(
            outcome.stderr.contains(&format!("{PLANTED} conflicts")),
            "{}",
            outcome.stderr
        );
    }
    for outcome in cluster.all(&mounts, &["commit", "--id", "3"]) {
        assert_ne!(outcome.code, 0, "no way round");
    }
    cluster.all_ok(&mounts, &["abort"]);
    assert!(fs::read(cluster.backing().join("shared")).expect("read") == old);
    assert!(fs::read(mounts[1].join("shared")).expect("read") == old);
    assert_eq!(cluster.votes(), [""; 0]);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

fn both_write(mounts: &[FirnMount<'_>]) {
    for (at, mount) in mounts.iter().enumerate() {
        open(mount, "shared")
            .write_all_at(&[b'0' + at as u8; 10], at as u64 * 10)
            .expect("write");
        fs::write(mount.join(format!("own{at}")), "own").expect("write");
    }
}

fn whole(dir: &Path) -> Result<bool, String> {
    let shared = fs::read(dir.join("shared")).expect("read");
    let own = [0, 1].map(|at| dir.join(format!("own{at}")).exists());
    match (&shared[..], own) {
        (b"....................", [false, false]) => Ok(false),
        (b"00000000001111111111", [true, true]) => Ok(true),
        _ => Err(format!(
            "half of it: {:?}, {own:?}",
            String::from_utf8_lossy(&shared)
        )),
    }
}

/// Proves S-tx-31, S-tx-69, S-tx-70.
#[test]
fn a_host_that_is_killed_between_prepare_and_commit_leaves_no_half() {
    let mut rng = generator(seed("killed hosts"));
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 6) {
        let cluster = Cluster::new("killed", 2, HASTY);
        fs::write(cluster.backing().join("shared"), "....................").expect("write");
        let mut mounts = cluster.mounts();
        begin_all(&cluster, &mounts);
        both_write(&mounts);
        cluster.all_ok(&mounts, &["prepare", "--id", "5"]);
        let other = mounts.remove(1);
        let commits = rng.random_range(0..3) > 0;
        let decide = if commits {
            vec!["commit", "--id", "5"]
        } else {
            vec!["abort"]
        };
        let told = format!("round {round}, {decide:?}");
        // At any moment of the other host's decision.
        let mut child: Child = on(&cluster.hosts[0], &mounts[0], &decide)
            .stderr(Stdio::null())
            .spawn()
            .expect("spawn");
        std::thread::sleep(Duration::from_micros(rng.random_range(0..30_000)));
        other.kill();
        let status = wait_child(&mut child, Duration::from_secs(60)).expect("it hangs");
        assert!(status.success(), "{told}: the survivor decides alone");
        // The dead one's part: by a host that is left, or by its own firnd.
        if rng.random() {
            let args = ["recover", "--host", "n1"];
            cluster
                .shared
                .run(
                    args.iter()
                        .map(Path::new)
                        .chain([cluster.backing().as_path()]),
                )
                .ok();
            assert_eq!(whole(&cluster.backing()), Ok(commits), "{told}");
        }
        let back = cluster.mount(1);
        assert_eq!(whole(&cluster.backing()), Ok(commits), "{told}");
        assert_eq!(whole(back.path()), Ok(commits), "{told}");
        wait_until("the survivor sees it", Duration::from_secs(10), || {
            whole(mounts[0].path()) == Ok(commits)
        });
        back.umount();
        mounts.remove(0).umount();
        assert_eq!(cluster.votes(), [""; 0], "{told}");
    }
}

/// Proves S-tx-70, S-tx-123: `firn recover --host` ends a dead host's part where its files lie in lanes and in logs.
#[test]
fn a_dead_host_is_ended_over_lanes_and_logs() {
    let places = Sandbox::new("deadlanes");
    let lanes = ["lane0", "lane1"].map(|name| places.mkdir(name));
    let placed = firn_tests::lanes::place_in(&lanes, HASTY);
    for layers in ["layout=log", "placement", "both"] {
        let options = match layers {
            "placement" => placed.clone(),
            "both" => format!("{placed},layout=log"),
            _ => format!("{HASTY},layout=log"),
        };
        let cluster = Cluster::new("dead", 2, &options);
        let mut mounts = cluster.mounts();
        fs::write(mounts[0].join("shared"), "....................").expect("write");
        begin_all(&cluster, &mounts);
        both_write(&mounts);
        cluster.all_ok(&mounts, &["prepare", "--id", "5"]);
        mounts.remove(1).kill();
        run(&mut on(
            &cluster.hosts[0],
            &mounts[0],
            &["commit", "--id", "5"],
        ))
        .ok();
        let backing = cluster.backing();
        let args = ["recover", "--host", "n1"].map(Path::new);
        cluster
            .shared
            .run(args.into_iter().chain([backing.as_path()]))
            .ok();
        wait_until("the survivor sees it", Duration::from_secs(10), || {
            whole(mounts[0].path()) == Ok(true)
        });
        mounts.remove(0).umount();
        assert_eq!(cluster.votes(), [""; 0], "{layers}");
        let again = cluster.mount(0);
        assert_eq!(whole(again.path()), Ok(true), "{layers}");
        again.umount();
    }
}

/// Proves S-tx-31, S-tx-69.
#[test]
fn an_abort_after_another_host_has_committed_is_refused_and_harms_nothing() {
    let cluster = Cluster::new("late", 2, HASTY);
    fs::write(cluster.backing().join("shared"), "....................").expect("write");
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    both_write(&mounts);
    cluster.all_ok(&mounts, &["prepare", "--id", "5"]);
    // Programs that cut a file and write to another wait for the outcome meanwhile. Not this one: its children would
    // close its descriptors, which waits too, before they could bring it about.
    let shell = |script: &str, file: &str| {
        let mut command = std::process::Command::new("sh");
        command
            .args(["-c", script])
            .arg(mounts[1].join(file))
            .spawn()
            .expect("spawn")
    };
    let mut late = [
        shell("truncate -s 1 \"$0\"", "own1"),
        shell("printf late 1<>\"$0\"", "shared"),
    ];
    wait_until("the write is taken", Duration::from_secs(10), || {
        mounts[1].status().held_bytes > 0
    });
    let first = run(&mut on(
        &cluster.hosts[0],
        &mounts[0],
        &["commit", "--id", "5"],
    ))
    .ok();
    assert!(
        format!("{first:?}").contains("not yet applied on n1"),
        "{first:?}"
    );
    let refused = run(&mut on(&cluster.hosts[1], &mounts[1], &["abort"]));
    assert!(
        refused.code == 11 && refused.stderr.contains("committed with id 5"),
        "{refused:?}"
    );
    run(&mut on(
        &cluster.hosts[1],
        &mounts[1],
        &["commit", "--id", "5"],
    ))
    .ok();
    for child in &mut late {
        let status = wait_child(child, Duration::from_secs(30)).expect("it goes on");
        assert!(status.success());
    }
    assert_eq!(
        fs::read(mounts[1].join("shared")).unwrap(),
        b"late0000001111111111"
    );
    assert_eq!(fs::read(mounts[0].join("own1")).unwrap(), b"o");
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    assert_eq!(
        fs::read(cluster.backing().join("shared")).unwrap(),
        b"late0000001111111111"
    );
    assert_eq!(fs::read(cluster.backing().join("own1")).unwrap(), b"o");
}

/// Proves S-tx-31, S-tx-71.
#[test]
fn a_host_that_dies_before_it_is_prepared_takes_the_commit_with_it() {
    let cluster = Cluster::new("early", 2, HASTY);
    fs::write(cluster.backing().join("shared"), "....................").expect("write");
    let mut mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    both_write(&mounts);
    mounts.remove(1).kill();
    let refused = run(&mut on(
        &cluster.hosts[0],
        &mounts[0],
        &["commit", "--id", "5"],
    ));
    assert_ne!(refused.code, 0);
    assert!(
        refused
            .stderr
            .contains("only 1 of 2 hosts took part in time"),
        "{}",
        refused.stderr
    );
    let back = cluster.mount(1);
    assert_eq!(whole(back.path()), Ok(false));
    // Its changes are still there, and a second try works once the other takes part.
    let mut own = [0; 10];
    open(&mounts[0], "shared")
        .read_exact_at(&mut own, 0)
        .expect("read");
    assert_eq!(&own, b"0000000000");
    run(&mut on(&cluster.hosts[1], &back, &["begin"])).ok();
    open(&back, "shared")
        .write_all_at(b"1111111111", 10)
        .expect("write");
    fs::write(back.join("own1"), "own").expect("write");
    mounts.push(back);
    cluster.all_ok(&mounts, &["commit", "--id", "5"]);
    assert_eq!(whole(&cluster.backing()), Ok(true));
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-87.
#[test]
fn names_of_hosts_are_checked() {
    let cluster = Cluster::new("names", 2, HASTY);
    let first = cluster.mount(0);
    let second = |options: &str| {
        let host = &cluster.hosts[1];
        let point = host.join("mnt");
        let args = ["mount", "-o", options].map(Path::new);
        host.run(
            args.into_iter()
                .chain([cluster.backing().as_path(), point.as_path()]),
        )
    };
    let refused = second("drain=commit,participants=2,host=n0");
    assert!(
        refused.code == 11 && refused.stderr.contains("host n0 has"),
        "{refused:?}"
    );
    let refused = second("drain=commit,participants=n0:n7");
    assert!(
        refused.code == 2 && refused.stderr.contains("this host is n1"),
        "{refused:?}"
    );
    let refused = second("drain=commit,participants=n0:n0");
    assert!(
        refused.code == 2 && refused.stderr.contains("has n0 twice"),
        "{refused:?}"
    );
    let refused = second("drain=commit,participants=2,host=a/b");
    assert!(
        refused.code == 2 && refused.stderr.contains("not the name of a host"),
        "{refused:?}"
    );
    let refused = second("participants=2,drain=eager");
    assert!(
        refused.code == 2 && refused.stderr.contains("contradict each other"),
        "{refused:?}"
    );
    // Alone, it would not know of the others.
    let refused = second("drain=commit");
    assert!(
        refused.code == 11 && refused.stderr.contains("already mounted"),
        "{refused:?}"
    );
    let refused = cluster.shared.run(
        ["recover", "--host", "nobody"]
            .map(Path::new)
            .into_iter()
            .chain([cluster.backing().as_path()]),
    );
    assert!(
        refused.code == 2
            && refused
                .stderr
                .contains("nor a transaction of a dead host nobody"),
        "{refused:?}"
    );
    let refused = cluster.shared.run(
        ["recover", "--host", "n0"]
            .map(Path::new)
            .into_iter()
            .chain([cluster.backing().as_path()]),
    );
    assert!(refused.code == 11, "{refused:?}");
    first.umount();
}

/// Two hosts in turns: the second reads what the first wrote, and writes some of the same bytes.
fn share_bytes(mounts: &[FirnMount<'_>]) {
    open(&mounts[0], "shared")
        .write_all_at(&[b'0'; 30], 0)
        .expect("write");
    fs::write(mounts[0].join("own0"), "own").expect("write");
    let seen = fs::read(mounts[1].join("shared")).expect("read");
    let at_once = fs::read(mounts[1].join("own0")).is_ok_and(|own| own == b"own");
    assert_eq!(
        seen.starts_with(b"000000"),
        at_once,
        "{}",
        String::from_utf8_lossy(&seen)
    );
    open(&mounts[1], "shared")
        .write_all_at(&[b'1'; 20], 20)
        .expect("write");
    fs::remove_file(mounts[1].join("old")).expect("unlink");
    fs::write(mounts[1].join("own1"), "own").expect("write");
}

const SHARED_OLD: &[u8] = b"........................................";
const SHARED_NEW: &[u8] = b"0000000000000000000011111111111111111111";

fn fill_shared(cluster: &Cluster) {
    fs::write(cluster.backing().join("shared"), SHARED_OLD).expect("write");
    fs::write(cluster.backing().join("old"), "old").expect("write");
}

/// The tree before or the one after, with no third.
fn is_new(dir: &Path) -> Result<bool, String> {
    let shared = fs::read(dir.join("shared")).expect("read");
    let names = ["old", "own0", "own1"].map(|name| dir.join(name).exists());
    match (shared.as_slice(), names) {
        (SHARED_OLD, [true, false, false]) => Ok(false),
        (SHARED_NEW, [false, true, true]) => Ok(true),
        _ => Err(format!("{:?}, {names:?}", String::from_utf8_lossy(&shared))),
    }
}

/// The kernel of a host that did not change a name may know it for a second more.
fn seen_everywhere(cluster: &Cluster, mounts: &[FirnMount<'_>], new: bool) {
    assert_eq!(is_new(&cluster.backing()), Ok(new));
    for mount in mounts {
        wait_until("the mount shows it", Duration::from_secs(10), || {
            is_new(mount.path()) == Ok(new)
        });
    }
}

fn left_over(cluster: &Cluster) -> Vec<String> {
    let names = fs::read_dir(cluster.backing().join(".firn")).expect("list .firn");
    let names = names.map(|entry| {
        entry
            .expect("entry")
            .file_name()
            .to_string_lossy()
            .into_owned()
    });
    names.filter(|name| !name.starts_with("host-")).collect()
}

/// Proves S-tx-101, S-tx-103.
#[test]
fn several_hosts_neither_make_nor_rename_the_top() {
    let cluster = Cluster::new("hosttop", 2, HASTY);
    let mounts = cluster.mounts();
    fs::create_dir(mounts[0].join("dir")).expect("mkdir");
    let begin = |at: usize, name: &str, more: &[&str]| {
        let path = mounts[at].join(name);
        let mut command = cluster.hosts[at].firn(["begin".as_ref(), path.as_os_str()]);
        run(command.args(more))
    };
    let refused = begin(0, "made", &["--create"]);
    refused.code(1).says("make it first");
    begin(0, "dir", &[]).ok();
    begin(1, "dir", &[]).ok();
    let renamed = fs::rename(mounts[1].join("dir"), mounts[1].join("else"));
    let errno = renamed.err().and_then(|error| error.raw_os_error());
    assert_eq!(errno, Some(libc::EBUSY), "the hosts know it by its path");
    for mount in mounts {
        mount.kill();
    }
}

/// Proves S-tx-72.
#[test]
fn directories_that_several_hosts_make_come_together() {
    let cluster = Cluster::new("mkdirs", 2, HASTY);
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    for (at, mount) in mounts.iter().enumerate() {
        fs::create_dir_all(mount.join("step/parts")).expect("mkdir");
        fs::write(mount.join(format!("step/parts/of{at}")), [at as u8]).expect("write");
    }
    cluster.all_ok(&mounts, &["commit", "--id", "1"]);
    let parts = |top: &Path| -> Vec<Option<Vec<u8>>> {
        let of = |at: usize| fs::read(top.join(format!("step/parts/of{at}"))).ok();
        (0..2).map(of).collect()
    };
    let expected = vec![Some(vec![0]), Some(vec![1])];
    assert_eq!(parts(&cluster.backing()), expected);
    for mount in &mounts {
        wait_until("the mount shows them", Duration::from_secs(10), || {
            parts(mount.path()) == expected
        });
    }
    // A file beside a directory of one name is none of both.
    begin_all(&cluster, &mounts);
    fs::create_dir(mounts[0].join("one")).expect("mkdir");
    fs::write(mounts[1].join("one"), "file").expect("write");
    for outcome in cluster.all(&mounts, &["commit", "--id", "2"]) {
        assert!(outcome.code != 0 && outcome.stderr.contains("conflict"));
    }
    cluster.all_ok(&mounts, &["abort"]);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-33, S-tx-80.
#[test]
fn bytes_that_hosts_share_are_refused_in_hold_mode_and_committed_in_shadow_mode() {
    let cluster = Cluster::new("holds", 2, HASTY);
    fill_shared(&cluster);
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    share_bytes(&mounts);
    for outcome in cluster.all(&mounts, &["commit", "--id", "5"]) {
        assert!(
            outcome.code != 0 && outcome.stderr.contains("conflict"),
            "{outcome:?}"
        );
    }
    cluster.all_ok(&mounts, &["abort"]);
    assert_eq!(is_new(&cluster.backing()), Ok(false));
    mounts.into_iter().for_each(|mount| drop(mount.umount()));

    let cluster = Cluster::new("shadows", 2, &format!("{OPTIONS},mode=shadow"));
    fill_shared(&cluster);
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    share_bytes(&mounts);
    assert_eq!(is_new(&cluster.backing()), Ok(true), "nothing is held");
    cluster.all_ok(&mounts, &["commit", "--id", "5"]);
    seen_everywhere(&cluster, &mounts, true);
    assert_eq!(left_over(&cluster), [""; 0]);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-34.
#[test]
fn an_abort_in_shadow_mode_is_everybodys() {
    let cluster = Cluster::new("aborts", 2, &format!("{OPTIONS},mode=shadow"));
    fill_shared(&cluster);
    let mounts = cluster.mounts();
    for prepared in [false, true] {
        begin_all(&cluster, &mounts);
        share_bytes(&mounts);
        if prepared {
            cluster.all_ok(&mounts, &["prepare", "--id", "9"]);
        }
        // The other stops by itself.
        run(&mut on(&cluster.hosts[1], &mounts[1], &["abort"])).ok();
        seen_everywhere(&cluster, &mounts, false);
        let refused = run(&mut on(
            &cluster.hosts[0],
            &mounts[0],
            &["commit", "--id", "9"],
        ));
        assert!(
            refused.code != 0 && refused.stderr.contains("n1 aborted"),
            "{refused:?}"
        );
        run(&mut on(&cluster.hosts[0], &mounts[0], &["abort"])).ok();
        wait_until("both have left", Duration::from_secs(10), || {
            let left = left_over(&cluster);
            left.is_empty() || {
                println!("there is still {left:?}");
                false
            }
        });
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-tx-35, S-tx-83.
#[test]
fn a_host_that_is_killed_in_shadow_mode_is_undone_on_all() {
    let options = format!("{HASTY},mode=shadow");
    for outlived in [true, false] {
        let cluster = Cluster::new("dies", 2, &options);
        fill_shared(&cluster);
        let mut mounts = cluster.mounts();
        begin_all(&cluster, &mounts);
        share_bytes(&mounts);
        // Of this nothing is in the backing.
        let held = open(&mounts[1], "shared");
        held.write_all_at(b"held", 3).expect("write");
        drop(held);
        mounts.remove(1).kill();
        if outlived {
            let back = cluster.mount(1);
            assert_eq!(is_new(&cluster.backing()), Ok(false));
            assert_eq!(is_new(back.path()), Ok(false));
            seen_everywhere(&cluster, &mounts, false);
            let refused = run(&mut on(
                &cluster.hosts[0],
                &mounts[0],
                &["commit", "--id", "5"],
            ));
            assert!(
                refused.code != 0 && refused.stderr.contains("n1 aborted"),
                "{refused:?}"
            );
            mounts.push(back);
        } else {
            mounts.remove(0).kill();
            // The first waits for the other, in vain.
            let host = &cluster.hosts[1];
            let backing = cluster.backing();
            let point = host.join("mnt");
            let set = format!("{options},participants=2");
            let args = ["mount", "-o", &set].map(Path::new);
            let refused = host.run(args.into_iter().chain([backing.as_path(), point.as_path()]));
            assert!(
                refused.code != 0 && refused.stderr.contains("n0 has stopped"),
                "{refused:?}"
            );
            let args = ["recover", "--host", "n0"].map(Path::new);
            cluster
                .shared
                .run(args.into_iter().chain([backing.as_path()]))
                .ok();
            assert_eq!(is_new(&backing), Ok(false));
            mounts.push(cluster.mount(1));
            assert_eq!(is_new(mounts[0].path()), Ok(false));
        }
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        assert_eq!(left_over(&cluster), [""; 0]);
    }
}

/// Proves S-tx-85.
#[test]
fn regression_a_mount_without_the_others_drops_its_part_and_keeps_what_is_written_after() {
    let cluster = Cluster::new("alone", 2, &format!("{HASTY},close=held,drain-age=10min"));
    fs::write(cluster.backing().join("shared"), "....................").expect("write");
    let mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    open(&mounts[1], "shared")
        .write_all_at(b"1111111111", 10)
        .expect("write");
    assert!(
        mounts[1].status().held_bytes >= 10,
        "it is in the arena only"
    );
    // The job is over, and this host goes on without transactions.
    mounts.into_iter().for_each(|mount| drop(mount.kill()));
    let alone = "arena-size=64M,chunk-size=4M,close=held,drain-age=10min";
    let over = || FirnMount::over(&cluster.hosts[1], &cluster.backing(), alone);
    let mount = over();
    assert_eq!(
        fs::read(mount.join("shared")).expect("read"),
        b"...................."
    );
    open(&mount, "shared")
        .write_all_at(b"after", 10)
        .expect("write");
    mount.kill();
    let mount = over();
    assert_eq!(
        fs::read(mount.join("shared")).expect("read"),
        b"..........after....."
    );
    let backing = mount.umount();
    assert_eq!(
        fs::read(backing.join("shared")).expect("read"),
        b"..........after....."
    );
}

/// Proves S-tx-86: two servers over one directory whose kernel keeps locks for each mount by itself.
#[test]
fn hosts_whose_locks_do_not_reach_each_other_are_refused_with_the_reason() {
    let cluster = Cluster::new("reach", 2, HASTY);
    let source = cluster.shared.mkdir("backing");
    let servers = [0, 1].map(|at| FaultFs::of(&cluster.hosts[at], source.clone()));
    let first = FirnMount::over(
        &cluster.hosts[0],
        servers[0].path(),
        &format!("{HASTY},participants=2"),
    );
    let second = cluster.hosts[1].mkdir("second");
    let args = mount_args(
        servers[1].path(),
        &second,
        &format!("{HASTY},participants=2"),
    );
    run(&mut cluster.hosts[1].firn(args))
        .code(2)
        .says("n0 is alive, and its lock does not keep this host out")
        .says("mount without participants");
    // Nor is its part ended from there.
    let recover = ["recover", "--host", "n0"].map(OsStr::new);
    run(&mut cluster.hosts[1].firn(recover.into_iter().chain([servers[1].path().as_os_str()])))
        .code(2)
        .says("n0 is alive");
    begin_and_abort(&cluster.hosts[0], &first);
    drop(first);
}

fn begin_and_abort(host: &Sandbox, mount: &FirnMount<'_>) {
    run(&mut on(host, mount, &["begin"])).ok();
    run(&mut on(host, mount, &["abort"])).ok();
}

/// Two hosts, the first of which another firnd goes on with.
fn taken_over_pair(name: &str) -> Cluster {
    let cluster = Cluster::new(name, 2, &format!("{OPTIONS},takeover=auto"));
    fs::write(cluster.backing().join("shared"), "").expect("write");
    cluster
}

/// Proves S-crash-17, S-crash-18, S-tx-71.
#[test]
fn a_host_that_is_taken_over_loses_its_part_and_no_host_commits() {
    let cluster = taken_over_pair("lostpart");
    let mut mounts = cluster.mounts();
    begin_all(&cluster, &mounts);
    work(&mounts, 200);
    let files = [0, 1].map(|at| open(&mounts[at], "shared"));
    mounts[0].kill_and_go_on();
    let refused = files[0].write_all_at(b"x", 0);
    let errno = refused.expect_err("it is told").raw_os_error();
    assert_eq!(errno, Some(libc::ECANCELED));
    files[1]
        .write_all_at(b"x", RANGE)
        .expect("the other host's goes on");
    let refused = run(&mut on(&cluster.hosts[0], &mounts[0], &["commit"]));
    assert!(
        refused.code != 0 && refused.stderr.contains("firnd died"),
        "{refused}"
    );
    assert_eq!(mounts[1].status().transactions.len(), 1);
    run(&mut on(&cluster.hosts[1], &mounts[1], &["abort"])).ok();
    drop(files);
    assert_eq!(
        fs::metadata(cluster.backing().join("shared"))
            .expect("stat")
            .len(),
        0
    );
    begin_all(&cluster, &mounts);
    work(&mounts, 200);
    cluster.all_ok(&mounts, &["commit"]);
    assert!(fs::read(cluster.backing().join("shared")).expect("read") == expected(2, 200));
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
}

/// Proves S-crash-17, S-tx-31, S-tx-69.
#[test]
fn a_host_that_is_taken_over_while_prepared_commits_with_the_others() {
    for verb in ["commit", "abort"] {
        let cluster = taken_over_pair("prepared");
        let mut mounts = cluster.mounts();
        begin_all(&cluster, &mounts);
        work(&mounts, 200);
        cluster.all_ok(&mounts, &["prepare", "--id", "7"]);
        for _ in 0..2 {
            mounts[0].kill_and_go_on();
        }
        // The other host decides first.
        for at in [1, 0] {
            run(&mut on(&cluster.hosts[at], &mounts[at], &[verb])).ok();
        }
        let expected = match verb {
            "commit" => expected(2, 200),
            _ => Vec::new(),
        };
        for mount in &mounts {
            assert!(
                fs::read(mount.join("shared")).expect("read") == expected,
                "{verb}"
            );
        }
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
        assert!(fs::read(cluster.backing().join("shared")).expect("read") == expected);
    }
}
