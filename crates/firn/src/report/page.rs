//! The HTML page of a report: problems and the most important figures first, then the timeline, then the details.
//!
//! Each `render_` function returns one section of the page as HTML. Style and script are part of the page, so that it
//! needs no other file. The figures are those of records: what each mount of a run did. *Drained* means written from
//! memory to the backing, the directory in which files end up.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

use firn_protocol::HistogramStatus;
use firn_protocol::events;
use firn_protocol::record::{EventRecord, RunRecord};

use super::Run;
use super::chart::{self, LAYOUTS, Mark};
use super::checkpoint_table;
use super::html::HtmlText;
use super::timeline::Timeline;
use crate::text::{self, bytes, count, seconds};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Maximum number of events on the page. The newest are shown.
const EVENTS_MAX: usize = 500;
/// CSS classes of a card, which decide its colour.
const NEUTRAL: &str = "";
const GOOD: &str = "good";
const BAD: &str = "bad";
/// Maximum number of marks in the timeline. More of them would hide it.
const MARKS_MAX: usize = 60;

/// Sums over the records of all hosts of a run.
struct RunTotals {
    /// Bytes that are in memory at the end of the records.
    held_bytes: u64,
    /// Bytes that were overwritten or removed in memory before they were drained.
    cancelled_bytes: u64,
    /// Failed writes to the backing.
    drain_errors: u64,
    /// Whether all mounts have ended.
    has_ended: bool,
    /// Sizes of programs' writes.
    ingest_write_bytes: HistogramStatus,
    /// Sizes of writes to the backing.
    drain_write_bytes: HistogramStatus,
    /// Times of programs' writes.
    write_seconds: HistogramStatus,
    /// Times of programs' closes.
    close_seconds: HistogramStatus,
    /// Times of programs' syncs.
    fsync_seconds: HistogramStatus,
    /// Times of writes to the backing.
    drain_seconds: HistogramStatus,
}

impl RunTotals {
    /// Adds up the records of all hosts. A record says what one mount did.
    fn from_records(records: &[RunRecord]) -> Self {
        let sum = |value: &dyn Fn(&RunRecord) -> u64| -> u64 {
            records
                .iter()
                .fold(0, |sum, record| sum.saturating_add(value(record)))
        };
        let merge = |histogram: &dyn Fn(&RunRecord) -> &HistogramStatus| {
            let mut merged = HistogramStatus::default();
            for record in records {
                add_histogram(&mut merged, histogram(record));
            }
            merged
        };
        Self {
            held_bytes: sum(&|record| record.held_bytes),
            cancelled_bytes: sum(&|record| record.cancelled_bytes),
            drain_errors: sum(&|record| record.drain_errors),
            has_ended: records.iter().all(|record| record.has_ended),
            ingest_write_bytes: merge(&|record| &record.ingest_write_bytes),
            drain_write_bytes: merge(&|record| &record.drain_write_bytes),
            write_seconds: merge(&|record| &record.write_seconds),
            close_seconds: merge(&|record| &record.close_seconds),
            fsync_seconds: merge(&|record| &record.fsync_seconds),
            drain_seconds: merge(&|record| &record.drain_seconds),
        }
    }

    /// Returns the seconds that all programs together spent in write, close and fsync.
    fn seconds_in_calls(&self) -> f64 {
        self.write_seconds.sum + self.close_seconds.sum + self.fsync_seconds.sum
    }

    /// Returns the seconds that programs would have spent if they had written to the backing directly, at the speed of
    /// firnd's writes. Returns `None` if nothing was written to the backing, so that its speed is unknown.
    fn direct_seconds(&self) -> Option<f64> {
        let drained_bytes = self.drain_write_bytes.sum;
        if drained_bytes <= 0.0 {
            return None;
        }
        let seconds_per_byte = self.drain_seconds.sum / drained_bytes;
        Some(seconds_per_byte * self.ingest_write_bytes.sum)
    }
}

/// Adds the counts of a histogram to `sum`. A histogram with other bounds cannot be added, and is left out.
fn add_histogram(sum: &mut HistogramStatus, histogram: &HistogramStatus) {
    if sum.bounds.is_empty() {
        *sum = histogram.clone();
    } else if sum.bounds == histogram.bounds {
        for (count, added_count) in sum.counts.iter_mut().zip(&histogram.counts) {
            *count = count.saturating_add(*added_count);
        }
        sum.sum += histogram.sum;
    }
}

