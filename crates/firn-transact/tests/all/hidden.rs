//! Link counts never include Firn's own links, whatever step of a transaction is running when a program reads them.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::Verbs;
use firn_backing::{Access, Backing, Files, Names, RenameFlags, Volume};
use firn_sim::Hang;
use firn_sim::{SimBacking, suite};
use firn_transact::{Mode, Object, TransactionError, TransactionalBacking};

type SimInode = Arc<Object<SimBacking>>;

/// How long a test waits for a thread that may itself wait for the stopped thread.
const PATIENCE: Duration = Duration::from_millis(10);
const KEPT_NAME: &str = "b";

/// Returns a transaction with a changed file. The file had the names `a` and `b`, and lost the name by which it was
/// found.
fn begun(mode: Mode) -> (TransactionalBacking<SimBacking>, SimInode) {
    let sim = SimBacking::new();
    let root = sim.root();
    let (inode, file, _) = sim
        .create(&suite::own_caller(), &root, OsStr::new("a"), 0o644)
        .expect("create");
    sim.write_at(&file, &[IoSlice::new(b"before")], 0)
        .expect("write");
    sim.link(&inode, &root, OsStr::new(KEPT_NAME))
        .expect("link");
    drop((inode, file));
    let backing = TransactionalBacking::open(sim)
        .expect("open")
        .0
        .in_mode(mode);
    let root = backing.root();
    let (inode, _) = backing.lookup(&root, OsStr::new("a")).expect("lookup");
    backing.begin(&root, b"").expect("begin");
    let file = backing.open(&inode, Access::ReadWrite).expect("open");
    backing
        .write_at(&file, &[IoSlice::new(b"after")], 0)
        .expect("write");
    drop(file);
    (backing, inode)
}

fn links(backing: &TransactionalBacking<SimBacking>, inode: &SimInode) -> u32 {
    backing.attr(inode).expect("attr").nlink
}

/// Waits until the call hangs. Returns false if the thread ended without that call.
fn hangs<T>(hang: &Hang, thread: &thread::ScopedJoinHandle<'_, T>) -> bool {
    loop {
        if hang.is_reached() {
            return true;
        }
        if thread.is_finished() {
            return hang.is_reached();
        }
        thread::yield_now();
    }
}

/// Stops `run` at each of its calls and reads the link count there. Repeats this with the reader stopped at each of its
/// own calls until `run` has ended.
fn at_every_call(
    mode: Mode,
    before: impl Fn(&TransactionalBacking<SimBacking>),
    run: impl Fn(&TransactionalBacking<SimBacking>) -> Result<(), TransactionError> + Sync,
    right: &[u32],
) {
    for at in 1.. {
        let mut asked = 0;
        loop {
            let (backing, inode) = begun(mode);
            before(&backing);
            let disk = backing.base().clone();
            let told = format!("{mode:?}, call {at}");
            let reached = thread::scope(|threads| {
                let hang = disk.hang_at(disk.steps() + at);
                let runner = threads.spawn(|| run(&backing));
                let reached = hangs(&hang, &runner);
                if reached && asked == 0 {
                    let found = links(&backing, &inode);
                    assert!(right.contains(&found), "{told}: {found} links");
                }
                let asker = reached.then(|| {
                    let stopped = disk.hang_at(disk.steps() + asked + 1);
                    let asker = threads.spawn(|| links(&backing, &inode));
                    (hangs(&stopped, &asker), stopped, asker)
                });
                hang.release();
                let (is_stopped, stopped, asker) = match asker {
                    None => {
                        return runner
                            .join()
                            .expect("join")
                            .map(|()| false)
                            .expect("it goes through");
                    }
                    Some(asker) => asker,
                };
                // Lets `run` go to its end, or until it needs a lock that the reader has.
                let patience = Instant::now();
                while !runner.is_finished() && patience.elapsed() < PATIENCE {
                    thread::yield_now();
                }
                stopped.release();
                let ended = runner.join().expect("join");
                let found = asker.join().expect("join");
                assert!(
                    right.contains(&found),
                    "{told}, call {asked} of the asker: {found} links"
                );
                ended.unwrap_or_else(|error| panic!("{told}: {error}"));
                asked = if is_stopped { asked + 1 } else { u64::MAX };
                true
            });
            if !reached {
                println!("{mode:?}: {at} calls");
                return;
            }
            if asked == u64::MAX {
                break;
            }
        }
    }
}

fn remove(backing: &TransactionalBacking<SimBacking>) {
    backing
        .unlink(&backing.root(), OsStr::new("a"))
        .expect("unlink");
}

#[test]
fn regression_a_commit_shows_no_link_of_firns_own_at_any_call() {
    let commit =
        |backing: &TransactionalBacking<SimBacking>| Ok(backing.commit(&backing.root(), 1)?);
    for mode in [Mode::Buffer, Mode::Shadow] {
        at_every_call(mode, remove, commit, &[1]);
    }
    let in_steps = |backing: &TransactionalBacking<SimBacking>| {
        backing.prepare(&backing.root(), 1)?;
        backing.decide(&backing.root(), 1)?;
        Ok(backing.apply(b"")?)
    };
    at_every_call(Mode::Buffer, remove, in_steps, &[1]);
}

#[test]
fn regression_an_abort_shows_no_link_of_firns_own_at_any_call() {
    for mode in [Mode::Buffer, Mode::Shadow] {
        let prepared = |backing: &TransactionalBacking<SimBacking>| {
            remove(backing);
            backing.prepare(&backing.root(), 1).expect("prepare");
        };
        at_every_call(
            mode,
            prepared,
            |backing| Ok(backing.abort(&backing.root())?),
            &[1, 2],
        );
    }
}

#[test]
fn regression_a_name_that_is_replaced_shows_no_link_of_firns_own_at_any_call() {
    for mode in [Mode::Buffer, Mode::Shadow] {
        let made = |backing: &TransactionalBacking<SimBacking>| {
            backing
                .create(
                    &suite::own_caller(),
                    &backing.root(),
                    OsStr::new("new"),
                    0o644,
                )
                .map(drop)
                .expect("create");
        };
        let replace = |backing: &TransactionalBacking<SimBacking>| {
            let root = backing.root();
            let flags = RenameFlags::empty();
            Ok(backing.rename(&root, OsStr::new("new"), &root, OsStr::new("a"), flags)?)
        };
        at_every_call(mode, made, replace, &[1, 2]);
    }
}

#[test]
fn regression_a_link_that_could_not_be_removed_is_not_shown() {
    for mode in [Mode::Buffer, Mode::Shadow] {
        let (backing, inode) = begun(mode);
        remove(&backing);
        let disk = backing.base().clone();
        backing.prepare(&backing.root(), 1).expect("prepare");
        backing.decide(&backing.root(), 1).expect("decide");
        disk.set_plan(|op, _| {
            (op == "rmdir").then_some(firn_sim::Fault::Error(firn_backing::Errno::IO))
        });
        // The application failed only to remove leftovers, which the next mount removes.
        backing.apply(b"").expect("apply");
        disk.clear_plan();
        assert_eq!(links(&backing, &inode), 1, "{mode:?}");
        backing.begin(&backing.root(), b"").expect("begin");
        backing
            .unlink(&backing.root(), OsStr::new(KEPT_NAME))
            .expect("unlink");
        assert_eq!(links(&backing, &inode), 0, "{mode:?}");
        backing.abort(&backing.root()).expect("abort");
        assert_eq!(links(&backing, &inode), 1, "{mode:?}");
    }
}
