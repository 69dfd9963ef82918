//! A job as text for the terminal: the tables of `firn hosts` and `firn status --job`.

use firn_format::quote::printable;
use firn_hosts::Life;

use super::{Host, Job, TroubleColour, life_word};
use crate::output::Paint;
use crate::text::{bytes, count, pad_columns, rate, seconds};

/// Returns the text of `firn hosts`: a row for each host, and details below.
pub fn hosts_text(job: &Job, paint: Paint) -> String {
    let mut text = head_line(job, paint);
    let hosts = shown_hosts(job);
    if !hosts.is_empty() {
        let head = [
            "HOST",
            "STATE",
            "BEAT",
            "MOUNTED",
            "USER",
            "VERSION",
            "HELD",
            "MOUNT POINT",
        ];
        let rows = hosts.iter().map(|host| host_row(host));
        text += "\n";
        text += &format_table(&head, rows.collect(), &hosts, paint);
    }
    for host in &hosts {
        text += &host_details(host, paint);
    }
    text + &note_lines(job, paint)
}

/// Returns the text of `firn status --job`: the sums, and a row for each host.
pub fn status_text(job: &Job, paint: Paint) -> String {
    let mut text = head_line(job, paint);
    let total = &job.total;
    let mut line = |label: &str, what: String| text += &format!("  {label:<13} {what}\n");
    if total.stranded_bytes > 0 {
        let what = format!(
            "{} that no running firnd drains",
            bytes(total.stranded_bytes)
        );
        line("stranded", paint.error(&what));
    }
    if total.errors > 0 {
        line("errors", paint.error(&total.errors.to_string()));
    }
    if total.waiting_writers > 0 {
        let what = format!(
            "{} for room in memory",
            count(total.waiting_writers, "writer")
        );
        line("waiting", paint.warning(&what));
    }
    line(
        "in memory",
        format!(
            "{} in {}",
            bytes(total.held_bytes),
            count(total.held_files, "file")
        ),
    );
    line(
        "received",
        format_speed(total.ingest_bytes, total.ingest_bytes_per_second),
    );
    line(
        "written",
        format_speed(total.drain_bytes, total.drain_bytes_per_second),
    );
    if total.logged_files > 0 {
        line(
            "logged",
            format!(
                "{} in logs of {}",
                bytes(total.logged_bytes),
                count(total.logged_files, "file")
            ),
        );
    }
    line(
        "durable",
        format!(
            "{} in {}",
            bytes(total.durable_bytes),
            count(total.durable_files, "file")
        ),
    );
    let hosts = shown_hosts(job);
    if !hosts.is_empty() {
        let head = [
            "HOST", "STATE", "HELD", "FILES", "IN", "OUT", "ERRORS", "WAITS",
        ];
        let rows = hosts.iter().map(|host| status_row(host));
        text += "\n";
        text += &format_table(&head, rows.collect(), &hosts, paint);
    }
    for host in &hosts {
        for advice in &host.advice {
            text += &format!("\n{}: {}\n", paint.warning(&host.host), printable(advice));
        }
    }
    text + &note_lines(job, paint)
}

/// Returns the hosts that the table shows: all but those that have left.
fn shown_hosts(job: &Job) -> Vec<&Host> {
    job.hosts.iter().filter(|host| !host.is_gone()).collect()
}

/// Returns the first line: the backing, and the number of hosts in each state.
fn head_line(job: &Job, paint: Paint) -> String {
    let total = &job.total;
    let hosts = total.alive + total.silent + total.dead;
    let states = total.hosts_by_state();
    let backing = paint.head(&job.backing.to_string());
    match hosts {
        0 => format!("{backing}  no hosts\n"),
        _ => format!("{backing}  {}: {}\n", count(hosts, "host"), states),
    }
}

/// Returns the notes of the job, with an empty line before each.
fn note_lines(job: &Job, paint: Paint) -> String {
    let notes = job.notes.iter();
    notes
        .map(|note| format!("\n{}\n", paint.warning(&printable(note))))
        .collect()
}

/// Returns a total in bytes, with the present speed.
fn format_speed(total: u64, now: f64) -> String {
    let now = if now < 1.0 {
        String::new()
    } else {
        format!(", {} now", rate(now))
    };
    format!("{}{now}", bytes(total))
}

/// Returns the sign for a value that is not known.
fn no_value() -> String {
    "-".to_owned()
}

/// Returns the row of a host for `firn hosts`.
fn host_row(host: &Host) -> Vec<String> {
    let report = host.report.as_ref();
    let of = |get: fn(&firn_protocol::HostReport) -> String| report.map_or_else(no_value, get);
    vec![
        host.host.clone(),
        life_word(host.state).to_owned(),
        host.beat_age_seconds
            .map_or_else(no_value, |age| format!("{} ago", seconds(age))),
        host.mounted_seconds.map_or_else(no_value, seconds),
        of(|report| report.user_id.to_string()),
        of(|report| printable(&report.version)),
        of(|report| bytes(report.held_bytes)),
        of(|report| {
            if report.mount_point.is_empty() {
                no_value()
            } else {
                report.mount_point.to_string()
            }
        }),
    ]
}

