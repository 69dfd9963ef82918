//! Builds a [`Host`] for each host of a job: a row of the tables that the user sees.
//!
//! Each host has two files in the backing, the directory that all hosts mount: a *lease*, which shows that the host is
//! alive, and a *report* of its status. Its row is made from them. The row of this host also uses the answer of its
//! firnd, the daemon of the mount.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use firn_format::quote::{printable, quoted};
use firn_hosts::{Evidence, Life};
use firn_protocol::path::BytePath;
use firn_protocol::{HostReport, LaneReport, LaneState, PartnerReport, TokenState, WaitingProgram};

use super::inspect::{BackingState, HostLease, OwnMountState};
use super::{Host, advice};
use crate::text::{bytes, count, seconds};

/// Returns the rows of all hosts. Those with the worst problems come first.
///
/// There is a row for each lease (the file in the backing that shows that a host is alive). The row of this host also
/// has the answer of its firnd (its daemon). If no lease is that of its mount, the mount has a row of its own. Commands
/// in the advice name the backing by `backing_path`.
pub fn build_host_rows(
    backing: Option<BackingState>,
    own_mount: Option<OwnMountState>,
    backing_path: &BytePath,
) -> Vec<Host> {
    let mut hosts = Vec::new();
    let mut mount_without_row = own_mount;
    if let Some(backing) = backing {
        for lease in &backing.leases {
            // The lease of this host's own mount has the same process and boot id. The answer is added to its row, so
            // that no second row is made for the mount.
            let own_mount = mount_without_row
                .take_if(|mount| is_lease_of_mount(lease, mount, &backing.boot_id));
            hosts.push(row_from_lease(lease, own_mount, &backing));
        }
    }
    hosts.extend(mount_without_row.map(row_from_own_mount));
    record_option_differences(&mut hosts);
    for host in &mut hosts {
        host.waits = host.report.as_ref().map_or_else(Vec::new, describe_waits);
        host.advice = advice::advice_for_host(host, backing_path);
    }
    hosts.sort_by(|a, b| {
        let order = |host: &Host| (host.trouble(), Reverse(host.held_bytes()));
        order(a).cmp(&order(b)).then_with(|| a.name.cmp(&b.name))
    });
    hosts
}

/// Returns whether the firnd of this host's own mount holds a lease.
fn is_lease_of_mount(lease: &HostLease, mount: &OwnMountState, boot_id: &str) -> bool {
    lease
        .holder
        .as_ref()
        .is_some_and(|holder| holder.pid == mount.pid && holder.boot == boot_id)
}

/// Returns the row of a host with a lease in the backing (a file that shows that the host is alive). Waits, advice and
/// differences are still empty: [`build_host_rows`] fills them in.
///
/// `own_mount` is the answer of the firnd (the daemon) if the host is this one. It replaces the older report beside the
/// lease.
fn row_from_lease(
    lease: &HostLease,
    own_mount: Option<OwnMountState>,
    backing: &BackingState,
) -> Host {
    let report = match own_mount {
        Some(own_mount) => Some(own_mount.report),
        None => parse_report(lease),
    };
    // A host that is dead or has unmounted writes to no log, so no file waits for it.
    let mut mounted_seconds = None;
    let mut keeps_from_flattening = 0;
    if lease.life.may_live() {
        // The report is as old as the heartbeat with which it was written.
        mounted_seconds = report
            .as_ref()
            .map(|report| report.uptime_seconds + lease.heartbeat_age_seconds.unwrap_or(0.0));
        keeps_from_flattening = backing
            .flattening_delays
            .get(&lease.host)
            .copied()
            .unwrap_or(0);
    }
    Host {
        // `quoted` leaves a valid name unchanged, and escapes what another user may have written.
        name: quoted(lease.host.as_bytes()),
        state: lease.life,
        evidence: evidence_text(lease, &backing.boot_id),
        is_locked: lease.is_locked,
        heartbeat_age_seconds: lease.heartbeat_age_seconds,
        mounted_seconds,
        pid: lease.holder.as_ref().map(|holder| holder.pid),
        uses: lease.uses.clone(),
        options: lease.options.clone(),
        differences: Vec::new(),
        keeps_from_flattening,
        waits: Vec::new(),
        advice: Vec::new(),
        report,
    }
}

