//! Which lane the logs of a host go to, where the backing below has lanes.
//!
//! ```text
//! .firn/log/turn-N     symbolic link: its text is the host that has this turn
//! ```
//!
//! Hosts that live have turns from 0 on without large gaps, so the logs of a file's hosts are spread evenly over the lanes,
//! whatever the hosts' names are. The file's number is added, so that a host that writes several files uses
//! several lanes. A turn is known before anything of a file is written, because the drain asks for its lane before.
//!
//! A turn is advice: two hosts with one turn write to one lane, and nothing else comes of it. So it is taken without
//! locks, is not synced, and a host that cannot take one has the hash of its name.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use firn_backing::{Backing, Errno, Kind, Result};
use firn_hosts::own;

use crate::backing::Liveness;

/// Before the number, in the name of the link.
const TURN: &str = "turn-";
/// Each turn costs a few calls at the mount.
const TURNS_MAX: u64 = 256;

/// Takes a turn for this host; without one, a number from its name.
pub(crate) fn take<B: Backing>(base: &B, top: &B::Inode, host: &str, is_alive: &Liveness) -> u64 {
    let taken = take_free(base, top, host, is_alive).unwrap_or_else(|error| {
        tracing::debug!(%error, "no turn can be taken: the lane of logs comes from the host's name");
        None
    });
    taken.unwrap_or_else(|| xxhash_rust::xxh3::xxh3_64(host.as_bytes()))
}

/// The turn that this host has, or the first one that no living host has; none if there are too many.
fn take_free<B: Backing>(
    base: &B,
    top: &B::Inode,
    host: &str,
    is_alive: &Liveness,
) -> Result<Option<u64>> {
    let holders = read_holders(base, top)?;
    let own = holders.iter().find(|(_, holder)| *holder == host);
    if let Some((turn, _)) = own {
        return Ok(Some(*turn));
    }
    for turn in 0..TURNS_MAX {
        let name = format!("{TURN}{turn}");
        let name = OsStr::new(&name);
        if let Some(holder) = holders.get(&turn) {
            if is_alive(holder)? {
                continue;
            }
            match base.unlink(top, name) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        match base.symlink(&own::own_caller(), top, name, OsStr::new(host)) {
            Ok(_) => return Ok(Some(turn)),
            // Another host was first.
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The host of each turn.
fn read_holders<B: Backing>(base: &B, top: &B::Inode) -> Result<BTreeMap<u64, String>> {
    let mut holders = BTreeMap::new();
    for (name, ..) in own::list(base, top)? {
        let name = String::from_utf8_lossy(&name).into_owned();
        let number = name.strip_prefix(TURN).map(str::parse::<u64>);
        let Some(Ok(turn)) = number else {
            continue;
        };
        let (inode, attr) = match base.lookup(top, OsStr::new(&name)) {
            Err(Errno::NOENT) => continue,
            found => found?,
        };
        if attr.kind == Kind::Symlink {
            let holder = base.readlink(&inode)?;
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
        let top = disk.root();
        let all: Liveness = Box::new(|_| Ok(true));
        let take_as = |host: &str, is_alive: &Liveness| take(&disk, &top, host, is_alive);
        for (turn, host) in ["c", "a", "b"].into_iter().enumerate() {
            assert_eq!(take_as(host, &all), turn as u64);
        }
        for (turn, host) in ["c", "a", "b"].into_iter().enumerate() {
            assert_eq!(take_as(host, &all), turn as u64, "it comes back");
        }
        let without_a: Liveness = Box::new(|host| Ok(host != "a"));
        assert_eq!(take_as("d", &without_a), 1, "that of a host that is gone");
        assert_eq!(take_as("a", &all), 3);
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
        let take_as = |host: &str| take(&disk, &disk.root(), host, &dead);
        assert_eq!(take_as("a"), take_as("a"));
        assert_ne!(take_as("a"), take_as("b"));
    }
}