/// Returns the page as HTML, from the records of the run (what each mount did).
pub fn render_page(run: &Run) -> String {
    let total = RunTotals::from_records(&run.records);
    let timelines = LAYOUTS.map(|layout| Timeline::new(&run.records, layout.bin_count()));
    // Both timelines cover the same time, and differ only in the number of bins.
    let [timeline, _] = &timelines;
    let title = run
        .records
        .first()
        .map_or_else(String::new, |record| record.mount_point.to_string());
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';script-src \
         'unsafe-inline'\"><title>Firn run: {}</title>\n<style>\n{STYLE}</style></head>\n<body><main>\n",
        HtmlText(&title)
    );
    html += &render_header(run, &title, timeline);
    html += &render_problems(run, &total);
    html += &render_cards(&total);
    html += &render_timeline(run, &timelines);
    let checkpoints = checkpoint_table::merge_checkpoints(&run.records, timeline.began_unix_us);
    html += &checkpoint_table::render_section(run, &checkpoints, timeline.seconds);
    html += &render_sizes(&total);
    html += &render_calls(&total);
    html += &render_saved(&total);
    html += &render_events(run, timeline.began_unix_us);
    html += &render_hosts(run);
    let _ = write!(
        html,
        "<footer>Made by firn {}. Times are of each host's own clock; sums are of all hosts. Each moment of the timeline is at \
        least {} long. Counts between two readings of the counters are spread over the time between them.</footer>\n</main>\n\
         <script>\n{SCRIPT}</script></body></html>\n",
        env!("CARGO_PKG_VERSION"),
        longest_bucket_text(&run.records)
    );
    html
}

/// Returns the length of the longest time interval (bucket) in any record, as text.
fn longest_bucket_text(records: &[RunRecord]) -> String {
    let longest_ms = records
        .iter()
        .map(|record| record.bucket_ms)
        .max()
        .unwrap_or(0);
    seconds(longest_ms as f64 / 1000.0)
}