/// Returns the report beside a lease. A report that cannot be parsed counts as missing.
fn parse_report(lease: &HostLease) -> Option<HostReport> {
    let report = lease.report.clone()?;
    serde_json::from_value(report).ok()
}

/// Returns the row of this host's own mount if it has no lease (the file in the backing that shows that a host is
/// alive), and is therefore invisible to other hosts.
fn row_from_own_mount(own_mount: OwnMountState) -> Host {
    Host {
        name: own_mount.host,
        state: Life::Alive,
        evidence: "its firnd answered; it shows itself to no other host".to_owned(),
        is_locked: true,
        heartbeat_age_seconds: None,
        mounted_seconds: Some(own_mount.report.uptime_seconds),
        pid: Some(own_mount.pid),
        uses: Vec::new(),
        options: BTreeMap::new(),
        differences: Vec::new(),
        keeps_from_flattening: 0,
        waits: Vec::new(),
        advice: Vec::new(),
        report: Some(own_mount.report),
    }
}

/// Returns in words why a host counts as alive, silent, dead or left. `boot_id` is that of this host's running kernel.
///
/// A host holds a lease: a file that it locks, and renews with each heartbeat.
fn evidence_text(lease: &HostLease, boot_id: &str) -> String {
    let age = match lease.heartbeat_age_seconds {
        Some(age_seconds) => seconds(age_seconds),
        None => "an unknown time".to_owned(),
    };
    if lease.life == Life::Dead && is_from_earlier_boot(lease, boot_id) {
        return format!(
            "this host was rebooted since: its memory is lost; last heartbeat {age} ago"
        );
    }
    if lease.life == Life::Left {
        return format!("it released its lease {age} ago");
    }
    if lease.evidence == Evidence::Beat {
        return "a new heartbeat was seen".to_owned();
    }
    match (lease.life, lease.evidence) {
        (Life::Dead, Evidence::Lock) => {
            format!("its lease is no longer locked; last heartbeat {age} ago")
        }
        (Life::Silent, _) if !lease.is_locked => format!(
            "its last heartbeat is {age} old: it is dead, stopped or waits for its backing; file locks do not show which"
        ),
        (Life::Silent, Evidence::YoungestBeat) => format!(
            "its lease is locked, and its heartbeat is {age} older than the youngest (this user cannot read the backing's clock)"
        ),
        (Life::Silent, _) => {
            format!("its lease is locked; last heartbeat {age} ago by the backing's clock")
        }
        // The host is alive or dead.
        (_, Evidence::YoungestBeat) => format!(
            "its heartbeat is {age} older than the youngest (this user cannot read the backing's clock)"
        ),
        _ => format!("last heartbeat {age} ago by the backing's clock"),
    }
}

/// Returns whether a lease belongs to this host, from before its last reboot. `boot_id` is that of the running kernel.
fn is_from_earlier_boot(lease: &HostLease, boot_id: &str) -> bool {
    let kernel_names = rustix::system::uname();
    if lease.host.as_bytes() != kernel_names.nodename().to_bytes() {
        return false;
    }
    lease
        .holder
        .as_ref()
        .is_some_and(|holder| holder.boot != boot_id)
}

/// Records for each living host the options in which it differs from most living hosts. Only options that hosts have to
/// agree on are compared.
fn record_option_differences(hosts: &mut [Host]) {
    let option_names: BTreeSet<String> = hosts
        .iter()
        .flat_map(|host| host.options.keys().cloned())
        .collect();
    for option in option_names {
        let Some(usual_value) = most_frequent_value(hosts, &option) else {
            continue;
        };
        for host in hosts.iter_mut().filter(|host| host.state.may_live()) {
            let Some(value) = host.options.get(&option) else {
                continue;
            };
            if *value != usual_value {
                host.differences.push(format!(
                    "{option} {}, others {}",
                    quoted(value.as_bytes()),
                    quoted(usual_value.as_bytes())
                ));
            }
        }
    }
}

