//! Tests of the machine over a simulated backing: the steps that a request takes, and its result after a failure of any
//! step.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;

use crate::conflict::AccessedFile;
use firn_backing::{Access, Backing, Caller, Errno, Names, Volume};
use firn_hosts::{Expected, Members};
use firn_sim::{Fault, SimBacking, Tree, tree};

use super::*;
use crate::error::ScopeError;
use crate::object::Object;
use crate::paths::names_in;
use crate::scope::Stage;
use crate::shadow::Mode;

type Store = TransactionalBacking<SimBacking>;

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const TOP: &[u8] = b"";

/// A mount without programs. It records what the machine requests of it.
struct SimMount<'a> {
    store: &'a Store,
    requested: RefCell<Vec<String>>,
    /// Runs the other hosts while the request waits for them. Returns false to end the wait.
    others: &'a dyn Fn() -> bool,
    is_drained: bool,
    /// Whether pending data cannot be drained.
    drain_fails: Cell<bool>,
}

impl<'a> SimMount<'a> {
    fn of(store: &'a Store) -> Self {
        Self {
            store,
            requested: RefCell::default(),
            others: &|| false,
            is_drained: true,
            drain_fails: Cell::new(false),
        }
    }

    fn record(&self, request: String) {
        self.requested.borrow_mut().push(request);
    }

    fn take_requested(&self) -> Vec<String> {
        self.requested.take()
    }
}

impl Mount<SimBacking> for SimMount<'_> {
    fn directory_at(&self, path: &[u8]) -> Result<Arc<Object<SimBacking>>, TransactionError> {
        let mut dir = self.store.root();
        for name in names_in(path) {
            dir = match self.store.lookup(&dir, name) {
                Ok((found, _)) => found,
                Err(Errno::NOENT) => return Err(ScopeError::Missing.into()),
                Err(errno) => return Err(errno.into()),
            };
        }
        Ok(dir)
    }

    fn must_be_writable(&self, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn quiesce<T>(
        &self,
        target: &QuiesceTarget<'_, SimBacking>,
        pending: Pending,
        work: impl FnOnce(&Arc<Object<SimBacking>>) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        let root = match target.root() {
            Some(root) => Arc::clone(root),
            None => self.directory_at(&target.path_now())?,
        };
        self.record(format!("quiesce {pending:?}"));
        if pending == Pending::Drain && self.drain_fails.get() {
            return Err(Errno::NOSPC.into());
        }
        work(&root)
    }

    fn is_drained(&self, _: &[u8]) -> bool {
        self.is_drained
    }

    fn write_back(&self, _: &[u8]) {
        self.record("write back".into());
    }

    fn forget_names(&self, _: &[&[u8]]) {
        self.record("forget names".into());
    }

    fn forget_directory(&self, _: &[u8]) {
        self.record("forget directory".into());
    }

    fn begin_accesses(&self, _: &[u8]) {
        self.record("begin accesses".into());
    }

    fn take_accesses(&self, _: &[u8]) -> Vec<AccessedFile> {
        self.record("take accesses".into());
        Vec::new()
    }

    fn put_accesses_back(&self, _: Vec<AccessedFile>) {
        self.record("put accesses back".into());
    }

    fn end_accesses(&self, _: &[u8]) {
        self.record("end accesses".into());
    }

    fn begin_wait(&self) -> impl FnMut() -> bool {
        || (self.others)()
    }

    fn is_any_living(&self, hosts: &[String]) -> Result<bool, Errno> {
        Ok(!hosts.is_empty())
    }

    fn note_abort(&self, _serial: u64) {}

    fn apply_later(&self) {
        self.record("apply later".into());
    }

    fn note(&self, event: Event, _: &[u8], _: Option<u64>) {
        self.record(format!("{event:?}"));
    }
}