/// Returns a time as date and time of day in UTC.
fn format_date(unix_us: u64) -> String {
    // humantime formats times before the year 10000. The check of a record bounds its beginning to less.
    let time = UNIX_EPOCH + Duration::from_micros(unix_us);
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

/// Returns the head of the page: mount point, begin, length, number of hosts, and backing.
fn render_header(run: &Run, title: &str, timeline: &Timeline) -> String {
    let hosts = count(host_count(&run.records), "host");
    let backing = run.records.first().map(|record| record.backing.to_string());
    let state = if run.records.iter().all(|record| record.has_ended) {
        ""
    } else {
        " · still mounted"
    };
    format!(
        "<header><p class=\"eyebrow\">Firn · report of a run</p><h1>{}</h1><p class=\"sub\">{} · {} · {hosts} · files in \
         <code>{}</code>{state}</p></header>\n",
        HtmlText(title),
        format_date(timeline.began_unix_us),
        seconds(timeline.seconds),
        HtmlText(backing.unwrap_or_default()),
    )
}

/// Returns the number of different hosts. A host with several mounts has several records.
fn host_count(records: &[RunRecord]) -> u64 {
    let hosts: BTreeSet<&str> = records.iter().map(|record| record.host.as_str()).collect();
    hosts.len() as u64
}

/// Returns the section about problems, or an empty text if there is none. A problem is what could not be read, data
/// that was left in memory, failed writes, or entries that a record had no space for.
fn render_problems(run: &Run, total: &RunTotals) -> String {
    let mut problems = run.failures.clone();
    if total.held_bytes > 0 && total.has_ended {
        problems.push(format!(
            "{} remained in memory when the mount ended: mount again, or run `firn recover` on the backing",
            bytes(total.held_bytes)
        ));
    }
    if total.drain_errors > 0 {
        let errors = count(total.drain_errors, "write");
        problems.push(format!(
            "{errors} to the backing failed and had to be retried: see the events below"
        ));
    }
    let dropped_entries = run
        .records
        .iter()
        .fold(0u64, |sum, record| sum.saturating_add(record.forgotten));
    if dropped_entries > 0 {
        problems.push(format!(
            "there were more checkpoints, files or events than a record holds: {dropped_entries} are missing"
        ));
    }
    if problems.is_empty() {
        return String::new();
    }
    let items: String = problems
        .iter()
        .map(|problem| format!("<li>{}</li>", HtmlText(problem)))
        .collect();
    format!("<section class=\"problems\"><h2>Look at this first</h2><ul>{items}</ul></section>\n")
}

/// Returns the section with the most important figures, each on a card. Bytes that are only in memory at the end of the
/// mount are marked as bad.
fn render_cards(total: &RunTotals) -> String {
    let mut html = String::from("<section class=\"cards\">");
    html += &render_writes_card("Written by programs", &total.ingest_write_bytes);
    html += &render_writes_card("Written to the backing", &total.drain_write_bytes);
    html += &render_card(
        NEUTRAL,
        "Programs waited",
        &seconds(total.seconds_in_calls()),
        &["in write, close and fsync,", "sum of all programs"],
    );
    html += &render_saving_card(total);
    let has_undrained_rest = total.held_bytes > 0 && total.has_ended;
    let when = if total.has_ended {
        "at the end of the mount"
    } else {
        "now"
    };
    html += &render_card(
        if has_undrained_rest { BAD } else { NEUTRAL },
        "Only in memory",
        &bytes(total.held_bytes),
        &[when],
    );
    html + "</section>\n"
}

/// Returns a card with the sum of the sizes of writes, and below it their number and mean size.
fn render_writes_card(label: &str, sizes: &HistogramStatus) -> String {
    let mean_size = match sizes.mean() {
        Some(mean) => format!("{} on average", bytes(mean as u64)),
        None => "no write".to_owned(),
    };
    let write_count = count(sizes.count(), "write");
    render_card(
        NEUTRAL,
        label,
        &bytes(sizes.sum as u64),
        &[&write_count, &mean_size],
    )
}

/// Returns the card with the time that programs saved or lost, compared with direct writes to the backing.
fn render_saving_card(total: &RunTotals) -> String {
    let Some(direct_seconds) = total.direct_seconds() else {
        let notes = ["nothing was written", "to the backing"];
        return render_card(NEUTRAL, "Time saved", "–", &notes);
    };
    let saved_seconds = direct_seconds - total.seconds_in_calls();
    let (class, label) = if saved_seconds >= 0.0 {
        (GOOD, "Time saved")
    } else {
        (BAD, "Time lost")
    };
    let value = format!("≈ {}", seconds(saved_seconds.abs()));
    render_card(class, label, &value, &["inferred, see below"])
}

/// Returns a card: a label, a large value, and notes below it.
fn render_card(class: &str, label: &str, value: &str, notes: &[&str]) -> String {
    let notes: String = notes
        .iter()
        .map(|note| format!("<span>{note}</span>"))
        .collect();
    format!(
        "<div class=\"card {class}\"><span class=\"label\">{label}</span><b>{value}</b>{notes}</div>"
    )
}

/// Returns the section of the timeline, with a chart for each layout (wide and narrow screens), of which the page's
/// style shows one. The timelines differ only in the length of their time intervals.
fn render_timeline(run: &Run, timelines: &[Timeline; 2]) -> String {
    let mut html = String::from(
        "<section><h2>Timeline</h2>\n<p class=\"legend\"><span><i class=\"key in\"></i>written by programs</span> \
         <span><i class=\"key out\"></i>written to the backing</span> <span><i class=\"key held\"></i>in memory</span> \
         <span><i class=\"key wait\"></i>programs wait</span> <span><i class=\"key event\"></i>event</span></p>\n",
    );
    let arena_bytes = run
        .records
        .iter()
        .fold(0u64, |sum, record| sum.saturating_add(record.arena_bytes));
    let marks = event_marks(run, timelines[0].began_unix_us);
    for (layout, timeline) in LAYOUTS.iter().zip(timelines) {
        html += &chart::render_chart(layout, timeline, arena_bytes, &marks);
    }
    let left_out_count = timelines[0].hosts.len().saturating_sub(chart::HOSTS_MAX);
    if left_out_count > 0 {
        let _ = write!(
            html,
            "<p class=\"note\">{} more in the table of hosts.</p>",
            count(left_out_count as u64, "host")
        );
    }
    html + "<p class=\"note\">The strips of a host show bytes written by programs, bytes written to the backing, and programs that \
    wait for room, in close or in fsync. A stronger colour means more, relative to the maximum of the strip. A wait is drawn \
    at its end, but a wait for room is drawn while it lasts.</p></section>\n"
}

/// Returns the marks of the events that a reader looks for first. The newest are shown.
fn event_marks(run: &Run, began_unix_us: u64) -> Vec<Mark> {
    let mut marks = Vec::new();
    for HostEvent { host, event } in events_by_time(run) {
        if matches!(event.kind.as_str(), "mounted" | "unmounted") {
            continue;
        }
        let at_seconds = seconds_since(began_unix_us, event);
        let time = seconds(at_seconds);
        marks.push(Mark {
            at_seconds,
            is_bad: is_problem(event),
            title: format!("{time} · {host}: {}", event_text(event)),
        });
    }
    marks.drain(..marks.len().saturating_sub(MARKS_MAX));
    marks
}

/// Returns how many seconds after the beginning of the run an event happened.
fn seconds_since(began_unix_us: u64, event: &EventRecord) -> f64 {
    event.unix_us.saturating_sub(began_unix_us) as f64 / 1e6
}

/// Returns whether an event is a problem, which the page highlights.
fn is_problem(event: &EventRecord) -> bool {
    matches!(
        event.kind.as_str(),
        "arena_full" | "backing_failed" | "error_given_up" | "aborted"
    )
}

/// An event, and the host that recorded it.
struct HostEvent<'a> {
    /// Name of the host.
    host: &'a str,
    /// The event.
    event: &'a EventRecord,
}