/// Returns the value that most living hosts have for an option, or `None` if no living host has the option. If several
/// values are equally frequent, returns that of the host that comes first.
fn most_frequent_value(hosts: &[Host], option: &str) -> Option<String> {
    let values: Vec<&String> = hosts
        .iter()
        .filter(|host| host.state.may_live())
        .filter_map(|host| host.options.get(option))
        .collect();
    let frequency = |value: &String| values.iter().filter(|other| **other == value).count();
    // `max_by_key` returns the last maximum, so the hosts are visited from the last to the first.
    values
        .iter()
        .rev()
        .max_by_key(|value| frequency(value))
        .map(|value| (*value).clone())
}

/// Returns what a program waits for, in words.
pub fn describe_program_wait(program: &WaitingProgram) -> String {
    // The report comes from another host, so the name is escaped.
    let name = printable(&program.name);
    format!(
        "{name} ({}) waits in {} for {}",
        program.thread,
        printable(&program.call),
        seconds(program.seconds)
    )
}

/// Returns in words what the programs and lanes (I/O servers) of a host wait for, and what its partner, the host with
/// copies of its data, lacks. The list is empty if there is no wait.
pub fn describe_waits(report: &HostReport) -> Vec<String> {
    let mut waits = Vec::new();
    if report.waiting_writers > 0 {
        let writers = count(report.waiting_writers, "writer");
        let verb = if report.waiting_writers == 1 {
            "waits"
        } else {
            "wait"
        };
        waits.push(format!("{writers} {verb} for room in memory"));
    }
    waits.extend(report.waiting_programs.iter().map(describe_program_wait));
    for lane in &report.lanes {
        waits.extend(describe_lane_waits(lane));
    }
    if let Some(partner) = &report.partner {
        waits.extend(describe_partner_wait(partner));
    }
    waits
}

/// Returns what a lane (an I/O server) waits for, in words. The list is empty for a healthy lane. The token is the lock
/// that makes one host the only writer of the lane.
fn describe_lane_waits(lane: &LaneReport) -> Vec<String> {
    let mut waits = Vec::new();
    let number = lane.lane;
    match (lane.token, &lane.token_holder) {
        (Some(TokenState::Waiting), Some(holder)) => {
            let holder = quoted(holder.as_bytes());
            waits.push(format!(
                "lane {number} waits for its token, which {holder} has"
            ));
        }
        (Some(TokenState::Waiting), None) => {
            waits.push(format!("lane {number} waits for its token"));
        }
        (Some(TokenState::Without), _) => {
            waits.push(format!("lane {number} is written without its token"));
        }
        _ => {}
    }
    match lane.state {
        Some(LaneState::Hung) => waits.push(format!("lane {number} does not answer")),
        Some(state) if state != LaneState::Ok => {
            waits.push(format!("lane {number} is {}", state.as_str()));
        }
        _ => {}
    }
    if let Some(retry_seconds) = lane.retry_seconds {
        waits.push(format!(
            "lane {number} is tried again in {}",
            seconds(retry_seconds)
        ));
    }
    waits
}