/// Runs a request. Returns the names of its steps, and its result.
fn trace<'a>(
    store: &'a Store,
    mount: &'a SimMount<'a>,
    verb: Verb<'a>,
    path: &[u8],
) -> (Vec<&'static str>, Result<Answer, TransactionError>) {
    let machine = Machine::new(store, mount);
    let mut names = Vec::new();
    let mut next = machine.find_first_step(verb, path);
    loop {
        match next {
            Ok(Step::Over(answer)) => return (names, Ok(answer)),
            Ok(step) => {
                names.push(step.name());
                next = machine.take_step(step);
            }
            Err(error) => return (names, Err(error)),
        }
    }
}

/// Runs a request at the top, on a mount of one host. Returns the names of its steps, and its result.
fn steps(store: &Store, verb: Verb<'_>) -> (Vec<&'static str>, Result<Answer, TransactionError>) {
    trace(store, &SimMount::of(store), verb, TOP)
}

/// Writes `bytes` to a file in the top directory, which is created if it is missing.
fn put(on: &impl Backing, name: &str, bytes: &[u8]) {
    let (root, name) = (on.root(), OsStr::new(name));
    let file = match on.lookup(&root, name) {
        Ok((found, _)) => on.open(&found, Access::ReadWrite).expect("open"),
        Err(_) => on.create(&ME, &root, name, 0o644).expect("create").1,
    };
    assert_eq!(
        on.write_at(&file, &[IoSlice::new(bytes)], 0),
        Ok(bytes.len())
    );
}

fn seen(on: &impl Backing) -> Tree {
    tree(on).expect("tree")
}

fn disk() -> SimBacking {
    let disk = SimBacking::new();
    put(&disk, "file", b"old");
    disk.sync_all().expect("sync");
    disk
}

fn open(disk: &SimBacking) -> Store {
    TransactionalBacking::open_with_history(disk.clone(), 2)
        .expect("open")
        .0
}

fn host(disk: &SimBacking, name: &str, mode: Mode) -> Store {
    let members = Members {
        host: name.into(),
        expected: Expected::Count(2),
    };
    let opened = TransactionalBacking::open_of_members(disk.clone(), members);
    opened.expect("open").0.in_mode(mode)
}

fn stages(store: &Store) -> Vec<Stage> {
    let all = store.transactions().into_iter();
    all.map(|transaction| transaction.stage).collect()
}

fn committed(id: u64) -> Result<Answer, TransactionError> {
    Ok(Answer::Committed(Committed {
        id,
        not_applied_on: Vec::new(),
        path_after: TOP.to_vec(),
    }))
}

const COMMIT: Verb<'_> = Verb::Commit(CommitOptions {
    id: None,
    begins_next: false,
    applies_later: false,
});

fn commit(id: u64, begins_next: bool, applies_later: bool) -> Verb<'static> {
    Verb::Commit(CommitOptions {
        id: Some(id),
        begins_next,
        applies_later,
    })
}

