//! Owners of transactions: what is left when they are gone.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use firn_client::owner_process;
use firn_protocol::{Owner, Reply, Request, TransactionStage, TransactionStatus};
use firn_tests::chunks::Control;
use firn_tests::command::wait_child;
use firn_tests::sandbox::kill;
use firn_tests::transaction::{behind, firn, firn_id, firn_with};
use firn_tests::tree::assert_same;
use firn_tests::{FirnMount, Sandbox, wait_until};

const MODES: [&str; 2] = [
    "arena-size=32M,chunk-size=1M,drain=commit",
    "arena-size=32M,chunk-size=1M,drain=commit,mode=shadow",
];
const LIMIT: Duration = Duration::from_secs(20);
/// `firn` and what it says of ECANCELED.
const FAILED: i32 = 1;

/// A process that does nothing until it is killed or its input is closed.
struct Idler(Child);

impl Idler {
    fn new() -> Self {
        let child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("start cat"))
    }

    fn begin(&self, mount: &FirnMount<'_>, sandbox: &Sandbox) {
        let pid = self.0.id().to_string();
        firn_with(sandbox, "begin", mount.path(), &["--owner", &pid]).ok();
    }

    fn kill(mut self) {
        kill(self.0.id(), libc::SIGKILL);
        wait_child(&mut self.0, LIMIT).expect("it ended");
    }

    fn exit(mut self) {
        drop(self.0.stdin.take());
        assert!(wait_child(&mut self.0, LIMIT).expect("it ended").success());
    }
}

fn transactions(mount: &FirnMount<'_>) -> Vec<TransactionStatus> {
    mount.status().transactions
}

fn await_abort(mount: &FirnMount<'_>) {
    wait_until("the transaction is aborted", LIMIT, || {
        transactions(mount).is_empty()
    });
}

fn begin_over(control: &mut Control) {
    let begin = Request::Begin {
        path: "".into(),
        owner: Owner::Connection,
        create: None,
    };
    assert_eq!(control.ask(&begin), Some(Reply::Done));
}

/// Proves S-tx-90.
#[test]
fn what_a_process_that_ended_left_open_is_aborted_at_once_while_firnd_lives() {
    for mode in MODES {
        let sandbox = Sandbox::new("owner");
        let mount = FirnMount::new(&sandbox, mode);
        fs::write(mount.join("kept"), "before").expect("write");
        fs::write(mount.join("gone"), "before").expect("write");
        mount.wait("drained", mount.path()).ok();
        let before = behind(mount.backing());
        for end in [Idler::kill, Idler::exit] {
            let owner = Idler::new();
            owner.begin(&mount, &sandbox);
            fs::write(mount.join("kept"), "after").expect("write");
            fs::write(mount.join("new"), "half").expect("write");
            fs::remove_file(mount.join("gone")).expect("remove");
            assert_eq!(transactions(&mount).len(), 1);
            end(owner);
            await_abort(&mount);
            assert_same(mode, &behind(mount.backing()), &before);
            assert_eq!(fs::read(mount.join("kept")).expect("read"), b"before");
            assert!(!mount.join("new").exists() && mount.join("gone").exists());
        }
        assert_eq!(mount.status().errors, []);
    }
}