/// Returns the events of all hosts, with the oldest first.
fn events_by_time(run: &Run) -> Vec<HostEvent<'_>> {
    let event_count = run.records.iter().map(|record| record.events.len()).sum();
    let mut events = Vec::with_capacity(event_count);
    for record in &run.records {
        for event in &record.events {
            let host = record.host.as_str();
            events.push(HostEvent { host, event });
        }
    }
    events.sort_by_key(|host_event| host_event.event.unix_us);
    events
}

/// Returns an event as a sentence, with its fields in parentheses. The sentence for an unknown kind is the kind itself.
fn event_text(event: &EventRecord) -> String {
    let sentence = match events::find(&event.kind) {
        Some(known_kind) => known_kind.help,
        None => &event.kind,
    };
    let fields: Vec<String> = event
        .fields
        .iter()
        .map(|(name, value)| event_field_text(name, value))
        .collect();
    if fields.is_empty() {
        return sentence.to_owned();
    }
    format!("{sentence} ({})", fields.join(", "))
}

/// Returns a field of an event in words. A number is written with its unit in place of the end of the name that names
/// the unit.
fn event_field_text(name: &str, value: &str) -> String {
    let Ok(number) = value.parse::<f64>() else {
        return format!("{} {value}", name.replace('_', " "));
    };
    let name_without_unit = ["_bytes", "_seconds"]
        .iter()
        .find_map(|unit| name.strip_suffix(unit))
        .unwrap_or(name);
    let words = name_without_unit.replace('_', " ");
    format!("{words} {}", text::figure(name, number))
}

/// Returns the section that compares the sizes of programs' writes (ingest) with those of firnd's writes to the backing
/// (drain).
fn render_sizes(total: &RunTotals) -> String {
    let (ingest, drain) = (&total.ingest_write_bytes, &total.drain_write_bytes);
    let mut html = String::from(
        "<section><h2>Sizes of writes, before and after</h2>\n<p class=\"legend\"><span><i class=\"key in\"></i>writes of programs</span> \
         <span><i class=\"key out\"></i>writes to the backing</span></p>\n<table class=\"sizes\"><thead><tr><th class=\"n\">Size up to</th>\
         <th class=\"n\">Programs</th><th class=\"meter\"></th><th class=\"n\">Backing</th><th class=\"meter\"></th></tr></thead>\
         <tbody>\n",
    );
    html += &render_size_rows(ingest, drain);
    html += "</tbody></table>\n";
    let note = if drain.count() > 0 {
        let factor = ingest.count() as f64 / drain.count() as f64;
        format!(
            "Number of writes of each size. {} became {}: {factor:.1} writes of programs for one to the backing.",
            count(ingest.count(), "write"),
            count(drain.count(), "write")
        )
    } else {
        "Number of writes of each size.".to_owned()
    };
    let _ = writeln!(html, "<p class=\"note\">{note}</p></section>");
    html
}

