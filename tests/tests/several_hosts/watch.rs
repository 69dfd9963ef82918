//! `firn hosts`, `firn status --job` and `firn top --job`: real firnd, each on a host of its own, of which one is killed, one
//! is stopped, and a backing that hangs.
//!
//! Needs root and FUSE.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::faultfs::FaultFs;
use firn_tests::sandbox::{kill, kill_and_wait};
use firn_tests::{FirnMount, Sandbox, wait_until};
use serde_json::Value;

/// Nothing here takes this long; only a hang does.
const HANGS_AFTER: Duration = Duration::from_secs(120);
const OPTIONS: &str = "arena-size=64M,chunk-size=4M,layout=log,close=held,drain=demand";

/// Hosts and the directory that they share.
struct Job {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
}

impl Job {
    fn new(name: &str, hosts: usize) -> Self {
        Self {
            shared: Sandbox::new(name),
            hosts: (0..hosts)
                .map(|at| Sandbox::on_host(&format!("{name}{at}"), &format!("n{at}")))
                .collect(),
        }
    }

    fn backing(&self) -> PathBuf {
        self.shared.join("backing")
    }

    fn mount(&self, at: usize, more: &str) -> FirnMount<'_> {
        FirnMount::over(
            &self.hosts[at],
            &self.backing(),
            &format!("{OPTIONS}{more}"),
        )
    }

    /// What a host that takes no part sees, by a verb with these words before the backing.
    fn seen_by_stranger(&self, words: &[&str]) -> Value {
        let backing = self.backing();
        let mut args: Vec<&std::ffi::OsStr> = words.iter().map(|word| word.as_ref()).collect();
        args.push(backing.as_os_str());
        self.shared.run(args).json()
    }

    fn hosts(&self) -> Value {
        self.seen_by_stranger(&["hosts", "--json"])
    }

    fn wait_for_state(&self, host: &str, state: &str) {
        wait_until(&format!("{host} is {state}"), HANGS_AFTER, || {
            of(&self.hosts(), host)["state"] == state
        });
    }
}

/// The row of a host.
fn of(job: &Value, host: &str) -> Value {
    let hosts = job["hosts"].as_array().expect("hosts");
    let found = hosts.iter().find(|row| row["host"] == host);
    found.cloned().unwrap_or_default()
}

fn names(job: &Value) -> Vec<&str> {
    let hosts = job["hosts"].as_array().expect("hosts");
    hosts
        .iter()
        .filter_map(|row| row["host"].as_str())
        .collect()
}

fn advice(job: &Value, host: &str) -> String {
    let row = of(job, host);
    let advice = row["advice"].as_array().cloned().unwrap_or_default();
    let advice: Vec<&str> = advice.iter().filter_map(Value::as_str).collect();
    advice.join("\n")
}

/// Waits until all hosts have said what they hold.
fn wait_for_held(job: &Job, bytes: u64) {
    wait_until("all hosts have said what they hold", HANGS_AFTER, || {
        job.hosts()["total"]["held_bytes"] == bytes
    });
}

