//! Hosts at a ballot on one simulated disk. At each call, one host dies or is overtaken by the others.

use std::cell::Cell;

use firn_backing::{Backing, Errno, Volume};
use firn_hosts::{
    Ballot, DecisionStep, Joined, OwnError, Participation, Plan, Progress, Protocol, Unit, VoteDir,
    own,
};
use firn_sim::SimBacking;
use firn_sim::suite::own_caller;

const DIR: &str = "ballot";
/// Maximum number of calls of a host; no test makes this many.
const STEPS_MAX: u64 = 200;

/// Protocol of the tests: after the decision `false`, all hosts stop and then one host undoes the changes.
struct Undo;

impl Protocol for Undo {
    type Decision = bool;

    fn plan(&self, commit: &bool) -> Plan {
        Plan {
            stops_first: !commit,
            stages: if *commit {
                Vec::new()
            } else {
                vec![vec![Unit::Part("undo".to_owned())]]
            },
        }
    }
}

fn disk() -> SimBacking {
    let disk = SimBacking::new();
    disk.set_owner(&disk.root(), Some(own_caller().uid), None)
        .expect("set_owner");
    disk.sync_all().expect("sync");
    disk
}

fn join(on: &SimBacking, host: &str) -> Result<Joined, OwnError> {
    let dir = VoteDir::make(on, &on.root(), DIR, host)?;
    Ok(Ballot::in_dir(dir, Undo).join(b"")?)
}

/// Does what a host does with a ballot: decides `wanted`, carries out the decision that counts, and leaves. Returns
/// whether the host's part is over.
fn end(
    on: &SimBacking,
    host: &str,
    wanted: bool,
    work: &dyn Fn() -> Result<(), Errno>,
) -> Result<bool, OwnError> {
    let Some(dir) = VoteDir::find(on, &on.root(), DIR, host)? else {
        return Ok(true);
    };
    let ballot = Ballot::in_dir(dir, Undo);
    if !ballot.is_taking_part()? {
        ballot.remove_if_over()?;
        return Ok(true);
    }
    ballot.decide(&wanted)?;
    match ballot.carry_out(|_| work())? {
        Progress::Done => ballot.leave()?,
        Progress::Waits(_) => return Ok(false),
        Progress::Gone => {}
    }
    Ok(true)
}

fn names(on: &SimBacking) -> Vec<String> {
    let names = own::list(on, &on.root()).expect("list").into_iter();
    names
        .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
        .collect()
}

#[test]
fn a_decision_is_carried_out_and_nothing_stays_for_every_death_at_every_call() {
    for (commit, step) in (1..STEPS_MAX).flat_map(|step| [(false, step), (true, step)]) {
        let told = format!("commit {commit}, step {step}");
        let a = disk();
        let b = a.another_process();
        for (on, host) in [(&a, "a"), (&b, "b")] {
            assert_eq!(join(on, host), Ok(Joined::Yes), "{told}");
        }
        let undone = Cell::new(0);
        let undo = || {
            undone.set(undone.get() + 1);
            Ok(())
        };
        a.crash_at(a.steps() + step);
        let mut is_over = false;
        for _ in 0..4 {
            // A host that died continues in the next round.
            is_over = end(&a, "a", commit, &undo).unwrap_or(false);
            is_over &=
                end(&b, "b", !commit, &undo).expect("another host's death is not in the way");
            if a.is_dead() {
                a.revive();
                a.clear_plan();
                is_over = false;
            }
            if is_over {
                break;
            }
        }
        assert!(is_over, "{told}");
        VoteDir::remove_retired(&b, &b.root()).expect("remove");
        assert_eq!(names(&b), [""; 0], "{told}");
        a.fsck().expect("fsck");
    }
}

/// Another host joins while the last hosts end the ballot.
#[test]
fn a_host_that_comes_late_takes_part_in_the_next_ballot_or_in_none() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let late = a.another_process();
        assert_eq!(join(&a, "a"), Ok(Joined::Yes), "step {step}");
        let hang = late.hang_at(step);
        let joined = std::thread::scope(|scope| {
            let coming = scope.spawn(|| join(&late, "late"));
            while !hang.is_reached() && !coming.is_finished() {
                std::thread::yield_now();
            }
            // `a` waits for the late host if it saw that the late host takes part.
            end(&a, "a", false, &|| Ok(())).expect("end");
            hang.release();
            coming.join().expect("a host")
        });
        let found = VoteDir::find(&a, &a.root(), DIR, "a").expect("find");
        let members = found.map_or(Vec::new(), |dir| dir.hosts("in-").expect("hosts"));
        let takes_part = members.contains(&"late".to_owned());
        match joined {
            Ok(Joined::Yes) => assert!(takes_part, "step {step}"),
            Ok(Joined::Over) | Err(OwnError::Backing(Errno::NOENT | Errno::STALE)) => {
                assert!(!takes_part, "step {step}");
            }
            Err(error) => panic!("step {step}: {error}"),
        }
    }
}