/// Returns a row for each size of writes, from the smallest size that occurs to the largest. `ingest` counts the writes
/// of programs, and `drain` those to the backing.
fn render_size_rows(ingest: &HistogramStatus, drain: &HistogramStatus) -> String {
    // An empty histogram has no buckets.
    let count_in_bucket = |histogram: &HistogramStatus, bucket: usize| {
        histogram.counts.get(bucket).copied().unwrap_or(0)
    };
    let largest_count = |histogram: &HistogramStatus| -> u64 {
        histogram.counts.iter().copied().max().unwrap_or(0).max(1)
    };
    let bucket_count = ingest.counts.len().max(drain.counts.len());
    let is_used = |bucket: &usize| {
        count_in_bucket(ingest, *bucket) > 0 || count_in_bucket(drain, *bucket) > 0
    };
    let first_used = (0..bucket_count).find(is_used);
    let last_used = (0..bucket_count).rfind(is_used);
    let (Some(first_used), Some(last_used)) = (first_used, last_used) else {
        return String::new();
    };
    let bounds = if ingest.bounds.is_empty() {
        &drain.bounds
    } else {
        &ingest.bounds
    };
    let mut html = String::new();
    for bucket in first_used..=last_used {
        // The last bucket has no bound.
        let size = match bounds.get(bucket) {
            Some(bound) => bytes(*bound as u64),
            None => "more".to_owned(),
        };
        let ingest_count = count_in_bucket(ingest, bucket);
        let drain_count = count_in_bucket(drain, bucket);
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{size}</td><td class=\"n\">{}</td>{}<td class=\"n\">{}</td>{}</tr>",
            nonzero_text(ingest_count),
            render_meter_cell("in", ingest_count, largest_count(ingest)),
            nonzero_text(drain_count),
            render_meter_cell("out", drain_count, largest_count(drain))
        );
    }
    html
}

/// Returns a count as text, which is empty for 0.
fn nonzero_text(count: u64) -> String {
    if count == 0 {
        String::new()
    } else {
        count.to_string()
    }
}

/// Returns a table cell with a bar, whose length shows `count` relative to `max`. It is empty for 0.
fn render_meter_cell(class: &str, count: u64, max: u64) -> String {
    let bar = if count == 0 {
        String::new()
    } else {
        let width = count as f64 / max as f64 * 100.0;
        format!("<i class=\"{class}\" style=\"width:{width:.1}%\"></i>")
    };
    format!("<td class=\"meter\">{bar}</td>")
}

/// The times of one kind of call: a row of the table of calls.
struct CallTimes<'a> {
    /// Name of the calls.
    name: &'static str,
    /// Says more about the calls.
    about: &'static str,
    /// Durations of the calls.
    times: &'a HistogramStatus,
}

/// Returns the section with the times of calls: those of programs, and the writes of firnd (the daemon) to the backing.
fn render_calls(total: &RunTotals) -> String {
    let calls = [
        CallTimes {
            name: "write",
            about: "of programs, with waits for room",
            times: &total.write_seconds,
        },
        CallTimes {
            name: "close",
            about: "of programs",
            times: &total.close_seconds,
        },
        CallTimes {
            name: "fsync",
            about: "of programs",
            times: &total.fsync_seconds,
        },
        CallTimes {
            name: "drain",
            about: "writes of firnd to the backing",
            times: &total.drain_seconds,
        },
    ];
    let longest_sum = calls.iter().map(|call| call.times.sum).fold(0.0, f64::max);
    let mut html = String::from(
        "<section><h2>Time in calls</h2>\n<div class=\"scroll\"><table><thead><tr><th>Call</th><th class=\"n\">Calls</th>\
         <th class=\"n\">Together</th><th class=\"meter extra\"></th><th class=\"n\">On average</th><th class=\"n extra\">Half up to</th>\
         <th class=\"n\">99 % up to</th></tr></thead><tbody>\n",
    );
    for call in calls {
        html += &render_call_row(&call, longest_sum);
    }
    html + "</tbody></table></div><p class=\"note\">Measured in firnd, from a request to its answer. Programs with the preload \
            library store bytes in memory themselves: such writes are counted under sizes, but not here.</p></section>\n"
}