/// Proves S-share-7.
#[test]
fn a_job_with_a_dead_and_a_stopped_host_is_told_as_it_is() {
    let job = Job::new("watch", 3);
    let mounts: Vec<FirnMount<'_>> = (0..3)
        .map(|at| job.mount(at, if at == 2 { ",tokens=flock" } else { "" }))
        .collect();
    for (at, mount) in mounts.iter().enumerate() {
        fs::write(mount.join(format!("rank_{at}")), vec![1; (at + 1) << 20]).expect("write");
    }
    wait_for_held(&job, 6 << 20);
    let whole = job.hosts();
    assert_eq!(
        names(&whole),
        ["n2", "n1", "n0"],
        "n2 differs, n1 holds more"
    );
    assert_eq!(whole["total"]["alive"], 3, "{whole}");
    let differs = of(&whole, "n2")["differences"].to_string();
    assert!(differs.contains("tokens flock, others none"), "{differs}");
    for (at, mount) in mounts.iter().enumerate() {
        let row = of(&whole, &format!("n{at}"));
        assert_eq!(row["pid"], mount.pid());
        let report = &row["report"];
        assert_eq!(report["mount_point"], mount.path().to_str().unwrap());
        assert_eq!(report["held_bytes"], (at as u64 + 1) << 20);
        assert_eq!(row["options"]["layout"], "log");
        // Its file is held, and goes to its log.
        assert_eq!(row["keeps_from_flattening"], 1, "{row}");
    }
    // One dies, one is stopped.
    kill_and_wait(&[mounts[1].pid()]);
    kill(mounts[2].pid(), libc::SIGSTOP);
    job.wait_for_state("n1", "dead");
    job.wait_for_state("n2", "silent");
    let broken = job.seen_by_stranger(&["status", "--job", "--json"]);
    assert_eq!(names(&broken), ["n1", "n2", "n0"]);
    let total = &broken["total"];
    assert_eq!(
        [&total["alive"], &total["silent"], &total["dead"]],
        [1, 1, 1],
        "{broken}"
    );
    assert_eq!(total["held_bytes"], 6 << 20);
    assert_eq!(total["stranded_bytes"], 2 << 20);
    // A dead host keeps no file from being flattened.
    assert_eq!(of(&broken, "n1")["keeps_from_flattening"], 0);
    let recover = format!(
        "`firn recover {}` on n1 as root drains 2.0 MiB",
        job.backing().display()
    );
    assert!(advice(&broken, "n1").contains(&recover), "{broken}");
    assert!(advice(&broken, "n2").contains("kill -CONT"), "{broken}");
    // By the mount point: the table of mounts is that of all hosts here.
    let own = mounts[0].path().as_os_str();
    let text = job.hosts[0].run(["status".as_ref(), "--job".as_ref(), own]);
    let text = text.ok().stdout;
    assert!(
        text.contains("3 hosts: 1 alive, 1 silent, 1 dead\n  stranded"),
        "{text}"
    );
    let screen = job
        .shared
        .run(["top", "--job", "--once", job.backing().to_str().unwrap()]);
    let screen = screen.ok().stdout;
    assert!(screen.contains("\n>n1   dead"), "{screen}");
    // It goes on, and is alive again.
    kill(mounts[2].pid(), libc::SIGCONT);
    job.wait_for_state("n2", "alive");
    // On a machine each host sees its own mounts only: here the others are in the way of a recovery.
    let mut mounts = mounts.into_iter();
    let [first, dead, third] = std::array::from_fn(|_| mounts.next().expect("a mount"));
    first.umount();
    third.umount();
    let left = job.hosts();
    assert_eq!(left["total"]["dead"], 1, "{left}");
    dead.kill();
    job.hosts[1]
        .run(["recover".as_ref(), job.backing().as_os_str()])
        .ok();
    let after = job.hosts();
    assert_eq!(after["total"]["dead"], 0, "{after}");
    assert_eq!(after["total"]["stranded_bytes"], 0, "{after}");
    assert_eq!(
        fs::read(job.backing().join("rank_1")).expect("read"),
        vec![1; 2 << 20]
    );
}

#[test]
fn what_was_kept_at_an_unmount_is_told_until_it_is_drained() {
    let job = Job::new("watchkept", 1);
    let mount = job.mount(0, "");
    fs::write(mount.join("f"), vec![1; 3 << 20]).expect("write");
    let keep = [
        "umount".as_ref(),
        "--keep-held".as_ref(),
        mount.path().as_os_str(),
    ];
    job.hosts[0].run(keep).ok();
    mount.wait_for_end();
    mount.abandon();
    let kept = job.hosts();
    assert_eq!(of(&kept, "n0")["state"], "left", "{kept}");
    assert_eq!(kept["total"]["stranded_bytes"], 3 << 20, "{kept}");
    assert!(
        advice(&kept, "n0").contains("n0 still holds 3.0 MiB"),
        "{kept}"
    );
    job.mount(0, "").umount();
    assert_eq!(job.hosts()["total"]["stranded_bytes"], 0);
}

