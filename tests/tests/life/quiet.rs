//! Runs in which nothing is wrong leave no warning and no error in the log of firnd: an alarm that means nothing hides
//! those that do.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

use firn_tests::agent::Agent;
use firn_tests::command::run;
use firn_tests::fsops::{open_rw, read};
use firn_tests::lanes::place_in;
use firn_tests::random::bytes;
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, Sandbox};

const KIB: usize = 1 << 10;
const RECORD: usize = 4097;
const ROUNDS: usize = 60;
const SMALL: &str = "arena-size=32M,chunk-size=1M";

/// Lines of the log that need a look.
#[track_caller]
fn assert_quiet(sandboxes: &[&Sandbox]) {
    for sandbox in sandboxes {
        let log = sandbox.logs();
        let loud = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        let loud: Vec<_> = log.lines().filter(loud).collect();
        assert!(
            loud.is_empty(),
            "nothing was wrong, and the log says: {loud:#?}"
        );
    }
}

/// What programs of several hosts do with files that all of them write.
fn share_files(mounts: &[&FirnMount<'_>], round: usize) {
    let name = format!("shared{}", round % 3);
    std::thread::scope(|scope| {
        for (host, mount) in mounts.iter().enumerate() {
            let path = mount.join(&name);
            scope.spawn(move || {
                let file = File::options()
                    .create(true)
                    .truncate(false)
                    .write(true)
                    .read(true)
                    .open(&path)
                    .expect("open");
                for record in 0..20 {
                    let at = (record * mounts.len() + host) * RECORD;
                    file.write_all_at(&bytes(record as u64, RECORD), at as u64)
                        .expect("write");
                }
                file.sync_all().expect("sync");
            });
        }
    });
    // One reads and removes what another one has just looked at.
    std::thread::scope(|scope| {
        for (host, mount) in mounts.iter().enumerate() {
            let path = mount.join(&name);
            scope.spawn(move || {
                if host == round % mounts.len() {
                    let _ = fs::remove_file(path);
                    return;
                }
                if let Ok(file) = File::open(path) {
                    let mut record = vec![0; RECORD];
                    let _ = file.read_at(&mut record, 0);
                    let _ = file.metadata();
                }
            });
        }
    });
}

/// Proves S-seen-7: files of two hosts in logs, over lanes and without.
#[test]
fn two_hosts_in_logs_leave_nothing_in_the_log() {
    for with_lanes in [false, true] {
        let shared = Sandbox::new("quiet-logs");
        let hosts: Vec<_> = ["n0", "n1"]
            .map(|host| Sandbox::on_host(&format!("quiet-{host}"), host))
            .into();
        let backing = shared.mkdir("backing");
        let options = format!("{SMALL},layout=log");
        let options = if with_lanes {
            let lanes = ["lane0", "lane1"].map(|lane| shared.mkdir(lane));
            place_in(&lanes, &options)
        } else {
            options
        };
        let mounts: Vec<_> = hosts
            .iter()
            .map(|host| FirnMount::over(host, &backing, &options))
            .collect();
        let both: Vec<&FirnMount<'_>> = mounts.iter().collect();
        for round in 0..ROUNDS {
            share_files(&both, round);
        }
        for mount in mounts {
            mount.umount();
        }
        assert_quiet(&hosts.iter().collect::<Vec<_>>());
    }
}

/// What a program does with a checkpoint.
fn checkpoint(mount: &FirnMount<'_>, step: usize) {
    let top = mount.join(format!("step_{step}"));
    fs::create_dir_all(top.join("a")).expect("mkdir");
    for rank in 0..4 {
        let path = top.join(format!("a/rank{rank}"));
        fs::write(&path, bytes(rank, 100 * KIB + step)).expect("write");
        let file = open_rw(&path);
        file.write_all_at(b"again", 7).expect("write");
        file.sync_all().expect("sync");
    }
    let mut log = File::options()
        .append(true)
        .create(true)
        .open(mount.join("log"))
        .expect("open");
    writeln!(log, "step {step}").expect("append");
    fs::rename(top.join("a/rank0"), top.join("a/first")).expect("rename");
    assert!(!read(&top.join("a/first")).is_empty());
    if let Some(old) = step.checked_sub(2)
        && mount.join(format!("step_{old}")).exists()
    {
        fs::remove_dir_all(mount.join(format!("step_{old}"))).expect("remove");
    }
}

/// Proves S-seen-7: transactions that commit and abort, drains, pulls and partner copies.
#[test]
fn transactions_drains_and_pulls_leave_nothing_in_the_log() {
    let sandbox = Sandbox::new("quiet-transactions");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},drain=commit"));
    for step in 0..4 {
        firn(&sandbox, "begin", mount.path()).ok();
        checkpoint(&mount, step);
        let end = if step == 3 { "abort" } else { "commit" };
        firn(&sandbox, end, mount.path()).ok();
    }
    mount.umount();
    assert_quiet(&[&sandbox]);

    let hosts = ["n0", "n1"].map(|host| Sandbox::new(&format!("quiet-{host}")));
    let backing = hosts[0].mkdir("shared");
    let mounts = [0, 1].map(|at| {
        let options = format!("{SMALL},drain=demand,partner=next,host=n{at}");
        FirnMount::over(&hosts[at], &backing, &options)
    });
    let agents = [0, 1].map(|at| Agent::start_unnamed(&hosts[at], mounts[at].path(), &[]));
    for (at, mount) in mounts.iter().enumerate() {
        checkpoint(mount, 10 * at);
        mount
            .wait("partnered", &mount.join(format!("step_{}", 10 * at)))
            .ok();
    }
    let target = hosts[0].join("copy");
    let mut pull = hosts[0].firn(["pull", "--backing"]);
    pull.arg(&backing)
        .arg(format!("n1:{}", mounts[1].join("step_10").display()));
    run(pull.arg(&target)).ok();
    for agent in agents {
        assert_eq!(agent.end(), Some(0));
    }
    for mount in mounts {
        mount.umount();
    }
    assert_quiet(&[&hosts[0], &hosts[1]]);
}