#[test]
fn each_request_takes_the_steps_of_the_drawing() {
    let disk = disk();
    let store = open(&disk);
    let done = Ok(Answer::Done);
    let none = || Err(StageError::NoTransaction.into());
    for verb in [Verb::Prepare(1), COMMIT, Verb::Abort] {
        assert_eq!(steps(&store, verb), (vec![], none()), "{verb:?}");
    }
    assert_eq!(
        steps(&store, Verb::Begin),
        (vec!["clear", "begin"], done.clone())
    );
    put(&store, "file", b"one");
    assert_eq!(
        steps(&store, Verb::Prepare(5)),
        (vec!["apply before", "prepare", "vote"], done.clone())
    );
    assert_eq!(
        steps(&store, Verb::Prepare(5)),
        (vec!["vote"], done.clone())
    );
    let other = Err(StageError::OtherId {
        found: 5,
        wanted: 6,
    }
    .into());
    assert_eq!(steps(&store, Verb::Prepare(6)), (vec![], other));
    assert_eq!(
        steps(&store, COMMIT),
        (vec!["decide", "apply", "await hosts"], committed(5))
    );
    assert_eq!(
        steps(&store, Verb::Begin),
        (vec!["clear", "begin"], done.clone())
    );
    put(&store, "file", b"two");
    assert_eq!(
        steps(&store, COMMIT),
        (
            vec!["apply before", "decide", "apply", "await hosts"],
            committed(6)
        )
    );
    assert_eq!(
        steps(&store, Verb::Restore(5)),
        (vec!["finish undo", "restore"], done.clone())
    );
    assert_eq!(
        steps(&store, Verb::Begin),
        (vec!["clear", "begin"], done.clone())
    );
    put(&store, "file", b"six");
    assert_eq!(
        steps(&store, Verb::Restore(5)),
        (vec!["finish undo", "apply before", "restore"], done.clone())
    );
    assert_eq!(seen(&store)[&b"file"[..]].content, b"one");
    assert_eq!(
        steps(&store, Verb::Begin),
        (vec!["clear", "begin"], done.clone())
    );
    assert_eq!(
        steps(&store, Verb::Prepare(9)),
        (vec!["apply before", "prepare", "vote"], done.clone())
    );
    assert_eq!(
        steps(&store, Verb::Restore(9)),
        (vec!["finish undo", "finish commit"], done.clone())
    );
    let maker = TopMaker {
        caller: &ME,
        mode: 0o755,
    };
    let mount = SimMount::of(&store);
    let created = trace(&store, &mount, Verb::Create(maker), b"dir");
    assert_eq!(created, (vec!["create"], done.clone()));
    let aborted = trace(&store, &mount, Verb::Abort, b"dir");
    assert_eq!(aborted, (vec!["call off", "undo"], done));
    assert_eq!(stages(&store), []);
}

/// Proves S-tx-62.
#[test]
fn a_commit_that_is_asked_for_again_is_the_one_that_is_meant() {
    let store = open(&disk());
    assert!(steps(&store, Verb::Begin).1.is_ok());
    put(&store, "file", b"one");
    let mount = SimMount::of(&store);
    let (names, answer) = trace(&store, &mount, commit(5, true, true), TOP);
    assert_eq!(names, ["apply before", "decide", "apply"]);
    assert_eq!(answer, committed(5));
    assert_eq!(
        mount.take_requested(),
        [
            "write back",
            "quiesce Drain",
            "Decided",
            "Begin",
            "apply later"
        ]
    );
    assert_eq!(stages(&store), [Stage::Decided(5), Stage::Open]);
    assert_eq!(
        steps(&store, commit(5, true, true)),
        (vec!["decide", "apply"], committed(5))
    );
    assert_eq!(stages(&store), [Stage::Decided(5), Stage::Open]);
    // Without a number, the request is for the next commit, and the earlier commit is applied first.
    let (names, answer) = steps(&store, COMMIT);
    assert_eq!(names, ["apply before", "decide", "apply", "await hosts"]);
    assert_eq!(answer, committed(6));
    assert_eq!(stages(&store), []);
}

/// Proves S-tx-10.
#[test]
fn what_an_earlier_firnd_prepared_is_applied_before_the_next_one_begins() {
    let disk = disk();
    let store = open(&disk);
    assert!(steps(&store, Verb::Begin).1.is_ok());
    put(&store, "file", b"one");
    assert!(steps(&store, Verb::Prepare(5)).1.is_ok());
    drop(store);
    let store = open(&disk);
    let mount = SimMount::of(&store);
    let (names, answer) = trace(&store, &mount, commit(5, true, true), TOP);
    assert_eq!(names, ["decide", "apply", "begin", "await hosts"]);
    assert_eq!(answer, committed(5));
    assert_eq!(
        mount.take_requested(),
        [
            "Decided",
            "Applied",
            "Ended",
            "forget names",
            "quiesce Drain",
            "Begin"
        ]
    );
    assert_eq!(stages(&store), [Stage::Open]);
}

#[test]
fn a_begin_applies_the_commit_before_only_where_data_waits_for_it() {
    for is_drained in [true, false] {
        let store = open(&disk());
        let mount = SimMount {
            is_drained,
            ..SimMount::of(&store)
        };
        for verb in [Verb::Begin, commit(5, false, true), Verb::Begin] {
            assert!(trace(&store, &mount, verb, TOP).1.is_ok());
        }
        let expected = if is_drained {
            vec![Stage::Decided(5), Stage::Open]
        } else {
            vec![Stage::Open]
        };
        assert_eq!(stages(&store), expected);
    }
}

