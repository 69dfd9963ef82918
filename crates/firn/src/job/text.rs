//! A job as text for the terminal: the tables of `firn hosts` and `firn status --job`.

use firn_format::quote::printable;
use firn_hosts::Life;
use firn_protocol::{HostReport, TokenState};

use super::{Host, Job, JobTotals, TroubleColour, life_word};
use crate::output::Paint;
use crate::text::{bytes, count, pad_columns, rate, seconds};

/// Returns the text of `firn hosts`: a row for each host of the job, and details below.
pub fn hosts_text(job: &Job, paint: Paint) -> String {
    let mut text = first_line(job, paint);
    let hosts = hosts_in_table(job);
    if !hosts.is_empty() {
        let column_names = [
            "HOST",
            "STATE",
            "BEAT",
            "MOUNTED",
            "USER",
            "VERSION",
            "HELD",
            "MOUNT POINT",
        ];
        text += "\n";
        text += &format_table(&column_names, &hosts, host_row, paint);
    }
    for host in &hosts {
        text += &host_details(host, paint);
    }
    text + &note_lines(job, paint)
}

/// Returns the text of `firn status --job`: the sums, and a row for each host.
pub fn status_text(job: &Job, paint: Paint) -> String {
    let mut text = first_line(job, paint);
    text += &lines_of_totals(&job.total, paint);
    let hosts = hosts_in_table(job);
    if !hosts.is_empty() {
        let column_names = [
            "HOST", "STATE", "HELD", "FILES", "IN", "OUT", "ERRORS", "WAITS",
        ];
        text += "\n";
        text += &format_table(&column_names, &hosts, status_row, paint);
    }
    for host in &hosts {
        for advice in &host.advice {
            text += &format!("\n{}: {}\n", paint.warning(&host.name), printable(advice));
        }
    }
    text + &note_lines(job, paint)
}

/// Returns a line for each sum over the hosts, with problems first. Problems that no host has are left out. Stranded
/// bytes are in the memory of a host without a running firnd, the daemon of a mount.
fn lines_of_totals(total: &JobTotals, paint: Paint) -> String {
    let mut text = String::new();
    let mut add_line = |label: &str, value: String| text += &format!("  {label:<13} {value}\n");
    if total.stranded_bytes > 0 {
        let stranded = format!(
            "{} that no running firnd drains",
            bytes(total.stranded_bytes)
        );
        add_line("stranded", paint.error(&stranded));
    }
    if total.errors > 0 {
        add_line("errors", paint.error(&total.errors.to_string()));
    }
    if total.waiting_writers > 0 {
        let waiting = format!(
            "{} for room in memory",
            count(total.waiting_writers, "writer")
        );
        add_line("waiting", paint.warning(&waiting));
    }
    let bytes_in_files =
        |byte_count, file_count| format!("{} in {}", bytes(byte_count), count(file_count, "file"));
    add_line(
        "in memory",
        bytes_in_files(total.held_bytes, total.held_files),
    );
    add_line(
        "received",
        format_with_rate(total.ingest_bytes, total.ingest_bytes_per_second),
    );
    add_line(
        "written",
        format_with_rate(total.drain_bytes, total.drain_bytes_per_second),
    );
    if total.logged_files > 0 {
        let logged = format!(
            "{} in logs of {}",
            bytes(total.logged_bytes),
            count(total.logged_files, "file")
        );
        add_line("logged", logged);
    }
    add_line(
        "durable",
        bytes_in_files(total.durable_bytes, total.durable_files),
    );
    text
}

/// Returns the hosts that the table shows: all but those that have left.
fn hosts_in_table(job: &Job) -> Vec<&Host> {
    job.hosts.iter().filter(|host| !host.is_gone()).collect()
}

/// Returns the first line: the backing, and the number of hosts in each state.
fn first_line(job: &Job, paint: Paint) -> String {
    let total = &job.total;
    let host_count = total.alive + total.silent + total.dead;
    let backing = paint.head(&job.backing.to_string());
    if host_count == 0 {
        return format!("{backing}  no hosts\n");
    }
    let states = total.hosts_by_state();
    format!("{backing}  {}: {states}\n", count(host_count, "host"))
}

/// Returns the notes of the job, with an empty line before each.
fn note_lines(job: &Job, paint: Paint) -> String {
    let notes = job.notes.iter();
    notes
        .map(|note| format!("\n{}\n", paint.warning(&printable(note))))
        .collect()
}

/// Returns a total in bytes, with the present rate unless that is below one byte per second.
fn format_with_rate(total_bytes: u64, bytes_per_second: f64) -> String {
    if bytes_per_second < 1.0 {
        return bytes(total_bytes);
    }
    format!("{}, {} now", bytes(total_bytes), rate(bytes_per_second))
}

