//! Makes a row for each host of a job, from the leases and reports in the backing and from the status of this host's
//! firnd.

use std::collections::BTreeMap;

use firn_format::quote::{printable, quoted};
use firn_hosts::{Evidence, Life};
use firn_protocol::path::BytePath;
use firn_protocol::{HostReport, LaneState, TokenState, WaitingProgram};

use super::look::{BackingSeen, LeaseSeen, MountSeen};
use super::{Host, advice};
use crate::text::{bytes, count, seconds};

/// Returns the rows of all hosts, with the one in the worst trouble first.
///
/// The lease of this host's own mount is joined with the answer of its firnd, so that the host has one row. `name` is
/// the path of the backing for the commands in the advice.
pub fn rows(backing: Option<BackingSeen>, mount: Option<MountSeen>, name: &BytePath) -> Vec<Host> {
    let (leases, boot, keepers) = match backing {
        Some(seen) => (seen.leases, seen.boot, seen.keepers),
        None => (Vec::new(), String::new(), BTreeMap::new()),
    };
    let mut mount = mount;
    let mut hosts: Vec<Host> = Vec::new();
    for lease in leases {
        let is_own = |seen: &MountSeen| {
            let holder = lease.holder.as_ref();
            holder.is_some_and(|holder| holder.pid == seen.pid && holder.boot == boot)
        };
        // The lease of this host's own mount has the same process and boot id. The answer is added to its row, so that no
        // second row is made for the mount.
        let own = mount.take_if(|seen| is_own(seen));
        hosts.push(of_lease(lease, own, &keepers, &boot));
    }
    hosts.extend(mount.map(of_mount));
    name_differences(&mut hosts);
    for host in &mut hosts {
        host.waits = host.report.as_ref().map_or_else(Vec::new, waits);
        host.advice = advice::of(host, name);
    }
    hosts.sort_by(|a, b| {
        let key = |host: &Host| (host.trouble(), std::cmp::Reverse(host.held_bytes()));
        (key(a), &a.host).cmp(&(key(b), &b.host))
    });
    hosts
}

/// Returns the row of a host with a lease. If `own` has the answer of its firnd, the answer replaces the older report
/// in the backing.
fn of_lease(
    lease: LeaseSeen,
    own: Option<MountSeen>,
    keepers: &BTreeMap<String, u64>,
    boot: &str,
) -> Host {
    let evidence = evidence_text(&lease, boot);
    let report = match own {
        Some(own) => Some(own.report),
        None => lease
            .report
            .and_then(|report| serde_json::from_value(report).ok()),
    };
    let is_living = lease.life.may_live();
    let age = lease.beat_age_seconds;
    let mounted = report
        .as_ref()
        .map(|report: &HostReport| report.uptime_seconds);
    Host {
        evidence,
        is_locked: lease.is_locked,
        state: lease.life,
        beat_age_seconds: age,
        mounted_seconds: mounted
            .filter(|_| is_living)
            .map(|up| up + age.unwrap_or(0.0)),
        pid: lease.holder.map(|holder| holder.pid),
        uses: lease.uses,
        options: lease.terms,
        differences: Vec::new(),
        // A dead or unmounted host writes no logs any more, so it delays no flattening.
        keeps_from_flattening: keepers
            .get(&lease.host)
            .copied()
            .filter(|_| is_living)
            .unwrap_or(0),
        waits: Vec::new(),
        advice: Vec::new(),
        report,
        // `quoted` leaves a valid name unchanged, and escapes what another user may have written.
        host: quoted(lease.host.as_bytes()),
    }
}

/// Returns the row of this host's own mount that has no lease, and is therefore invisible to other hosts.
fn of_mount(seen: MountSeen) -> Host {
    Host {
        host: seen.host,
        state: Life::Alive,
        evidence: "its firnd answered; it shows itself to no other host".to_owned(),
        is_locked: true,
        beat_age_seconds: None,
        mounted_seconds: Some(seen.report.uptime_seconds),
        pid: Some(seen.pid),
        uses: Vec::new(),
        options: BTreeMap::new(),
        differences: Vec::new(),
        keeps_from_flattening: 0,
        waits: Vec::new(),
        advice: Vec::new(),
        report: Some(seen.report),
    }
}

/// Returns the evidence for the state of a lease, in words.
fn evidence_text(lease: &LeaseSeen, boot: &str) -> String {
    let age = lease.beat_age_seconds;
    let age = age.map_or_else(|| "an unknown time".to_owned(), seconds);
    match (lease.life, lease.evidence) {
        (Life::Dead, _) if is_rebooted(lease, boot) => {
            format!("this host was rebooted since: its memory is lost; last beat {age} ago")
        }
        (Life::Left, _) => format!("it released its lease {age} ago"),
        (_, Evidence::Beat) => "a new beat was seen".to_owned(),
        (Life::Dead, Evidence::Lock) => {
            format!("its lease is no longer locked; last beat {age} ago")
        }
        (Life::Silent, _) if !lease.is_locked => format!(
            "its last beat is {age} old: it is dead, stopped or waits for its backing; file locks do not show which"
        ),
        (Life::Silent, Evidence::YoungestBeat) => format!(
            "its lease is locked, and its beat is {age} older than the youngest (this user cannot read the backing's clock)"
        ),
        (Life::Silent, _) => {
            format!("its lease is locked; last beat {age} ago by the backing's clock")
        }
        (_, Evidence::YoungestBeat) => format!(
            "its beat is {age} older than the youngest (this user cannot read the backing's clock)"
        ),
        _ => format!("last beat {age} ago by the backing's clock"),
    }
}