#[test]
fn where_data_cannot_be_drained_the_transaction_stays_open() {
    let store = open(&disk());
    let mount = SimMount::of(&store);
    mount.drain_fails.set(true);
    assert!(trace(&store, &mount, Verb::Begin, TOP).1.is_err());
    assert_eq!(stages(&store), []);
    mount.drain_fails.set(false);
    assert!(trace(&store, &mount, Verb::Begin, TOP).1.is_ok());
    mount.drain_fails.set(true);
    for verb in [Verb::Prepare(5), COMMIT] {
        assert!(trace(&store, &mount, verb, TOP).1.is_err(), "{verb:?}");
        assert_eq!(stages(&store), [Stage::Open]);
    }
    // An abort drains nothing.
    assert!(trace(&store, &mount, Verb::Abort, TOP).1.is_ok());
}

const OF_HOSTS: [&str; 6] = [
    "apply before",
    "prepare",
    "vote",
    "decide",
    "apply",
    "await hosts",
];

#[test]
fn several_hosts_vote_before_each_decides() {
    let disk = disk();
    let [a, b] = ["a", "b"].map(|name| host(&disk, name, Mode::Buffer));
    for store in [&a, &b] {
        assert!(steps(store, Verb::Begin).1.is_ok());
    }
    put(&a, "of-a", b"a");
    put(&b, "of-b", b"b");
    // The other host begins its commit while this host waits for it. It waits for this host only until the vote.
    let has_come = Cell::new(false);
    let others = || {
        let is_first = !has_come.replace(true);
        if is_first {
            let (names, answer) = steps(&b, commit(7, false, false));
            assert_eq!(names, OF_HOSTS);
            let Ok(Answer::Committed(answer)) = answer else {
                panic!("not committed: {answer:?}");
            };
            assert_eq!(answer.not_applied_on, ["a"]);
        }
        is_first
    };
    let mount = SimMount {
        others: &others,
        ..SimMount::of(&a)
    };
    let (names, answer) = trace(&a, &mount, commit(7, false, false), TOP);
    assert_eq!((names, answer), (OF_HOSTS.to_vec(), committed(7)));
    assert!(mount.take_requested().contains(&"end accesses".to_owned()));
    let tree = seen(&open(&disk.fork()));
    assert!(tree.contains_key(&b"of-a"[..]) && tree.contains_key(&b"of-b"[..]));
}

/// Proves S-tx-71.
#[test]
fn a_transaction_is_open_again_where_the_other_hosts_do_not_come() {
    for verb in [Verb::Prepare(7), commit(7, true, false)] {
        let disk = disk();
        let [a, _b] = ["a", "b"].map(|name| host(&disk, name, Mode::Buffer));
        assert!(steps(&a, Verb::Begin).1.is_ok());
        let mount = SimMount::of(&a);
        let (names, answer) = trace(&a, &mount, verb, TOP);
        assert_eq!(names, ["apply before", "prepare", "vote"]);
        assert!(
            matches!(
                answer,
                Err(TransactionError::Vote(VoteError::GivenUp { .. }))
            ),
            "{answer:?}"
        );
        assert_eq!(stages(&a), [Stage::Open]);
        let requested = mount.take_requested();
        assert_eq!(
            requested.last().map(String::as_str),
            Some("put accesses back")
        );
    }
}