/// A host that dies while it removes the directory and never comes back does not block the next ballot of that name.
#[test]
fn the_next_host_removes_what_a_lost_host_was_removing() {
    let mut taken_over = 0;
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        for (on, host) in [(&a, "a"), (&b, "b")] {
            assert_eq!(join(on, host), Ok(Joined::Yes), "step {step}");
        }
        assert_eq!(end(&b, "b", true, &|| Ok(())), Ok(true), "step {step}");
        a.crash_at(a.steps() + step);
        drop(end(&a, "a", true, &|| Ok(())));
        if !a.is_dead() {
            break;
        }
        let found = VoteDir::find(&b, &b.root(), DIR, "b").expect("find");
        let has_left = |dir: &VoteDir<'_, SimBacking>| {
            let left = dir.hosts("left-").expect("hosts");
            left.contains(&"a".to_owned())
        };
        // If `a` had not left the ballot, its part waits for `a` or the next holder of its lease.
        if found.as_ref().is_some_and(|dir| !has_left(dir)) {
            continue;
        }
        taken_over += usize::from(found.is_some());
        drop(found);
        assert_eq!(end(&b, "b", true, &|| Ok(())), Ok(true), "step {step}");
        VoteDir::remove_retired(&b, &b.root()).expect("remove");
        assert_eq!(names(&b), [""; 0], "step {step}");
    }
    assert!(
        taken_over > 0,
        "it dies nowhere between its leaving and the rename"
    );
}

/// Protocol of the tests: a begin, two parts that any hosts may build at once, and an end.
struct Build;

impl Protocol for Build {
    type Decision = String;

    const PRESENCE: Participation = Participation::Living;

    fn plan(&self, _what: &String) -> Plan {
        let parts = ["0", "1"].map(|part| Unit::Part(part.to_owned()));
        Plan {
            stops_first: false,
            stages: vec![
                vec![Unit::Whole("begin")],
                parts.to_vec(),
                vec![Unit::Whole("end")],
            ],
        }
    }
}

/// Joins, writes if that is still possible, and withdraws.
fn write_and_leave(on: &SimBacking, host: &str) -> Result<Joined, OwnError> {
    let ballot = Ballot::in_dir(VoteDir::make(on, &on.root(), DIR, host)?, Build);
    let joined = ballot.join(b"")?;
    if joined == Joined::Yes {
        ballot.withdraw()?;
    }
    Ok(joined)
}

/// Does the work of this host. Returns whether the directory is gone. `is_living`: whether the other hosts count as
/// alive.
fn build(on: &SimBacking, host: &str, is_living: bool) -> Result<bool, OwnError> {
    let Some(dir) = VoteDir::find(on, &on.root(), DIR, host)? else {
        return Ok(true);
    };
    let ballot = Ballot::in_dir(dir, Build);
    match ballot.close(&|other| Ok(other != host && is_living))? {
        DecisionStep::Close | DecisionStep::Wait(_) => return Ok(false),
        DecisionStep::Decide => drop(ballot.decide(&host.to_owned())?),
        DecisionStep::Decided => {}
    }
    let names = || ballot.dir().names();
    let progress = ballot.carry_out(|unit| {
        let done: Vec<_> = names()?
            .into_iter()
            .filter(|name| name.starts_with("done-"))
            .collect();
        assert!(!done.contains(&unit.done_file()), "it is begun again");
        let earlier = match unit {
            Unit::Whole("begin") => 0..=0,
            Unit::Whole(_) => 3..=3,
            Unit::Part(_) => 1..=2,
        };
        assert!(earlier.contains(&done.len()), "{unit:?} after {done:?}");
        Ok::<(), Errno>(())
    })?;
    if matches!(progress, Progress::Waits(_)) {
        return Ok(false);
    }
    ballot.remove_if_over()?;
    Ok(true)
}

#[test]
fn what_hosts_write_while_they_live_is_built_by_another_one_for_every_death_at_every_call() {
    let mut died = 0;
    for step in 1..STEPS_MAX {
        let a = disk();
        let b = a.another_process();
        a.crash_at(a.steps() + step);
        let built = write_and_leave(&a, "a").and_then(|_| build(&a, "a", true));
        died += usize::from(a.is_dead());
        assert_eq!(built.is_err(), a.is_dead(), "step {step}: {built:?}");
        assert_eq!(build(&b, "b", false), Ok(true), "step {step}");
        VoteDir::remove_retired(&b, &b.root()).expect("remove");
        assert_eq!(names(&b), [""; 0], "step {step}");
        a.fsck().expect("fsck");
        if !a.is_dead() {
            break;
        }
    }
    assert!(died > 30, "{died} calls");
}

/// A host that begins to write is seen by the host that closes, or sees that the ballot is closed.
#[test]
fn no_living_host_writes_to_what_is_decided() {
    for step in 1..STEPS_MAX {
        let a = disk();
        let late = a.another_process();
        assert_eq!(write_and_leave(&a, "a"), Ok(Joined::Yes), "step {step}");
        let hang = late.hang_at(step);
        let (joined, is_decided) = std::thread::scope(|scope| {
            let coming = scope.spawn(|| {
                let dir = VoteDir::make(&late, &late.root(), DIR, "late")?;
                Ok::<_, OwnError>(Ballot::in_dir(dir, Build).join(b"")?)
            });
            while !hang.is_reached() && !coming.is_finished() {
                std::thread::yield_now();
            }
            let is_decided = build(&a, "a", true).expect("build");
            hang.release();
            (coming.join().expect("a host"), is_decided)
        });
        let writes = joined == Ok(Joined::Yes);
        let found = VoteDir::find(&a, &a.root(), DIR, "a").expect("find");
        let counts = found.is_some_and(|dir| {
            let names = dir.names().expect("names");
            names.contains("in-late") && !names.contains("decision")
        });
        assert!(!writes || counts, "step {step}: {joined:?}, {is_decided}");
    }
}