/// Returns the row of one kind of call. A bar shows the sum of its times relative to `longest_sum`.
fn render_call_row(call: &CallTimes<'_>, longest_sum: f64) -> String {
    let CallTimes { name, about, times } = call;
    let quantile = |share| match times.quantile(share) {
        None => "–".to_owned(),
        Some(bound) if bound.is_finite() => short_time(bound),
        Some(_) => "more".to_owned(),
    };
    let mean = times.mean().map_or("–".to_owned(), short_time);
    let bar = if times.sum > 0.0 {
        let width = times.sum / longest_sum * 100.0;
        format!("<i class=\"time\" style=\"width:{width:.1}%\"></i>")
    } else {
        String::new()
    };
    format!(
        "<tr><td class=\"call\">{name}<small>{about}</small></td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"meter extra\">{bar}</td><td class=\"n\">{mean}</td><td class=\"n extra\">{}</td><td class=\"n\">{}</td></tr>\n",
        times.count(),
        seconds(times.sum),
        quantile(0.5),
        quantile(0.99)
    )
}

/// Returns the time of a call. Some calls take only microseconds.
fn short_time(time: f64) -> String {
    match time {
        ..0.000_999_5 => format!("{:.0} µs", time * 1e6),
        ..0.1 => format!("{:.1} ms", time * 1e3),
        _ => seconds(time),
    }
}

/// Returns the section on saved time: the time that direct writes to the backing would have taken, minus the time that
/// programs waited.
fn render_saved(total: &RunTotals) -> String {
    let tag = |word: &str| format!(" <span class=\"tag\">{word}</span>");
    let (measured, inferred) = (tag("measured"), tag("inferred"));
    let mut html = String::from("<section><h2>Time saved compared with direct writes</h2>\n");
    let Some(direct_seconds) = total.direct_seconds() else {
        return html
            + "<p class=\"note\">Nothing was written to the backing, so its speed is not known.</p></section>\n";
    };
    let waited_seconds = total.seconds_in_calls();
    let drain_seconds = total.drain_seconds.sum;
    let label = if direct_seconds >= waited_seconds {
        "Time saved"
    } else {
        "Time lost"
    };
    let _ = writeln!(
        html,
        "<dl><dt>Writes of firnd to the backing{measured}<small>{} of calls for {}</small></dt><dd>{}</dd>\
         <dt>The same for all bytes that programs wrote{inferred}<small>{} at that speed, with {} that were overwritten or removed \
         in memory</small></dt><dd>{}</dd>\
         <dt>Programs in write, close and fsync{measured}</dt><dd>− {}</dd>\
         <dt class=\"sum\">{label}{inferred}</dt><dd class=\"sum\">≈ {}</dd></dl>",
        seconds(drain_seconds),
        bytes(total.drain_write_bytes.sum as u64),
        seconds(drain_seconds),
        bytes(total.ingest_write_bytes.sum as u64),
        bytes(total.cancelled_bytes),
        seconds(direct_seconds),
        seconds(waited_seconds),
        seconds((direct_seconds - waited_seconds).abs())
    );
    html + "<p class=\"note\">Times of all programs and hosts are added up: eight programs that wait one second count as eight \
    seconds. The inference assumes that programs would have written each byte to the backing as fast as firnd did with its \
    larger, ordered writes. Smaller writes are usually slower, so the real saving is probably larger. Writes to the backing \
    may end in a page cache, for programs as well as for firnd. Stores of the preload library are not timed, so the time of \
    programs does not include them.</p></section>\n"
}

/// Returns the section with the table of events.
fn render_events(run: &Run, began_unix_us: u64) -> String {
    let events = events_by_time(run);
    let mut html = String::from("<section><h2>Events and errors</h2>\n");
    if events.is_empty() {
        return html + "<p class=\"note\">None.</p></section>\n";
    }
    let left_out_count = events.len().saturating_sub(EVENTS_MAX);
    html += "<div class=\"scroll\"><table><thead><tr><th class=\"n\">At</th><th>Host</th><th>What</th></tr></thead><tbody>\n";
    for HostEvent { host, event } in &events[left_out_count..] {
        let class = if is_problem(event) {
            " class=\"bad-text\""
        } else {
            ""
        };
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td>{}</td><td{class}>{}</td></tr>",
            seconds(seconds_since(began_unix_us, event)),
            HtmlText(host),
            HtmlText(event_text(event))
        );
    }
    html += "</tbody></table></div>\n";
    if left_out_count > 0 {
        let _ = writeln!(
            html,
            "<p class=\"note\">{left_out_count} older events are left out.</p>"
        );
    }
    html + "</section>\n"
}

