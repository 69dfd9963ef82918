//! Assigns a number to each host, the host's *turn*, that selects the lane for its logs. A *lane* is a directory or a
//! server for the data of files, in a backing that has several.
//!
//! ```text
//! .firn/log/turn-N     symbolic link: its text is the host that has this turn
//! ```
//!
//! A host takes the lowest free number at its mount and keeps it. The turns of live hosts are therefore small numbers
//! with few gaps, and the logs that these hosts write for one file are spread evenly over the lanes. A hash of the
//! file's inode number is added to the turn, so that a host that writes several files uses several lanes.
//!
//! A turn is only a hint: two hosts with the same turn write to one lane, which is slower but correct. So a turn is
//! taken without a lock and is not synced. A host that cannot take a turn uses the hash of its name.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use firn_backing::{Backing, Errno, Kind, Result};
use firn_hosts::own;

use crate::backing::Liveness;

/// Prefix of the name of a link.
const TURN: &str = "turn-";
/// Bound on the turns that are tried. Each costs a few calls at the mount.
const TURNS_MAX: u64 = 256;

/// Takes a turn for this host. Returns the hash of the host's name if no turn can be taken.
pub(crate) fn acquire_turn<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> u64 {
    match acquire_free_turn(backing, containers_dir, host, is_alive) {
        Ok(Some(turn)) => return turn,
        Ok(None) => {}
        Err(error) => {
            tracing::debug!(%error, "no turn can be taken: the lane of logs is derived from the host's name");
        }
    }
    xxhash_rust::xxh3::xxh3_64(host.as_bytes())
}

/// Returns this host's turn (the number that selects the lane of its logs), or takes the first one that no live host
/// has. Returns `None` if all turns are taken.
fn acquire_free_turn<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> Result<Option<u64>> {
    let holders = read_holders(backing, containers_dir)?;
    for (turn, holder) in &holders {
        if holder == host {
            return Ok(Some(*turn));
        }
    }
    for turn in 0..TURNS_MAX {
        let name = format!("{TURN}{turn}");
        let name = OsStr::new(&name);
        if let Some(holder) = holders.get(&turn) {
            if is_alive(holder)? {
                continue;
            }
            match backing.unlink(containers_dir, name) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        match backing.symlink(&own::own_caller(), containers_dir, name, OsStr::new(host)) {
            Ok(_) => return Ok(Some(turn)),
            // Another host has just taken this turn.
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Returns the host of each turn, the number that selects the lane of a host's logs.
fn read_holders<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
) -> Result<BTreeMap<u64, String>> {
    let mut holders = BTreeMap::new();
    for (name, ..) in own::list(backing, containers_dir)? {
        let name = String::from_utf8_lossy(&name).into_owned();
        let Some(Ok(turn)) = name.strip_prefix(TURN).map(str::parse::<u64>) else {
            continue;
        };
        let (inode, attr) = match backing.lookup(containers_dir, OsStr::new(&name)) {
            Ok(entry) => entry,
            // Another host has just removed the turn of a dead host.
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error),
        };
        if attr.kind == Kind::Symlink {
            let holder = backing.readlink(&inode)?;
            holders.insert(turn, String::from_utf8_lossy(&holder).into_owned());
        }
    }
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_backing::Volume;
    use firn_sim::SimBacking;

    #[test]
    fn hosts_that_live_have_turns_of_their_own_and_keep_them() {
        let disk = SimBacking::new();
        let containers_dir = disk.root();
        let all_alive: Liveness = Box::new(|_| Ok(true));
        let take_as =
            |host: &str, is_alive: &Liveness| acquire_turn(&disk, &containers_dir, host, is_alive);
        for (turn, host) in ["c", "a", "b"].into_iter().enumerate() {
            assert_eq!(take_as(host, &all_alive), turn as u64);
        }
        for (turn, host) in ["c", "a", "b"].into_iter().enumerate() {
            assert_eq!(take_as(host, &all_alive), turn as u64, "it comes back");
        }
        let without_a: Liveness = Box::new(|host| Ok(host != "a"));
        assert_eq!(take_as("d", &without_a), 1, "that of a host that is gone");
        assert_eq!(take_as("a", &all_alive), 3);
    }

    #[test]
    fn a_host_that_can_take_none_has_one_of_its_own_all_the_same() {
        let disk = SimBacking::new();
        let dead: Liveness = Box::new(|_| Err(Errno::IO));
        disk.symlink(
            &own::own_caller(),
            &disk.root(),
            OsStr::new("turn-0"),
            OsStr::new("x"),
        )
        .expect("symlink");
        let take_as = |host: &str| acquire_turn(&disk, &disk.root(), host, &dead);
        assert_eq!(take_as("a"), take_as("a"));
        assert_ne!(take_as("a"), take_as("b"));
    }
}