/// Returns what the partner (the host that holds copies of this host's data) lacks, in words. Returns `None` if it has
/// all copies.
fn describe_partner_wait(partner: &PartnerReport) -> Option<String> {
    match &partner.host {
        None => Some(format!("no partner: {}", quoted(partner.note.as_bytes()))),
        Some(host) if partner.left_bytes > 0 => Some(format!(
            "partner {} lacks {}",
            quoted(host.as_bytes()),
            bytes(partner.left_bytes)
        )),
        Some(_) => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use firn_hosts::Holder;

    /// Returns a lease and report of a host in a job of three.
    pub fn lease(host: &str, life: Life, held_bytes: u64) -> HostLease {
        let report = HostReport {
            version: "0.1.0".into(),
            user_id: 1000,
            backing: "/scratch/run42".into(),
            mount_point: "/ckpt".into(),
            arena: "/dev/shm/firn-1000/a.arena".into(),
            uptime_seconds: 3600.0,
            held_bytes,
            held_files: held_bytes >> 22,
            ingest_bytes: 8 << 30,
            ingest_bytes_per_second: (512 << 20) as f64,
            drain_bytes: 6 << 30,
            drain_bytes_per_second: (128 << 20) as f64,
            durable_files: 4,
            durable_bytes: 1 << 30,
            logged_files: 3,
            logged_bytes: 5 << 20,
            ..HostReport::default()
        };
        HostLease {
            host: host.into(),
            life,
            evidence: match life {
                Life::Dead | Life::Left => Evidence::Lock,
                _ => Evidence::ServerClock,
            },
            is_locked: life.may_live(),
            heartbeat_age_seconds: Some(if life == Life::Alive { 0.7 } else { 65.0 }),
            holder: Some(Holder {
                host: host.into(),
                pid: 4711,
                boot: "boot".into(),
            }),
            uses: vec!["tokens".into(), "logs".into()],
            options: [("layout", "log"), ("version", "0.1.0")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            report: Some(serde_json::to_value(report).unwrap()),
        }
    }

    /// Returns a job with one host in each state, in the order of their names.
    pub fn job() -> Vec<Host> {
        let mut leases = vec![
            lease("n0", Life::Alive, 64 << 20),
            lease("n1", Life::Dead, 1 << 30),
            lease("n2", Life::Silent, 32 << 20),
            lease("n3", Life::Left, 0),
            lease("n4", Life::Alive, 0),
        ];
        leases[4]
            .options
            .insert("layout".into(), "plain, with logs".into());
        let mut report: HostReport =
            serde_json::from_value(leases[0].report.clone().unwrap()).unwrap();
        report.waiting_writers = 2;
        report.waiting_programs = vec![WaitingProgram {
            name: "solver".into(),
            thread: 4712,
            call: "write".into(),
            seconds: 12.0,
        }];
        report.lanes = vec![LaneReport {
            token: Some(TokenState::Waiting),
            token_holder: Some("n2".into()),
            ..LaneReport::default()
        }];
        report.partner = Some(PartnerReport {
            wanted: "next".into(),
            host: Some("n4".into()),
            left_bytes: 1 << 20,
            ..PartnerReport::default()
        });
        leases[0].report = Some(serde_json::to_value(report).unwrap());
        let backing = BackingState {
            backing: "/scratch/run42".into(),
            boot_id: "boot".into(),
            leases,
            flattening_delays: [("n0".to_owned(), 2), ("n1".to_owned(), 5)].into(),
            notes: Vec::new(),
        };
        build_host_rows(Some(backing), None, &"/scratch/run42".into())
    }

    #[test]
    fn the_host_in_trouble_is_first_and_the_one_that_left_last() {
        let hosts = job();
        let order: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(order, ["n1", "n2", "n0", "n4", "n3"]);
        assert!(hosts[4].is_gone());
        assert_eq!(hosts[2].keeps_from_flattening, 2);
        // A dead host delays no flattening.
        assert_eq!(hosts[0].keeps_from_flattening, 0);
    }

    #[test]
    fn what_differs_is_named_on_the_host_that_differs_and_waits_are_told() {
        let hosts = job();
        assert_eq!(
            hosts[3].differences,
            ["layout plain, with logs, others log"]
        );
        assert!(hosts[..3].iter().all(|host| host.differences.is_empty()));
        assert_eq!(
            hosts[2].waits,
            [
                "2 writers wait for room in memory",
                "solver (4712) waits in write for 12.0 s",
                "lane 0 waits for its token, which n2 has",
                "partner n4 lacks 1.0 MiB"
            ]
        );
    }

    #[test]
    fn a_mount_that_does_not_show_itself_has_a_row_and_its_own_lease_is_not_told_twice() {
        let seen = OwnMountState {
            host: "n0".into(),
            pid: 4711,
            report: HostReport {
                held_bytes: 5,
                ..HostReport::default()
            },
            options: Vec::new(),
        };
        let backing = |boot: &str| BackingState {
            backing: "/b".into(),
            boot_id: boot.into(),
            leases: vec![lease("n0", Life::Alive, 9)],
            flattening_delays: BTreeMap::new(),
            notes: Vec::new(),
        };
        let own = build_host_rows(Some(backing("boot")), Some(seen.clone()), &"/b".into());
        assert_eq!(own.len(), 1);
        assert_eq!(own[0].held_bytes(), 5, "the fresher one");
        let other = build_host_rows(Some(backing("another")), Some(seen), &"/b".into());
        assert_eq!(other.len(), 2);
    }
}