/// Returns the row of a host for `firn status --job`.
fn status_row(host: &Host) -> Vec<String> {
    let report = host.report.as_ref();
    let of = |get: fn(&firn_protocol::HostReport) -> String| report.map_or_else(no_value, get);
    // The last known rate of a host whose lease is not renewed is no current rate, so a dash replaces it.
    let now = |get: fn(&firn_protocol::HostReport) -> f64| match host.state {
        Life::Alive => report.map_or_else(no_value, |report| rate(get(report))),
        _ => no_value(),
    };
    vec![
        host.host.clone(),
        life_word(host.state).to_owned(),
        of(|report| bytes(report.held_bytes)),
        of(|report| report.held_files.to_string()),
        now(|report| report.ingest_bytes_per_second),
        now(|report| report.drain_bytes_per_second),
        of(|report| report.errors.to_string()),
        match &host.waits[..] {
            [] => no_value(),
            waits => waits.join("; "),
        },
    ]
}

/// Returns a table with a head line. The colour of a row shows the trouble of the host.
fn format_table(head: &[&str], rows: Vec<Vec<String>>, hosts: &[&Host], paint: Paint) -> String {
    let head = head.iter().map(|word| (*word).to_owned()).collect();
    let mut lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    pad_columns(&mut lines, &[]);
    let painted_lines = lines.iter().enumerate().map(|(index, row)| {
        let line = row.join("  ");
        let line = line.trim_end();
        // Row 0 is the head line.
        let colour = index
            .checked_sub(1)
            .map(|host| hosts[host].trouble().colour());
        let painted = match colour {
            None => paint.head(line),
            Some(TroubleColour::Error) => paint.error(line),
            Some(TroubleColour::Warning) => paint.warning(line),
            Some(TroubleColour::Plain) => line.to_owned(),
        };
        painted + "\n"
    });
    painted_lines.collect()
}

/// Returns the lines below the table for one host: the evidence for its state if that is not a beat, its
/// differences, waits and advice.
fn host_details(host: &Host, paint: Paint) -> String {
    let mut lines = Vec::new();
    if host.state != Life::Alive {
        lines.push(host.evidence.clone());
    }
    lines.extend(
        host.differences
            .iter()
            .map(|what| format!("differs: {what}")),
    );
    lines.extend(token_line(host));
    let partner = host
        .report
        .as_ref()
        .and_then(|report| report.partner.as_ref());
    if let Some(partner) = partner.and_then(|partner| partner.host.as_ref()) {
        lines.push(format!("its partner is {partner}"));
    }
    lines.extend(host.waits.iter().cloned());
    lines.extend(host.advice.iter().map(|advice| format!("→ {advice}")));
    if lines.is_empty() {
        return String::new();
    }
    let lines = lines.iter().map(|line| format!("  {}\n", printable(line)));
    format!(
        "\n{}\n{}",
        paint.head(&host.host),
        lines.collect::<String>()
    )
}

/// Returns the lane tokens that a host holds, in words. A token gives a lane one writer among the hosts. Returns `None`
/// where the host holds no token.
fn token_line(host: &Host) -> Option<String> {
    let report = host.report.as_ref()?;
    let held = report.lanes.iter();
    let held = held.filter(|lane| lane.token == Some(firn_protocol::TokenState::Held));
    let held: Vec<String> = held.map(|lane| lane.lane.to_string()).collect();
    match &held[..] {
        [] => None,
        [lane] => Some(format!("has the token of lane {lane}")),
        lanes => Some(format!("has the tokens of lanes {}", lanes.join(", "))),
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::rows::tests::job;
    use super::super::{Job, JobTotals};
    use super::*;

    /// Returns a job of five hosts.
    pub fn example() -> Job {
        let hosts = job();
        Job {
            backing: "/scratch/run42".into(),
            total: JobTotals::of(&hosts),
            hosts,
            notes: vec!["a note".into()],
            is_partial: true,
        }
    }

    fn compare(name: &str, text: &str) {
        crate::snapshot::compare(&format!("job/{name}.txt"), text);
    }

    #[test]
    fn hosts_are_listed_with_what_to_do() {
        // Tests have no terminal on stdout under cargo.
        compare("hosts", &hosts_text(&example(), Paint::stdout()));
    }

    #[test]
    fn a_job_is_added_up_and_has_a_line_for_each_host() {
        let job = example();
        compare("status", &status_text(&job, Paint::stdout()));
        assert_eq!(job.total.stranded_bytes, 1 << 30);
    }
}
