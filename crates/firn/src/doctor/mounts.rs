//! Checks for what earlier mounts of this user left behind.
//!
//! * A mount that is dead or hangs, because firnd, its daemon, has ended or does not answer.
//! * An arena that no firnd uses. An arena is a file in shared memory with data that the backing may lack.

use std::time::Duration;

use firn_client::Mount;
use firn_client::liveness::Liveness;
use firn_daemon::CheckReport;
use firn_format::quantity;
use firn_format::quote::quoted_path;

use crate::ask::parallel_map;
use crate::doctor::{CheckSubject, Finding};

/// Timeout for the kernel to say whether a firnd serves a mount.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Reports mounts that are dead or hang, because firnd, their daemon, has ended or does not answer.
pub(crate) fn check_mounts(_: &CheckSubject<'_>) -> Vec<Finding> {
    let mounts = match firn_client::mounts() {
        Ok(mounts) => mounts,
        Err(error) => return vec![Finding::refused(error.to_string())],
    };
    // All mounts are asked at the same time, because each of them may take the whole timeout.
    let states = parallel_map(&mounts, |mount| mount.liveness(LIVENESS_TIMEOUT));
    let mut findings: Vec<Finding> = mounts
        .iter()
        .zip(&states)
        .filter_map(|(mount, state)| judge_mount(mount, *state))
        .collect();
    if findings.is_empty() {
        findings.push(Finding::ok(match mounts.len() {
            0 => "no mounts".to_owned(),
            1 => "the firnd of the only mount answers".to_owned(),
            count => format!("the firnds of all {count} mounts answer"),
        }));
    }
    findings
}

/// Returns a finding for a mount that is dead or hangs, or `None` for a healthy one. `state` is that of its firnd, the
/// daemon.
fn judge_mount(mount: &Mount, state: Liveness) -> Option<Finding> {
    let point = quoted_path(&mount.mount_point);
    let backing = quoted_path(&mount.backing);
    match state {
        Liveness::Alive => None,
        Liveness::Dead => Some(Finding::wrong(
            format!("the mount at {point} is dead, and programs get ENOTCONN"),
            format!(
                "`firn mount {backing} {point}` recovers it; or `firn umount {point}`, then `firn recover {backing}`"
            ),
        )),
        Liveness::Silent => Some(Finding::wrong(
            format!("the firnd of the mount at {point} does not answer"),
            format!("`firn status {point}` has the details; `firn umount --force {point}` ends it"),
        )),
        Liveness::Unknown(errno) => Some(Finding::note(
            format!("the mount at {point} cannot be examined: {errno}"),
            format!("run `firn status {point}` as the user that mounted it"),
        )),
    }
}

/// Reports arenas that no running firnd uses.
pub(crate) fn check_arenas(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let arenas = match firn_daemon::list_arenas(subject.options) {
        Ok(arenas) => arenas,
        Err(error) => return vec![Finding::refused(error.to_string())],
    };
    let unused_arenas = arenas.iter().filter(|report| !report.in_use);
    let mut findings: Vec<Finding> = unused_arenas.map(judge_unused_arena).collect();
    if findings.is_empty() {
        findings.push(Finding::ok("no arena holds data of a firnd that has ended"));
    }
    findings
}

/// Judges an arena (a file in shared memory with a mount's data) that no firnd uses. Returns a note if it is empty, and
/// an error if it is damaged or has data that is not in the backing.
fn judge_unused_arena(report: &CheckReport) -> Finding {
    let arena = quoted_path(&report.arena);
    let backing = report.backing.clone().unwrap_or_default();
    let is_damaged = !report.damage.is_empty();
    if report.held_bytes == 0 && !is_damaged {
        return Finding::note(
            format!("arena {arena} holds no data, and no firnd uses it"),
            format!("`firn recover {backing}` removes it"),
        );
    }
    let held = quantity::bytes(report.held_bytes);
    let damage_clause = if is_damaged { ", and is damaged" } else { "" };
    Finding::wrong(
        format!("arena {arena} holds {held} of {backing}{damage_clause}, and no firnd uses it"),
        format!(
            "`firn recover {backing}`, or mount it again; if that backing is lost for good, `firn recover --discard {backing}` deletes the data"
        ),
    )
}