#[test]
fn in_shadow_mode_the_next_one_begins_once_all_hosts_have_applied_the_last() {
    let disk = disk();
    let [a, b] = ["a", "b"].map(|name| host(&disk, name, Mode::Shadow));
    for store in [&a, &b] {
        assert!(steps(store, Verb::Begin).1.is_ok());
    }
    let looks = Cell::new(0);
    let others = || {
        looks.set(looks.get() + 1);
        match looks.get() {
            // Host `b` publishes its list, and finds the verdict on both lists.
            1 => drop(steps(&b, Verb::Prepare(7))),
            2 => drop(steps(&b, commit(7, false, false))),
            _ => return false,
        }
        true
    };
    let mount = SimMount {
        others: &others,
        ..SimMount::of(&a)
    };
    let (names, answer) = trace(&a, &mount, commit(7, true, true), TOP);
    let mut expected = OF_HOSTS.to_vec();
    expected.push("begin");
    assert_eq!((names, answer), (expected, committed(7)));
    assert_eq!(stages(&a), [Stage::Open]);
    let requested = mount.take_requested();
    let position_of = |what: &str| requested.iter().position(|request| request == what);
    assert!(
        position_of("Applied") < position_of("Begin"),
        "{requested:?}"
    );
    assert!(!requested.contains(&"apply later".into()), "{requested:?}");
}

/// Returns requests, each with the content of `file` and the stages that it ends with.
fn requests() -> Vec<(Verb<'static>, &'static [u8], Vec<Stage>)> {
    vec![
        (commit(5, false, false), b"new", vec![]),
        (commit(5, true, false), b"new", vec![Stage::Open]),
        (Verb::Prepare(5), b"new", vec![Stage::Prepared(5)]),
        (Verb::Abort, b"old", vec![]),
        (Verb::Restore(1), b"old", vec![]),
    ]
}

/// Makes a store whose last commit is 1, with an open transaction that has changed a file.
fn store_with_change() -> (SimBacking, Store) {
    let disk = disk();
    let store = open(&disk);
    for verb in [Verb::Begin, commit(1, false, false), Verb::Begin] {
        assert!(steps(&store, verb).1.is_ok());
    }
    put(&store, "file", b"new");
    put(&store, "made", b"made");
    (disk, store)
}

/// Proves S-tx-62.
#[test]
fn where_a_commit_cannot_be_applied_the_next_transaction_is_given_up_until_it_is_asked_for_again() {
    let (disk, store) = store_with_change();
    let mount = SimMount::of(&store);
    let machine = Machine::new(&store, &mount);
    let verb = commit(5, true, false);
    let mut step = machine.find_first_step(verb, TOP).expect("it is open");
    while !matches!(step, Step::Apply { .. }) {
        step = machine.take_step(step).expect("nothing fails yet");
    }
    assert_eq!(stages(&store), [Stage::Decided(5), Stage::Open]);
    let mut is_first = true;
    disk.set_plan(move |_, _| std::mem::take(&mut is_first).then_some(Fault::Error(Errno::NOSPC)));
    assert!(machine.take_step(step).is_err());
    assert_eq!(stages(&store), [Stage::Decided(5)]);
    assert_eq!(machine.run(verb, TOP), committed(5));
    assert_eq!(stages(&store), [Stage::Open]);
}

/// Proves S-tx-62.
#[test]
fn a_request_that_failed_at_any_call_of_the_backing_goes_on_when_it_is_made_again() {
    for (verb, content, expected) in requests() {
        for at in 0.. {
            let (disk, store) = store_with_change();
            let mount = SimMount::of(&store);
            let machine = Machine::new(&store, &mount);
            let step_to_fail = disk.steps() + at;
            disk.set_plan(move |_, step| {
                (step == step_to_fail).then_some(Fault::Error(Errno::NOSPC))
            });
            let first = machine.run(verb, TOP);
            let is_past = disk.steps() < step_to_fail;
            disk.clear_plan();
            let context = format!("{verb:?}, call {at}: {first:?}");
            if first.is_err() {
                match machine.run(verb, TOP) {
                    Ok(_) => {}
                    // The request failed after the transaction had ended.
                    Err(TransactionError::Stage(StageError::NoTransaction)) => {}
                    Err(error) => panic!("{context}, then {error}"),
                }
            }
            let file = seen(&store).remove(&b"file"[..]);
            assert_eq!(
                file.map(|file| file.content),
                Some(content.to_vec()),
                "{context}"
            );
            assert_eq!(stages(&store), expected, "{context}");
            disk.fsck().expect("fsck");
            if is_past {
                break;
            }
        }
    }
}