/// Proves S-tx-90, S-tx-100, S-tx-102: the name of the top goes with its owner, whatever it is by then.
#[test]
fn a_new_top_and_a_new_name_go_with_their_owner() {
    for mode in MODES {
        let sandbox = Sandbox::new("owntop");
        let mount = FirnMount::new(&sandbox, mode);
        fs::create_dir(mount.join("old")).expect("mkdir");
        let before = behind(mount.backing());
        let owner = Idler::new();
        let pid = owner.0.id().to_string();
        let create = ["--create", "--owner", &pid];
        firn_with(&sandbox, "begin", &mount.join("made"), &create).ok();
        firn_with(&sandbox, "begin", &mount.join("old"), &["--owner", &pid]).ok();
        fs::rename(mount.join("made"), mount.join("made2")).expect("rename");
        fs::rename(mount.join("old"), mount.join("new")).expect("rename");
        fs::write(mount.join("made2/file"), "half").expect("write");
        fs::write(mount.join("new/file"), "half").expect("write");
        // The next transaction of the same owner has another path than the first.
        firn_with(&sandbox, "commit", &mount.join("new"), &["--begin"]).ok();
        fs::rename(mount.join("new"), mount.join("newer")).expect("rename");
        assert_eq!(transactions(&mount).len(), 2);
        assert!(transactions(&mount).iter().all(|one| one.owner.is_some()));
        owner.kill();
        await_abort(&mount);
        assert!(!mount.join("made").exists() && !mount.join("made2").exists());
        assert!(mount.join("new/file").exists() && !mount.join("newer").exists());
        fs::remove_file(mount.join("new/file")).expect("remove");
        fs::rename(mount.join("new"), mount.join("old")).expect("rename");
        assert_same(mode, &behind(mount.backing()), &before);
    }
}

/// Proves S-tx-92.
#[test]
fn what_an_owner_that_is_gone_left_is_not_committed_or_prepared() {
    for mode in MODES {
        let sandbox = Sandbox::new("orphan");
        let mount = FirnMount::new(&sandbox, mode);
        for verb in ["commit", "prepare"] {
            let owner = Idler::new();
            owner.begin(&mount, &sandbox);
            fs::write(mount.join("half"), "half").expect("write");
            let pid = owner.0.id();
            owner.kill();
            // At once: there is no instant at which it could still be committed.
            let outcome = firn_with(&sandbox, verb, mount.path(), &["--id", "3"]);
            outcome.code(FAILED).says(&format!("process {pid}"));
            assert!(!mount.join("half").exists());
            // Later requests are told the same, until the next begin.
            let again = firn_with(&sandbox, verb, mount.path(), &["--id", "3"]);
            again.code(FAILED).says("was gone").says("aborted");
            firn(&sandbox, "begin", mount.path()).ok();
            firn(&sandbox, "abort", mount.path()).ok();
        }
    }
}

/// Proves S-tx-93.
#[test]
fn a_transaction_that_is_prepared_outlives_its_owner() {
    for mode in MODES {
        let sandbox = Sandbox::new("outlives");
        let mount = FirnMount::new(&sandbox, mode);
        let owner = Idler::new();
        owner.begin(&mount, &sandbox);
        fs::write(mount.join("new"), "whole").expect("write");
        firn_id(&sandbox, "prepare", mount.path(), 5).ok();
        owner.kill();
        // A transaction elsewhere comes and goes: whatever is aborted for its owner is so by then.
        fs::create_dir(mount.backing().join("unused")).expect("mkdir");
        let stage = || transactions(&mount).first().map(|one| one.stage);
        assert_eq!(stage(), Some(TransactionStage::Prepared));
        firn_id(&sandbox, "commit", mount.path(), 5).ok();
        assert_eq!(
            fs::read(mount.backing().join("new")).expect("read"),
            b"whole"
        );
    }
}

/// Proves S-tx-94.
#[test]
fn another_process_commits_while_the_owner_lives_and_the_next_one_is_its_too() {
    let sandbox = Sandbox::new("another");
    let mount = FirnMount::new(&sandbox, MODES[0]);
    let owner = Idler::new();
    owner.begin(&mount, &sandbox);
    fs::write(mount.join("one"), "one").expect("write");
    firn_with(&sandbox, "commit", mount.path(), &["--begin"]).ok();
    fs::write(mount.join("two"), "two").expect("write");
    assert_eq!(transactions(&mount).len(), 1);
    owner.kill();
    await_abort(&mount);
    assert_eq!(fs::read(mount.backing().join("one")).expect("read"), b"one");
    assert!(!mount.join("two").exists());
}

