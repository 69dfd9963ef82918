//! Hosts that mount one backing otherwise than others: several real firnd, each under a host name of its own.
//!
//! Needs root and FUSE.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_testfs::BackgroundSession;
use firn_testfs::trace::Trace;
use firn_tests::mount::{SMALL, mount_args};
use firn_tests::sandbox::kill_and_wait;
use firn_tests::{FirnMount, Outcome, Sandbox, wait_until};

/// Nothing here takes this long; only a hang does.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// Exit status: another firnd has it.
const BUSY: i32 = 11;

/// Hosts, and the backing and the lanes that they share.
struct Hosts {
    hosts: Vec<Sandbox>,
    backing: PathBuf,
    lanes: [PathBuf; 2],
    _session: BackgroundSession,
    _shared: Sandbox,
}

impl Hosts {
    fn new(name: &str) -> Self {
        let shared = Sandbox::new(name);
        let backing = shared.mkdir("traced");
        let session = Trace::new(Duration::from_millis(1))
            .serve(&shared.join("backing"), &backing)
            .expect("serve the backing");
        Self {
            hosts: (0..2)
                .map(|at| Sandbox::new(&format!("{name}{at}")))
                .collect(),
            backing,
            lanes: [shared.mkdir("lane0"), shared.mkdir("lane1")],
            _session: session,
            _shared: shared,
        }
    }

    fn options(at: usize, more: &str) -> String {
        format!("{SMALL},host=n{at},{more}")
    }

    fn mount(&self, at: usize, more: &str) -> FirnMount<'_> {
        FirnMount::over(&self.hosts[at], &self.backing, &Self::options(at, more))
    }

    /// Tries to mount, which fails.
    fn refused(&self, at: usize, more: &str) -> Outcome {
        let host = &self.hosts[at];
        let mount_point = host.mkdir("refused");
        host.run(mount_args(
            &self.backing,
            &mount_point,
            &Self::options(at, more),
        ))
    }

    /// Places files in the lanes in the order of these numbers, with tokens.
    fn placed(&self, order: [usize; 2]) -> String {
        let [first, second] = order.map(|lane| self.lanes[lane].display().to_string());
        format!("tokens=flock,placement=dirs,lanes={first}:{second}")
    }
}

fn differences(mount: &FirnMount<'_>) -> Vec<String> {
    mount.status().host_differences
}

/// Proves S-share-6.
#[test]
fn hosts_with_other_lanes_or_tokens_are_named_on_both() {
    let hosts = Hosts::new("peerlanes");
    let first = hosts.mount(0, &hosts.placed([0, 1]));
    assert_eq!(differences(&first), [] as [String; 0]);
    // No service listens there, which is no obstacle.
    let etcd = "tokens=etcd,token-endpoints=127.0.0.1:1";
    let options = hosts.placed([1, 0]).replace("tokens=flock", etcd);
    let second = hosts.mount(1, &options);
    let lanes = |order: [usize; 2]| {
        let [a, b] = order.map(|lane| hosts.lanes[lane].display().to_string());
        format!("{a}:{b} of placement=dirs")
    };
    let expected = |host: usize, theirs: [usize; 2], ours: [usize; 2]| {
        let (theirs, ours) = (lanes(theirs), lanes(ours));
        format!("host n{host} has lanes {theirs}, this host {ours}: ")
    };
    let told = differences(&second);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told[0].starts_with(&expected(0, [0, 1], [1, 0])),
        "{told:?}"
    );
    assert!(
        told[1].starts_with("host n0 has tokens flock, this host etcd: "),
        "{told:?}"
    );
    // The one that was there first hears of it.
    wait_until("the first host sees the second", HANGS_AFTER, || {
        let told = differences(&first);
        told.len() == 2 && told[0].starts_with(&expected(1, [1, 0], [0, 1]))
    });
    second.umount();
    wait_until("the second is gone", HANGS_AFTER, || {
        differences(&first).is_empty()
    });
    first.umount();
}

/// Proves S-share-6.
#[test]
fn a_host_that_logs_is_refused_beside_one_that_would_not_see_it_until_that_one_is_dead() {
    let hosts = Hosts::new("peerlog");
    let placed = hosts.placed([0, 1]);
    let first = hosts.mount(0, &placed);
    let logs = format!("{placed},layout=log");
    let refused = hosts.refused(1, &logs);
    assert_eq!(refused.code, BUSY, "{}", refused.stderr);
    for part in ["host n0", "layout plain", "this mount has layout log"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    // A host that is killed blocks no other host.
    kill_and_wait(&[first.status().pid]);
    let second = hosts.mount(1, &logs);
    assert_eq!(differences(&second), [] as [String; 0]);
    second.umount();
}

/// Proves S-share-6.
#[test]
fn a_host_without_logs_reads_what_another_one_comes_to_log() {
    let hosts = Hosts::new("peerread");
    let placed = hosts.placed([0, 1]);
    let first = hosts.mount(0, &format!("{placed},layout=log,flatten=off"));
    let second = hosts.mount(1, &format!("{placed},attr-timeout=0"));
    let told = differences(&second);
    assert!(
        told[0].starts_with("host n0 has layout log, this host plain, with logs: "),
        "{told:?}"
    );
    // No file was in a log when the second one came.
    fs::write(first.join("f"), vec![7; 3 << 20]).expect("write");
    first.wait("logged", &first.join("f")).ok();
    assert_eq!(fs::read(second.join("f")).expect("read"), vec![7; 3 << 20]);
    second.umount();
    first.umount();
}

fn change_terms(backing: &Path) {
    let terms = backing.join(".firn/host-n0/terms");
    let text = fs::read_to_string(&terms).expect("read");
    assert!(text.contains("change log"), "{text}");
    fs::write(&terms, text.replace("change log", "change log 1")).expect("write");
}

/// Proves S-share-6.
#[test]
fn a_host_whose_formats_differ_is_refused_while_the_other_one_lives() {
    let hosts = Hosts::new("peerformat");
    let placed = hosts.placed([0, 1]);
    let first = hosts.mount(0, &placed);
    change_terms(&hosts.backing);
    let refused = hosts.refused(1, &placed);
    assert_eq!(refused.code, BUSY, "{}", refused.stderr);
    for part in ["host n0", "formats", "run the same version of firn"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    first.umount();
    hosts.mount(1, &placed).umount();
}

/// One process acts in the name of a host, whatever it shares with others.
#[test]
fn a_second_process_in_the_name_of_a_host_is_refused_for_another_use_too() {
    let hosts = Hosts::new("peername");
    let first = hosts.mount(0, &hosts.placed([0, 1]));
    let options = format!("{SMALL},host=n0,layout=log");
    let mount_point = hosts.hosts[1].mkdir("refused");
    let refused = hosts.hosts[1].run(mount_args(&hosts.backing, &mount_point, &options));
    assert_eq!(refused.code, BUSY, "{}", refused.stderr);
    assert!(refused.stderr.contains("n0"), "{}", refused.stderr);
    let lease = fs::read_to_string(hosts.backing.join(".firn/host-n0/lease")).expect("read");
    let uses = lease.split_once("\"uses\":").expect("uses").1;
    assert!(uses.starts_with("[\"tokens\",\"lanes\"]"), "{lease}");
    first.umount();
    // It has given its name back.
    hosts.mount(0, "layout=log").umount();
}