/// Returns the section with the table of hosts: one row for each record, which says what the mount of a host did.
fn render_hosts(run: &Run) -> String {
    let mut html = String::from(
        "<section><h2>Hosts</h2>\n<div class=\"scroll\"><table><thead><tr><th>Host</th><th class=\"extra\">Mounted at</th><th class=\"n\">For</th>\
         <th class=\"n\">Written</th><th class=\"n\">To backing</th><th class=\"n\">In memory</th><th class=\"extra\">Version</th>\
         <th class=\"extra\">Record</th></tr></thead><tbody>\n",
    );
    for record in &run.records {
        let sums = record.total();
        let state = if record.has_ended {
            "complete"
        } else {
            "until then"
        };
        let _ = writeln!(
            html,
            "<tr><td>{}</td><td class=\"extra\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"extra\">{}</td><td class=\"extra\">{state}</td></tr>",
            HtmlText(&record.host),
            format_date(record.began_unix_us),
            seconds(record.lasted_seconds),
            bytes(sums.ingest_bytes),
            bytes(sums.drain_bytes),
            bytes(record.held_bytes),
            HtmlText(&record.firn_version)
        );
    }
    html += "</tbody></table></div>\n";
    let options: BTreeSet<&str> = run
        .records
        .iter()
        .flat_map(|record| &record.options)
        .map(String::as_str)
        .collect();
    if !options.is_empty() {
        let option_list = Vec::from_iter(options).join(" ");
        let _ = writeln!(
            html,
            "<p class=\"note\">Options: <code>{}</code></p>",
            HtmlText(option_list)
        );
    }
    html + "</section>\n"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn hostile() -> Run {
        let name = "</script><script>alert(1)</script>\"'&";
        let event = EventRecord {
            kind: name.into(),
            fields: BTreeMap::from([(name.into(), name.into())]),
            ..EventRecord::default()
        };
        let checkpoint = firn_protocol::record::CheckpointRecord {
            path: name.into(),
            ..Default::default()
        };
        let record = RunRecord {
            host: name.into(),
            mount_point: name.into(),
            backing: name.into(),
            firn_version: name.into(),
            options: vec![name.into()],
            bucket_ms: 100,
            events: vec![event],
            checkpoints: vec![checkpoint],
            ..RunRecord::default()
        };
        Run {
            records: vec![record],
            failures: vec![name.into()],
            ..Run::default()
        }
    }

    #[test]
    fn no_name_becomes_markup_anywhere() {
        let html = render_page(&hostile());
        assert!(!html.contains("<script>alert"), "{html}");
        assert_eq!(html.matches("<script>").count(), 1);
        assert_eq!(html.matches("</script>").count(), 1);
        assert!(html.matches("&lt;script&gt;alert(1)").count() > 8);
    }

    #[test]
    fn the_page_asks_no_network() {
        let html = render_page(&hostile());
        for word in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!html.contains(word), "{word}");
        }
    }

    #[test]
    fn the_saving_is_what_the_backing_would_have_cost_less_what_programs_waited() {
        let histogram = |count, sum| HistogramStatus {
            bounds: vec![1.0],
            counts: vec![count, 0],
            sum,
        };
        let record = RunRecord {
            ingest_write_bytes: histogram(100, 2000.0),
            drain_write_bytes: histogram(10, 1000.0),
            drain_seconds: histogram(10, 5.0),
            write_seconds: histogram(100, 1.0),
            close_seconds: histogram(1, 0.5),
            ..RunRecord::default()
        };
        let total = RunTotals::from_records(&[record.clone(), record]);
        assert_eq!(total.direct_seconds(), Some(20.0));
        assert_eq!(total.seconds_in_calls(), 3.0);
        let none = RunTotals::from_records(&[RunRecord::default()]);
        assert_eq!(none.direct_seconds(), None);
    }
}