/// Commits on hosts `a` and `b`, while call number `at` of host `a` fails. Returns the disk, the store of `a`, its
/// answer, and whether its commit made fewer calls than `at`.
fn commit_of_hosts_that_fails(
    at: u64,
) -> (SimBacking, Store, Result<Answer, TransactionError>, bool) {
    let disk = disk();
    let disk_of_b = disk.another_process();
    let [a, b] =
        [(&disk, "a"), (&disk_of_b, "b")].map(|(disk, name)| host(disk, name, Mode::Buffer));
    for store in [&a, &b] {
        assert!(steps(store, Verb::Begin).1.is_ok());
    }
    put(&a, "of-a", b"a");
    let has_come = Cell::new(false);
    let others = || {
        let is_first = !has_come.replace(true);
        if is_first {
            drop(steps(&b, commit(7, false, false)));
        }
        is_first
    };
    let step_to_fail = disk.steps() + at;
    disk.set_plan(move |_, step| (step == step_to_fail).then_some(Fault::Error(Errno::NOSPC)));
    let mount = SimMount {
        others: &others,
        ..SimMount::of(&a)
    };
    let answer = trace(&a, &mount, commit(7, true, false), TOP).1;
    let is_past = disk.steps() < step_to_fail;
    disk.clear_plan();
    drop(b);
    (disk, a, answer, is_past)
}

/// Proves S-tx-62.
#[test]
fn regression_a_commit_that_is_asked_for_again_after_it_was_applied_is_not_the_next_one() {
    let mut asked_again = 0;
    for at in 0.. {
        let (disk, store, first, is_past) = commit_of_hosts_that_fails(at);
        let is_applied =
            store.lower.present_commit_id(TOP) == Ok(Some(7)) && stages(&store) == [Stage::Open];
        if first.is_err() && is_applied {
            let context = format!("call {at}: {first:?}");
            put(&store, "later", b"later");
            let again = steps(&store, commit(7, true, false)).1;
            let Ok(Answer::Committed(Committed { id: 7, .. })) = again else {
                panic!("{context}, then {again:?}");
            };
            assert_eq!(stages(&store), [Stage::Open], "{context}");
            let committed = seen(&open(&disk.fork()));
            assert!(!committed.contains_key(&b"later"[..]), "{context}");
            // An abort concerns the next transaction, not the applied commit.
            let mount = SimMount::of(&store);
            let machine = Machine::new(&store, &mount);
            assert!(machine.run(Verb::Abort, TOP).is_ok(), "{context}");
            assert_eq!(stages(&store), [], "{context}");
            asked_again += 1;
        }
        if is_past {
            break;
        }
    }
    assert!(
        asked_again > 0,
        "no call fails after the commit was applied"
    );
}

/// Proves S-tx-41.
#[test]
fn a_crash_at_any_call_of_a_commit_leaves_one_that_can_be_asked_for_again_or_the_old_tree() {
    for begins_next in [false, true] {
        for at in 0.. {
            let (disk, store) = store_with_change();
            let crash_at = disk.steps() + at;
            disk.crash_at(crash_at);
            let verb = commit(5, begins_next, false);
            let answer = Machine::new(&store, &SimMount::of(&store)).run(verb, TOP);
            let is_past = !disk.is_dead();
            drop(store);
            disk.revive();
            let context = format!("call {at}: {answer:?}");
            let store = open(&disk);
            let again = steps(&store, commit(5, false, false)).1;
            let is_committed = store.lower.present_commit_id(TOP) == Ok(Some(5));
            assert!(is_committed || again.is_err(), "{context}, then {again:?}");
            assert!(is_committed || answer.is_err(), "{context}");
            let content: &[u8] = if is_committed { b"new" } else { b"old" };
            assert_eq!(seen(&store)[&b"file"[..]].content, content, "{context}");
            assert_eq!(stages(&store), [], "{context}");
            disk.fsck().expect("fsck");
            if is_past {
                break;
            }
        }
    }
}