/// Returns the sign for a value that is not known.
fn unknown_value() -> String {
    "-".to_owned()
}

/// Returns the row of a host for `firn hosts`. Half of the cells come from its report, the status that it wrote to the
/// backing, and are dashes without one.
fn host_row(host: &Host) -> Vec<String> {
    let mut row = vec![
        host.name.clone(),
        life_word(host.state).to_owned(),
        host.heartbeat_age_seconds
            .map_or_else(unknown_value, |age| format!("{} ago", seconds(age))),
        host.mounted_seconds.map_or_else(unknown_value, seconds),
    ];
    let Some(report) = &host.report else {
        // Four columns come from the report.
        row.extend(std::iter::repeat_with(unknown_value).take(4));
        return row;
    };
    row.push(report.user_id.to_string());
    row.push(printable(&report.version));
    row.push(bytes(report.held_bytes));
    row.push(if report.mount_point.is_empty() {
        unknown_value()
    } else {
        report.mount_point.to_string()
    });
    row
}

/// Returns the row of a host for `firn status --job`. The figures come from its report, the status that it wrote to the
/// backing, and are dashes without one. Held bytes are in its memory only.
fn status_row(host: &Host) -> Vec<String> {
    let reported = |value: fn(&HostReport) -> String| match &host.report {
        Some(report) => value(report),
        None => unknown_value(),
    };
    // The last known rate of a host whose lease is not renewed is no current rate, so a dash replaces it.
    let current_rate = |value: fn(&HostReport) -> f64| match &host.report {
        Some(report) if host.state == Life::Alive => rate(value(report)),
        _ => unknown_value(),
    };
    let waits = if host.waits.is_empty() {
        unknown_value()
    } else {
        host.waits.join("; ")
    };
    vec![
        host.name.clone(),
        life_word(host.state).to_owned(),
        reported(|report| bytes(report.held_bytes)),
        reported(|report| report.held_files.to_string()),
        current_rate(|report| report.ingest_bytes_per_second),
        current_rate(|report| report.drain_bytes_per_second),
        reported(|report| report.errors.to_string()),
        waits,
    ]
}

/// Returns a table with a head line and a row for each host. The colour of a row shows the trouble of the host.
fn format_table(
    column_names: &[&str],
    hosts: &[&Host],
    row_of_host: fn(&Host) -> Vec<String>,
    paint: Paint,
) -> String {
    let head_row: Vec<String> = column_names.iter().map(|name| (*name).to_owned()).collect();
    let mut rows = vec![head_row];
    rows.extend(hosts.iter().map(|host| row_of_host(host)));
    pad_columns(&mut rows, &[]);
    let mut lines = rows.iter().map(|row| row.join("  ").trim_end().to_owned());
    let head_line = lines.next().unwrap_or_default();
    let mut text = paint.head(&head_line) + "\n";
    for (line, host) in lines.zip(hosts) {
        text += &match host.trouble().colour() {
            TroubleColour::Error => paint.error(&line),
            TroubleColour::Warning => paint.warning(&line),
            TroubleColour::Plain => line,
        };
        text += "\n";
    }
    text
}

/// Returns the lines below the table for one host: its name, and below it its differences, waits and advice. A host
/// that is not alive also has the evidence for its state. Returns an empty text if there is nothing to say.
fn host_details(host: &Host, paint: Paint) -> String {
    let mut lines = Vec::new();
    if host.state != Life::Alive {
        lines.push(host.evidence.clone());
    }
    lines.extend(
        host.differences
            .iter()
            .map(|difference| format!("differs: {difference}")),
    );
    if let Some(report) = &host.report {
        lines.extend(held_tokens_text(report));
        if let Some(partner) = &report.partner
            && let Some(partner_name) = &partner.host
        {
            lines.push(format!("its partner is {partner_name}"));
        }
    }
    lines.extend(host.waits.iter().cloned());
    lines.extend(host.advice.iter().map(|advice| format!("→ {advice}")));
    if lines.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{}\n", paint.head(&host.name));
    for line in &lines {
        text += &format!("  {}\n", printable(line));
    }
    text
}

/// Returns the lane tokens that a host holds, in words. A token gives a lane (an I/O server) one writer among the
/// hosts. Returns `None` if the host holds no token.
fn held_tokens_text(report: &HostReport) -> Option<String> {
    let lane_numbers: Vec<String> = report
        .lanes
        .iter()
        .filter(|lane| lane.token == Some(TokenState::Held))
        .map(|lane| lane.lane.to_string())
        .collect();
    match &lane_numbers[..] {
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
            total: JobTotals::sum_of(&hosts),
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