/// Proves S-share-7.
#[test]
fn a_backing_that_hangs_is_told_and_this_hosts_own_mount_is_shown() {
    let host = Sandbox::on_host("watchhang", "n0");
    let fault = FaultFs::new(&host);
    let mount = FirnMount::over(&host, fault.path(), OPTIONS);
    fs::write(mount.join("f"), vec![1; 1 << 20]).expect("write");
    fault.stall();
    let mut syncing = Command::new("dd")
        .arg(format!("of={}", mount.join("g").display()))
        .args(["if=/dev/zero", "bs=4k", "count=1", "conv=fsync"])
        .stderr(Stdio::null())
        .spawn()
        .expect("dd");
    wait_until("the program that waits is named", HANGS_AFTER, || {
        let status = host.run([
            "status".as_ref(),
            "--json".as_ref(),
            mount.path().as_os_str(),
        ]);
        status.json()["waiting_programs"][0]["name"] == "dd"
    });
    let seen = host.run([
        "status".as_ref(),
        "--job".as_ref(),
        mount.path().as_os_str(),
    ]);
    let seen = seen.code(3);
    assert!(
        seen.stdout.contains("did not answer within 1.5 s"),
        "{seen:?}"
    );
    assert!(seen.stdout.contains("1.0 MiB in"), "{seen:?}");
    let waits = format!("dd ({}) waits in ", syncing.id());
    assert!(seen.stdout.contains(&waits), "{waits}: {seen:?}");
    // Of a backing whose mount is elsewhere nothing can be said.
    let elsewhere = Sandbox::new("watchother");
    let args = [
        "hosts".as_ref(),
        "--timeout=500ms".as_ref(),
        fault.path().as_os_str(),
    ];
    let refused = elsewhere.run(args).code(1);
    assert!(
        refused.stderr.contains("did not answer within 500 ms"),
        "{refused:?}"
    );
    fault.go_on();
    assert!(syncing.wait().expect("wait").success());
    wait_until("it renews its lease again", HANGS_AFTER, || {
        let seen = host.run([
            "hosts".as_ref(),
            "--json".as_ref(),
            mount.path().as_os_str(),
        ]);
        seen.code == 0 && of(&seen.json(), "n0")["state"] == "alive"
    });
    mount.umount();
}

#[test]
fn another_user_is_told_which_users_may_ask_and_a_plain_mount_shows_itself_here() {
    let host = Sandbox::on_host("watchuser", "n0");
    let mount = FirnMount::new(&host, "arena-size=64M,chunk-size=4M");
    // It leaves nothing in the backing, and is seen by its firnd.
    let seen = host.run([
        "hosts".as_ref(),
        "--json".as_ref(),
        mount.path().as_os_str(),
    ]);
    let seen = seen.ok().json();
    assert_eq!(of(&seen, "n0")["state"], "alive", "{seen}");
    assert_eq!(of(&seen, "n0")["pid"], mount.pid());
    assert!(!mount.backing().join(".firn").exists());
    mount.umount();
    let empty = host
        .run(["hosts".as_ref(), host.join("backing").as_os_str()])
        .ok();
    assert!(empty.stdout.contains("no host has it mounted"), "{empty:?}");
    let mount = FirnMount::new(&host, OPTIONS);
    let mut other = std::process::Command::new("setpriv");
    other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    other.arg(firn_tests::sandbox::firn_binary());
    other.args(["hosts".as_ref(), mount.backing().as_os_str()]);
    other.env("FIRN_RUNTIME_DIR", host.join("none"));
    let refused = firn_tests::run(&mut other).code(1);
    assert!(
        refused
            .stderr
            .contains("only the user that mounted, and root"),
        "{refused:?}"
    );
    mount.umount();
}