/// Proves S-tx-91.
#[test]
fn a_connection_that_drops_aborts_what_was_begun_over_it() {
    for mode in MODES {
        let sandbox = Sandbox::new("drops");
        let mount = FirnMount::new(&sandbox, mode);
        let mut control = Control::new(&sandbox);
        begin_over(&mut control);
        fs::write(mount.join("half"), "half").expect("write");
        drop(control);
        await_abort(&mount);
        assert!(!mount.join("half").exists());

        // One that has committed what it began owns nothing more.
        let mut control = Control::new(&sandbox);
        begin_over(&mut control);
        fs::write(mount.join("whole"), "whole").expect("write");
        firn(&sandbox, "commit", mount.path()).ok();
        firn(&sandbox, "begin", mount.path()).ok();
        fs::write(mount.join("more"), "more").expect("write");
        drop(control);
        firn(&sandbox, "commit", mount.path()).ok();
        assert!(mount.backing().join("whole").exists() && mount.backing().join("more").exists());
    }
}

/// Proves S-tx-90.
#[test]
fn a_process_that_is_gone_or_another_one_by_now_cannot_own_a_transaction() {
    let sandbox = Sandbox::new("number");
    let mount = FirnMount::new(&sandbox, MODES[0]);
    let owner = Idler::new();
    let Owner::Process { pid, start_ticks } = owner_process(owner.0.id()).expect("it lives") else {
        panic!("a process");
    };
    let mut control = Control::new(&sandbox);
    let mut begin = |start_ticks| {
        let owner = Owner::Process { pid, start_ticks };
        control.ask(&Request::Begin {
            path: "".into(),
            owner,
            create: None,
        })
    };
    let refused = begin(start_ticks + 1);
    assert!(
        matches!(
            refused,
            Some(Reply::Error {
                errno: libc::ESRCH,
                ..
            })
        ),
        "{refused:?}"
    );
    assert_eq!(transactions(&mount), []);
    assert_eq!(begin(start_ticks), Some(Reply::Done));
    owner.kill();
    await_abort(&mount);
    let gone = pid.to_string();
    firn_with(&sandbox, "begin", mount.path(), &["--owner", &gone])
        .code(FAILED)
        .says("--owner");
}

/// Proves S-tx-95.
#[test]
fn the_status_shows_owner_age_and_bytes_of_each_open_transaction() {
    let sandbox = Sandbox::new("shown");
    let mount = FirnMount::new(&sandbox, MODES[0]);
    for name in ["a", "b", "c"] {
        fs::create_dir(mount.join(name)).expect("mkdir");
    }
    let owner = Idler::new();
    let pid = owner.0.id();
    let process = ["--owner", &pid.to_string()];
    firn_with(&sandbox, "begin", &mount.join("a"), &process).ok();
    let mut control = Control::new(&sandbox);
    let begin = Request::Begin {
        path: "b".into(),
        owner: Owner::Connection,
        create: None,
    };
    assert_eq!(control.ask(&begin), Some(Reply::Done));
    firn(&sandbox, "begin", &mount.join("c")).ok();
    fs::write(mount.join("a/file"), [1; 5000]).expect("write");
    let mut found = transactions(&mount);
    found.sort_by(|one, other| one.scope.cmp(&other.scope));
    let owners: Vec<_> = found
        .iter()
        .map(|one| one.owner.map(|owner| (owner.pid, owner.connection)))
        .collect();
    assert_eq!(
        owners,
        [Some((pid, false)), Some((std::process::id(), true)), None]
    );
    let bytes: Vec<_> = found.iter().map(|one| one.bytes).collect();
    assert_eq!(bytes, [5000, 0, 0]);
    assert!(
        found
            .iter()
            .all(|one| one.age_seconds.is_some_and(|age| age < LIMIT.as_secs_f64()))
    );
    let text = firn(&sandbox, "status", mount.path()).ok().stdout;
    for part in [
        format!("owner: process {pid}"),
        format!("owner: a connection of process {}", std::process::id()),
        "no owner".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    drop(control);
    owner.kill();
    wait_until("both are aborted", LIMIT, || {
        transactions(&mount).len() == 1
    });
    firn(&sandbox, "abort", &mount.join("c")).ok();
}
