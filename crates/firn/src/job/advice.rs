//! Advice about a host: what the user should do, with the commands.

use firn_format::quote::quoted;
use firn_hosts::Life;
use firn_protocol::HostReport;
use firn_protocol::path::BytePath;

use super::Host;
use crate::text::{bytes, count};

/// Returns advice for a host, or an empty list if nothing is wrong. `backing` is the path of the backing on this
/// host.
pub fn of(host: &Host, backing: &BytePath) -> Vec<String> {
    let Host {
        host: name, report, ..
    } = host;
    let report = report.as_ref();
    let there = report
        .map(|report| &report.backing)
        .filter(|path| !path.is_empty())
        .unwrap_or(backing);
    let mut advice = match host.state {
        Life::Dead => of_dead(host, report, there, backing),
        Life::Silent if host.is_locked => vec![of_silent(host, report)],
        Life::Silent => vec![format!(
            "check {name}: if its firnd has ended, `firn recover {there}` on {name}{} drains the data that it held",
            as_user(report)
        )],
        Life::Left if host.held_bytes() > 0 => vec![format!(
            "{name} still holds {} in memory after its unmount: mount again there, or run `firn recover {there}` on {name}{}",
            bytes(host.held_bytes()),
            as_user(report)
        )],
        Life::Alive | Life::Left => Vec::new(),
    };
    if host.keeps_from_flattening > 0 {
        advice.push(of_keeper(host, report));
    }
    if let Some(error) = report.and_then(|report| report.last_error.as_ref()) {
        let point = mount_point_argument(report);
        advice.push(format!(
            "{}; `firn status{point}` on {name} has the details",
            quoted(error.as_bytes())
        ));
    }
    advice
}

/// Returns advice for a dead host: how its data and its transactions are recovered.
fn of_dead(
    host: &Host,
    report: Option<&HostReport>,
    there: &BytePath,
    backing: &BytePath,
) -> Vec<String> {
    let name = &host.host;
    let user = as_user(report);
    let mut advice = Vec::new();
    match report {
        Some(report) if report.held_bytes > 0 => {
            let held = format!(
                "{} of {}",
                bytes(report.held_bytes),
                count(report.held_files, "file")
            );
            advice.push(format!(
                "`firn recover {there}` on {name}{user} drains {held} that it held at its last beat"
            ));
            if let Some(partner) = report.partner.as_ref().and_then(|partner| partner.host.as_ref()) {
                let partner = quoted(partner.as_bytes());
                advice.push(format!(
                    "if {name} does not come back: `firn pull --list --backing {backing} {partner}:{name}` lists the \
                     copies on its partner"
                ));
            }
        }
        Some(_) => advice.push(format!(
            "it held no data at its last beat; `firn recover {there}` on {name}{user}, or its next mount, verifies that"
        )),
        None => advice.push(format!(
            "it is unknown which data it held: `firn recover {there}` on {name}{user} drains the data"
        )),
    }
    let transactions = if host.uses.iter().any(|one| one == "transactions") {
        ", and ends its transactions"
    } else {
        ""
    };
    advice.push(format!(
        "if {name} was rebooted or does not come back, the data that it held is lost: `firn recover --host {name} {backing}` \
        on any host removes it from this list{transactions}"
    ));
    advice
}

/// Returns advice for a host whose lease is not renewed.
fn of_silent(host: &Host, report: Option<&HostReport>) -> String {
    let name = &host.host;
    let process = host
        .pid
        .map_or_else(String::new, |pid| format!(" (process {pid})"));
    let point = mount_point_argument(report);
    format!(
        "the firnd of {name}{process} is stopped, or its backing hangs: check its state there (`ps`, `dmesg`, `firn \
        doctor`); `kill -CONT` resumes a stopped firnd, `firn umount --force{point}` ends it"
    )
}

/// Returns advice for a host that keeps files in logs from being flattened.
fn of_keeper(host: &Host, report: Option<&HostReport>) -> String {
    let name = &host.host;
    let files = count(host.keeps_from_flattening, "file");
    let names = report.map_or(&[][..], |report| &report.written_names);
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let named = if names.is_empty() {
        String::new()
    } else {
        format!(" ({})", names.join(", "))
    };
    let until = match report {
        Some(report) if report.written_files == 0 && report.held_bytes > 0 => format!(
            "the bytes of them that it holds are drained (`firn drain{}` on {name})",
            mount_point_argument(Some(report))
        ),
        _ => "its programs close them".to_owned(),
    };
    format!("{name} keeps {files} from being flattened until {until}{named}")
}

/// Returns the mount point with a space before it, for a command line. Returns an empty text if it is unknown.
fn mount_point_argument(report: Option<&HostReport>) -> String {
    let point = report.map(|report| &report.mount_point);
    match point.filter(|point| !point.is_empty()) {
        Some(point) => format!(" {point}"),
        None => String::new(),
    }
}

/// Returns the user that must run a command on the host, with a space before it. Returns an empty text if it is unknown.
fn as_user(report: Option<&HostReport>) -> String {
    report.map_or_else(String::new, |report| match report.user_id {
        0 => " as root".to_owned(),
        uid => format!(" as user {uid}"),
    })
}