/// Returns whether a lease belongs to this host, from before its last reboot.
fn is_rebooted(lease: &LeaseSeen, boot: &str) -> bool {
    let name = rustix::system::uname();
    let is_here = lease.host.as_bytes() == name.nodename().to_bytes();
    let holder = lease.holder.as_ref();
    is_here && holder.is_some_and(|holder| holder.boot != boot)
}

/// Names the options in which a living host differs from most living hosts. If two values are equally frequent, the
/// value that sorts first counts as that of the majority.
fn name_differences(hosts: &mut [Host]) {
    let living = |host: &&Host| host.state.may_live();
    let mut names: Vec<String> = hosts
        .iter()
        .flat_map(|host| host.options.keys().cloned())
        .collect();
    names.sort();
    names.dedup();
    for name in names {
        let values = || {
            let all = hosts.iter().filter(living);
            all.filter_map(|host| host.options.get(&name))
        };
        let times = |value: &str| values().filter(|other| *other == value).count();
        let Some(usual) = values().rev().max_by_key(|value| times(value)).cloned() else {
            continue;
        };
        for host in hosts.iter_mut().filter(|host| living(&&**host)) {
            let Some(value) = host.options.get(&name).filter(|value| **value != usual) else {
                continue;
            };
            let [value, usual] = [value, &usual].map(|value| quoted(value.as_bytes()));
            host.differences
                .push(format!("{name} {value}, others {usual}"));
        }
    }
}

/// Returns what a program waits for, in words.
pub fn program_wait(program: &WaitingProgram) -> String {
    // The report comes from another host, so the name is escaped.
    let name = printable(&program.name);
    format!(
        "{name} ({}) waits in {} for {}",
        program.thread,
        printable(&program.call),
        seconds(program.seconds)
    )
}

/// Returns what the programs and lanes (I/O servers) of a host wait for, in words.
pub fn waits(report: &HostReport) -> Vec<String> {
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
    waits.extend(report.waiting_programs.iter().map(program_wait));
    for lane in &report.lanes {
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
        if let Some(retry) = lane.retry_seconds {
            waits.push(format!(
                "lane {number} is tried again in {}",
                seconds(retry)
            ));
        }
    }
    if let Some(partner) = &report.partner {
        match &partner.host {
            None => waits.push(format!("no partner: {}", quoted(partner.note.as_bytes()))),
            Some(host) if partner.left_bytes > 0 => waits.push(format!(
                "partner {} lacks {}",
                quoted(host.as_bytes()),
                bytes(partner.left_bytes)
            )),
            Some(_) => {}
        }
    }
    waits
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use firn_hosts::Holder;
    use firn_protocol::{LaneReport, PartnerReport};

    /// Returns a lease and report of a host in a job of three.
    pub fn lease(host: &str, life: Life, held_bytes: u64) -> LeaseSeen {
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
        LeaseSeen {
            host: host.into(),
            life,
            evidence: match life {
                Life::Dead | Life::Left => Evidence::Lock,
                _ => Evidence::ServerClock,
            },
            is_locked: life.may_live(),
            beat_age_seconds: Some(if life == Life::Alive { 0.7 } else { 65.0 }),
            holder: Some(Holder {
                host: host.into(),
                pid: 4711,
                boot: "boot".into(),
            }),
            uses: vec!["tokens".into(), "logs".into()],
            terms: [("layout", "log"), ("version", "0.1.0")]
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
            .terms
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
        let seen = BackingSeen {
            backing: "/scratch/run42".into(),
            boot: "boot".into(),
            leases,
            keepers: [("n0".to_owned(), 2), ("n1".to_owned(), 5)].into(),
            notes: Vec::new(),
        };
        rows(Some(seen), None, &"/scratch/run42".into())
    }

    #[test]
    fn the_host_in_trouble_is_first_and_the_one_that_left_last() {
        let hosts = job();
        let order: Vec<&str> = hosts.iter().map(|host| host.host.as_str()).collect();
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
        let seen = MountSeen {
            host: "n0".into(),
            pid: 4711,
            report: HostReport {
                held_bytes: 5,
                ..HostReport::default()
            },
            options: Vec::new(),
        };
        let backing = |boot: &str| BackingSeen {
            backing: "/b".into(),
            boot: boot.into(),
            leases: vec![lease("n0", Life::Alive, 9)],
            keepers: BTreeMap::new(),
            notes: Vec::new(),
        };
        let own = rows(Some(backing("boot")), Some(seen.clone()), &"/b".into());
        assert_eq!(own.len(), 1);
        assert_eq!(own[0].held_bytes(), 5, "the fresher one");
        let other = rows(Some(backing("another")), Some(seen), &"/b".into());
        assert_eq!(other.len(), 2);
    }
}
