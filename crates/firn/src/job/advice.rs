//! Advice about a host of a job: what the user should do, with the commands.
//!
//! Most advice depends on the host's state. A host shows that it is alive by its lease, a file that it renews.
//! * An *alive* host renews its lease. It gets advice only for an error, or for files in logs that cannot be copied
//!   into plain files (flattened) yet because of it.
//! * A *silent* host does not renew its lease, and is not known to be dead.
//! * A *dead* host has no process any more. Its data may still be in its memory.
//! * A host that has *left* has unmounted, and may have kept data in its memory.

use firn_format::quote::quoted;
use firn_hosts::Life;
use firn_protocol::HostReport;
use firn_protocol::path::BytePath;

use super::Host;
use crate::text::{bytes, count};

/// Returns advice for a host, or an empty list if nothing is wrong. `backing` is the path of the backing (the directory
/// that the hosts share) on this host.
pub fn advice_for_host(host: &Host, backing: &BytePath) -> Vec<String> {
    let name = &host.name;
    let mut advice = match host.state {
        Life::Alive => Vec::new(),
        Life::Silent if host.is_locked => vec![advice_for_hanging_host(host)],
        Life::Silent => vec![format!(
            "check {name}: if its firnd has ended, {} drains the data that it held",
            recover_command(host, backing)
        )],
        Life::Dead => advice_for_dead_host(host, backing),
        Life::Left if host.held_bytes() > 0 => vec![format!(
            "{name} still holds {} in memory after its unmount: mount again there, or run {}",
            bytes(host.held_bytes()),
            recover_command(host, backing)
        )],
        Life::Left => Vec::new(),
    };
    if host.keeps_from_flattening > 0 {
        advice.push(advice_for_open_logs(host));
    }
    let report = host.report.as_ref();
    if let Some(error) = report.and_then(|report| report.last_error.as_ref()) {
        let point = mount_point_argument(report);
        advice.push(format!(
            "{}; `firn status{point}` on {name} has the details",
            quoted(error.as_bytes())
        ));
    }
    advice
}

/// Returns advice for a dead host: how its data is recovered, and how it is removed from the list of hosts. The host's
/// report, from its last heartbeat, says how much data it held (had in memory only).
fn advice_for_dead_host(host: &Host, backing: &BytePath) -> Vec<String> {
    let name = &host.name;
    let recover = recover_command(host, backing);
    let mut advice = Vec::new();
    match &host.report {
        Some(report) if report.held_bytes > 0 => {
            let undrained = format!(
                "{} of {}",
                bytes(report.held_bytes),
                count(report.held_files, "file")
            );
            advice.push(format!(
                "{recover} drains {undrained} that it held at its last heartbeat"
            ));
            advice.extend(advice_to_pull_copies(name, report, backing));
        }
        Some(_) => advice.push(format!(
            "it held no data at its last heartbeat; {recover}, or its next mount, verifies that"
        )),
        None => advice.push(format!(
            "it is unknown which data it held: {recover} drains the data"
        )),
    }
    let uses_transactions = host
        .uses
        .iter()
        .any(|lease_use| lease_use == "transactions");
    let transactions_clause = if uses_transactions {
        ", and ends its transactions"
    } else {
        ""
    };
    advice.push(format!(
        "if {name} was rebooted or does not come back, the data that it held is lost: `firn recover --host {name} {backing}` \
        on any host removes it from this list{transactions_clause}"
    ));
    advice
}

/// Returns advice to copy the data of a dead host from its partner (the host that holds copies of its data). Returns
/// `None` if the host had no partner.
fn advice_to_pull_copies(name: &str, report: &HostReport, backing: &BytePath) -> Option<String> {
    let partner = quoted(report.partner.as_ref()?.host.as_ref()?.as_bytes());
    Some(format!(
        "if {name} does not come back: `firn pull --list --backing {backing} {partner}:{name}` lists the \
         copies on its partner"
    ))
}

/// Returns the command that recovers a host's data, with the host and the user that must run it. `backing` is its path
/// on this host; the command has the path on the other host, if that is known.
fn recover_command(host: &Host, backing: &BytePath) -> String {
    let name = &host.name;
    let report = host.report.as_ref();
    let reported_path = report.map(|report| &report.backing);
    let path_on_host = reported_path
        .filter(|path| !path.is_empty())
        .unwrap_or(backing);
    format!("`firn recover {path_on_host}` on {name}{}", as_user(report))
}

/// Returns advice for a host that does not renew its lease, although its process exists.
fn advice_for_hanging_host(host: &Host) -> String {
    let name = &host.name;
    let process = host
        .pid
        .map_or_else(String::new, |pid| format!(" (process {pid})"));
    let point = mount_point_argument(host.report.as_ref());
    format!(
        "the firnd of {name}{process} is stopped, or its backing hangs: check its state there (`ps`, `dmesg`, `firn \
        doctor`); `kill -CONT` resumes a stopped firnd, `firn umount --force{point}` ends it"
    )
}

/// Returns advice for a host that keeps files in logs from being flattened (copied into plain files). The cause is that
/// its programs have the files open, or that its memory has bytes of them which are not in the logs yet.
fn advice_for_open_logs(host: &Host) -> String {
    let name = &host.name;
    let files = count(host.keeps_from_flattening, "file");
    let report = host.report.as_ref();
    let file_names: Vec<String> = match report {
        Some(report) => report
            .written_names
            .iter()
            .map(ToString::to_string)
            .collect(),
        None => Vec::new(),
    };
    let file_list = if file_names.is_empty() {
        String::new()
    } else {
        format!(" ({})", file_names.join(", "))
    };
    let condition = match report {
        Some(report) if report.written_files == 0 && report.held_bytes > 0 => format!(
            "the bytes that it holds of them are drained (`firn drain{}` on {name})",
            mount_point_argument(Some(report))
        ),
        _ => "its programs close them".to_owned(),
    };
    format!("{name} keeps {files} in logs until {condition}{file_list}")
}

/// Returns the mount point with a space before it, for a command line. Returns an empty text if it is unknown.
fn mount_point_argument(report: Option<&HostReport>) -> String {
    let point = report.map(|report| &report.mount_point);
    match point.filter(|point| !point.is_empty()) {
        Some(point) => format!(" {point}"),
        None => String::new(),
    }
}

/// Returns the user that must run a command on the host, with a space before it. Returns an empty text if it is
/// unknown.
fn as_user(report: Option<&HostReport>) -> String {
    report.map_or_else(String::new, |report| match report.user_id {
        0 => " as root".to_owned(),
        uid => format!(" as user {uid}"),
    })
}
