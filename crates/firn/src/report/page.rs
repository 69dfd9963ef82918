//! The HTML page of a report: problems and the most important figures first, then the timeline, then the details.
//!
//! Each `render_` function returns one section of the page as HTML. Style and script are part of the page, so that it
//! needs no other file.

use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

use firn_protocol::HistogramStatus;
use firn_protocol::events;
use firn_protocol::record::{EventRecord, RunRecord};

use super::Run;
use super::chart::{self, LAYOUTS, Mark};
use super::checkpoint_table as checkpoints;
use super::html::HtmlText;
use super::timeline::Timeline;
use crate::text::{self, bytes, count, seconds};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Maximum number of events on the page. The newest are shown.
const EVENTS_MAX: usize = 500;
/// Maximum number of marks in the timeline. More of them would hide it.
const MARKS_MAX: usize = 60;

/// Sums over all hosts.
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
    /// Adds up the records of all hosts.
    fn of(records: &[RunRecord]) -> Self {
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
    fn waited_seconds(&self) -> f64 {
        self.write_seconds.sum + self.close_seconds.sum + self.fsync_seconds.sum
    }

    /// Returns the seconds that programs would have spent if they had written to the backing directly, at the speed of
    /// firnd's writes. Returns `None` if nothing was written to the backing, so that its speed is unknown.
    fn direct_seconds(&self) -> Option<f64> {
        let drained = self.drain_write_bytes.sum;
        (drained > 0.0).then(|| self.drain_seconds.sum / drained * self.ingest_write_bytes.sum)
    }
}

/// Adds the counts of a histogram to `all`. A histogram with other bounds cannot be added, and is left out.
fn add_histogram(all: &mut HistogramStatus, other: &HistogramStatus) {
    if all.bounds.is_empty() {
        *all = other.clone();
    } else if all.bounds == other.bounds {
        for (count, more) in all.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        all.sum += other.sum;
    }
}

/// Returns the page as HTML.
pub fn render_page(run: &Run) -> String {
    let total = RunTotals::of(&run.records);
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
    let merged = checkpoints::merge_checkpoints(&run.records, timeline.began_unix_us);
    html += &checkpoints::render_section(run, &merged, timeline.seconds);
    html += &render_sizes(&total);
    html += &render_calls(&total);
    html += &render_saved(&total);
    html += &event_table(run, timeline.began_unix_us);
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
    let at = UNIX_EPOCH + Duration::from_micros(unix_us);
    let text = humantime::format_rfc3339_seconds(at).to_string();
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
    let mut hosts: Vec<&str> = records.iter().map(|record| record.host.as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    hosts.len() as u64
}

/// Returns the section about problems, which comes first. It is empty if there is none.
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
    let forgotten = run
        .records
        .iter()
        .fold(0u64, |sum, record| sum.saturating_add(record.forgotten));
    if forgotten > 0 {
        problems.push(format!(
            "there were more checkpoints, files or events than a record holds: {forgotten} are missing"
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

/// Returns the cards with the most important figures.
fn render_cards(total: &RunTotals) -> String {
    let ingest = &total.ingest_write_bytes;
    let drain = &total.drain_write_bytes;
    let mean = |histogram: &HistogramStatus| {
        histogram.mean().map_or("no write".to_owned(), |mean| {
            format!("{} on average", bytes(mean as u64))
        })
    };
    let card = |class: &str, label: &str, value: &str, notes: &[String]| {
        let notes: String = notes
            .iter()
            .map(|note| format!("<span>{note}</span>"))
            .collect();
        format!(
            "<div class=\"card {class}\"><span class=\"label\">{label}</span><b>{value}</b>{notes}</div>"
        )
    };
    let mut html = String::from("<section class=\"cards\">");
    html += &card(
        "",
        "Written by programs",
        &bytes(ingest.sum as u64),
        &[count(ingest.count(), "write"), mean(ingest)],
    );
    html += &card(
        "",
        "Written to the backing",
        &bytes(drain.sum as u64),
        &[count(drain.count(), "write"), mean(drain)],
    );
    html += &card(
        "",
        "Programs waited",
        &seconds(total.waited_seconds()),
        &[
            "in write, close and fsync,".into(),
            "sum of all programs".into(),
        ],
    );
    let saved = total
        .direct_seconds()
        .map(|direct| direct - total.waited_seconds());
    html += &match saved {
        Some(saved) if saved >= 0.0 => card(
            "good",
            "Time saved",
            &format!("≈ {}", seconds(saved)),
            &["inferred, see below".into()],
        ),
        Some(lost) => card(
            "bad",
            "Time lost",
            &format!("≈ {}", seconds(-lost)),
            &["inferred, see below".into()],
        ),
        None => card(
            "",
            "Time saved",
            "–",
            &["nothing was written".into(), "to the backing".into()],
        ),
    };
    let class = if total.held_bytes > 0 && total.has_ended {
        "bad"
    } else {
        ""
    };
    html += &card(
        class,
        "Only in memory",
        &bytes(total.held_bytes),
        &[if total.has_ended {
            "at the end of the mount".into()
        } else {
            "now".into()
        }],
    );
    html + "</section>\n"
}

/// Returns the section of the timeline, with a chart for each layout.
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
    let hidden = timelines[0].hosts.len().saturating_sub(chart::HOSTS_MAX);
    if hidden > 0 {
        let _ = write!(
            html,
            "<p class=\"note\">{} more in the table of hosts.</p>",
            count(hidden as u64, "host")
        );
    }
    html + "<p class=\"note\">The strips of a host show bytes written by programs, bytes written to the backing, and programs that \
    wait for room, in close or in fsync. A stronger colour means more, relative to the maximum of the strip. A wait is drawn \
    at its end, but a wait for room is drawn while it lasts.</p></section>\n"
}

/// Returns the marks of the events that a reader looks for first. The newest are shown.
fn event_marks(run: &Run, began_unix_us: u64) -> Vec<Mark> {
    let mut marks: Vec<Mark> = all_events(run)
        .into_iter()
        .filter(|(_, event)| !matches!(event.kind.as_str(), "mounted" | "unmounted"))
        .map(|(host, event)| {
            let at = event.unix_us.saturating_sub(began_unix_us) as f64 / 1e6;
            Mark {
                at_seconds: at,
                is_bad: is_problem(event),
                title: format!("{} · {host}: {}", seconds(at), event_text(event)),
            }
        })
        .collect();
    marks.drain(..marks.len().saturating_sub(MARKS_MAX));
    marks
}

/// Returns whether an event is a problem, which the page highlights.
fn is_problem(event: &EventRecord) -> bool {
    matches!(
        event.kind.as_str(),
        "arena_full" | "backing_failed" | "error_given_up" | "aborted"
    )
}

/// Returns the events of all hosts, with the oldest first.
fn all_events(run: &Run) -> Vec<(&str, &EventRecord)> {
    let event_count = run.records.iter().map(|record| record.events.len()).sum();
    let mut all = Vec::with_capacity(event_count);
    for record in &run.records {
        all.extend(
            record
                .events
                .iter()
                .map(|event| (record.host.as_str(), event)),
        );
    }
    all.sort_by_key(|(_, event)| event.unix_us);
    all
}

/// Returns an event as a sentence with its details.
fn event_text(event: &EventRecord) -> String {
    let known = events::find(&event.kind);
    let mut timeline = known.map_or_else(|| event.kind.clone(), |known| known.help.to_owned());
    let fields = event.fields.iter();
    let fields: Vec<String> = fields
        .map(|(name, value)| match value.parse::<f64>() {
            Ok(number) => {
                let word = ["_bytes", "_seconds"]
                    .iter()
                    .find_map(|unit| name.strip_suffix(unit))
                    .unwrap_or(name);
                format!("{} {}", word.replace('_', " "), text::figure(name, number))
            }
            Err(_) => format!("{} {value}", name.replace('_', " ")),
        })
        .collect();
    if !fields.is_empty() {
        let _ = write!(timeline, " ({})", fields.join(", "));
    }
    timeline
}

/// Returns the section that compares the sizes of programs' writes with those of writes to the backing.
fn render_sizes(total: &RunTotals) -> String {
    let (ingest, drain) = (&total.ingest_write_bytes, &total.drain_write_bytes);
    let mut html = String::from(
        "<section><h2>Sizes of writes, before and after</h2>\n<p class=\"legend\"><span><i class=\"key in\"></i>writes of programs</span> \
         <span><i class=\"key out\"></i>writes to the backing</span></p>\n<table class=\"sizes\"><thead><tr><th class=\"n\">Size up to</th>\
         <th class=\"n\">Programs</th><th class=\"meter\"></th><th class=\"n\">Backing</th><th class=\"meter\"></th></tr></thead>\
         <tbody>\n",
    );
    let max = |histogram: &HistogramStatus| histogram.counts.iter().copied().max().unwrap_or(0);
    let (most_in, most_out) = (max(ingest).max(1), max(drain).max(1));
    // An empty histogram has no buckets.
    let counts = |histogram: &HistogramStatus, index: usize| {
        histogram.counts.get(index).copied().unwrap_or(0)
    };
    let length = ingest.counts.len().max(drain.counts.len());
    let is_used = |index: &usize| counts(ingest, *index) > 0 || counts(drain, *index) > 0;
    let first = (0..length).find(is_used).unwrap_or(0);
    let last = (0..length).rfind(is_used).map_or(0, |last| last + 1);
    let longer = if ingest.bounds.is_empty() {
        drain
    } else {
        ingest
    };
    for index in first..last {
        let size = match longer.bounds.get(index) {
            Some(bound) => bytes(*bound as u64),
            None => "more".to_owned(),
        };
        let (ingest_count, drain_count) = (counts(ingest, index), counts(drain, index));
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{size}</td><td class=\"n\">{}</td>{}<td class=\"n\">{}</td>{}</tr>",
            format_count(ingest_count),
            render_meter("in", ingest_count, most_in),
            format_count(drain_count),
            render_meter("out", drain_count, most_out)
        );
    }
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

/// Returns a count as text, which is empty for 0.
fn format_count(count: u64) -> String {
    if count == 0 {
        String::new()
    } else {
        count.to_string()
    }
}

/// Returns a table cell with a bar, whose length shows `count` relative to `max`. It is empty for 0.
fn render_meter(class: &str, count: u64, max: u64) -> String {
    let bar = if count == 0 {
        String::new()
    } else {
        let width = count as f64 / max as f64 * 100.0;
        format!("<i class=\"{class}\" style=\"width:{width:.1}%\"></i>")
    };
    format!("<td class=\"meter\">{bar}</td>")
}

/// Returns the section with the times of calls.
fn render_calls(total: &RunTotals) -> String {
    let rows = [
        (
            "write",
            "of programs, with waits for room",
            &total.write_seconds,
        ),
        ("close", "of programs", &total.close_seconds),
        ("fsync", "of programs", &total.fsync_seconds),
        (
            "drain",
            "writes of firnd to the backing",
            &total.drain_seconds,
        ),
    ];
    let max = rows
        .iter()
        .map(|(.., histogram)| histogram.sum)
        .fold(0.0, f64::max);
    let mut html = String::from(
        "<section><h2>Time in calls</h2>\n<div class=\"scroll\"><table><thead><tr><th>Call</th><th class=\"n\">Calls</th>\
         <th class=\"n\">Together</th><th class=\"meter extra\"></th><th class=\"n\">On average</th><th class=\"n extra\">Half up to</th>\
         <th class=\"n\">99 % up to</th></tr></thead><tbody>\n",
    );
    for (name, about, histogram) in rows {
        let upto = |share| match histogram.quantile(share) {
            None => "–".to_owned(),
            Some(bound) if bound.is_finite() => short_time(bound),
            Some(_) => "more".to_owned(),
        };
        let mean = histogram.mean().map_or("–".to_owned(), short_time);
        let width = if max > 0.0 {
            histogram.sum / max * 100.0
        } else {
            0.0
        };
        let bar = if histogram.sum > 0.0 {
            format!("<i class=\"time\" style=\"width:{width:.1}%\"></i>")
        } else {
            String::new()
        };
        let _ = writeln!(
            html,
            "<tr><td class=\"call\">{name}<small>{about}</small></td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"meter extra\">{bar}</td><td class=\"n\">{mean}</td><td class=\"n extra\">{}</td><td class=\"n\">{}</td></tr>",
            histogram.count(),
            seconds(histogram.sum),
            upto(0.5),
            upto(0.99)
        );
    }
    html + "</tbody></table></div><p class=\"note\">Measured in firnd, from a request to its answer. Programs with the preload \
            library store bytes in memory themselves: such writes are counted under sizes, but not here.</p></section>\n"
}

/// Returns the time of a call. Some calls take only microseconds.
fn short_time(time: f64) -> String {
    match time {
        ..0.000_999_5 => format!("{:.0} µs", time * 1e6),
        ..0.1 => format!("{:.1} ms", time * 1e3),
        _ => seconds(time),
    }
}

/// Returns the section on saved time: the time that programs waited, beside what direct writes would have taken.
fn render_saved(total: &RunTotals) -> String {
    let tag = |word: &str| format!(" <span class=\"tag\">{word}</span>");
    let (measured, inferred) = (tag("measured"), tag("inferred"));
    let mut html = String::from("<section><h2>Time saved compared with direct writes</h2>\n");
    let Some(direct) = total.direct_seconds() else {
        return html
            + "<p class=\"note\">Nothing was written to the backing, so its speed is not known.</p></section>\n";
    };
    let waited = total.waited_seconds();
    let drain = &total.drain_seconds;
    let (word, difference) = if direct >= waited {
        ("Time saved", direct - waited)
    } else {
        ("Time lost", waited - direct)
    };
    let _ = writeln!(
        html,
        "<dl><dt>Writes of firnd to the backing{measured}<small>{} of calls for {}</small></dt><dd>{}</dd>\
         <dt>The same for all bytes that programs wrote{inferred}<small>{} at that speed, with {} that were overwritten or removed \
         in memory</small></dt><dd>{}</dd>\
         <dt>Programs in write, close and fsync{measured}</dt><dd>− {}</dd>\
         <dt class=\"sum\">{word}{inferred}</dt><dd class=\"sum\">≈ {}</dd></dl>",
        seconds(drain.sum),
        bytes(total.drain_write_bytes.sum as u64),
        seconds(drain.sum),
        bytes(total.ingest_write_bytes.sum as u64),
        bytes(total.cancelled_bytes),
        seconds(direct),
        seconds(waited),
        seconds(difference)
    );
    html + "<p class=\"note\">Times of all programs and hosts are added up: eight programs that wait one second count as eight \
    seconds. The inference assumes that programs would have written each byte to the backing as fast as firnd did with its \
    larger, ordered writes. Smaller writes are usually slower, so the real saving is probably larger. Writes to the backing \
    may end in a page cache, for programs as well as for firnd. Stores of the preload library are not timed, so the time of \
    programs does not include them.</p></section>\n"
}

/// Returns the section with the table of events.
fn event_table(run: &Run, began_unix_us: u64) -> String {
    let all = all_events(run);
    let mut html = String::from("<section><h2>Events and errors</h2>\n");
    if all.is_empty() {
        return html + "<p class=\"note\">None.</p></section>\n";
    }
    let hidden = all.len().saturating_sub(EVENTS_MAX);
    html += "<div class=\"scroll\"><table><thead><tr><th class=\"n\">At</th><th>Host</th><th>What</th></tr></thead><tbody>\n";
    for (host, event) in &all[hidden..] {
        let at = event.unix_us.saturating_sub(began_unix_us) as f64 / 1e6;
        let class = if is_problem(event) {
            " class=\"bad-text\""
        } else {
            ""
        };
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td>{}</td><td{class}>{}</td></tr>",
            seconds(at),
            HtmlText(host),
            HtmlText(event_text(event))
        );
    }
    html += "</tbody></table></div>\n";
    if hidden > 0 {
        let _ = writeln!(
            html,
            "<p class=\"note\">{hidden} older events are left out.</p>"
        );
    }
    html + "</section>\n"
}

/// Returns the section with the table of hosts.
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
    let mut options: Vec<&String> = run
        .records
        .iter()
        .flat_map(|record| &record.options)
        .collect();
    options.sort();
    options.dedup();
    if !options.is_empty() {
        let options: Vec<&str> = options.iter().map(|option| option.as_str()).collect();
        let _ = writeln!(
            html,
            "<p class=\"note\">Options: <code>{}</code></p>",
            HtmlText(options.join(" "))
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
        let total = RunTotals::of(&[record.clone(), record]);
        assert_eq!(total.direct_seconds(), Some(20.0));
        assert_eq!(total.waited_seconds(), 3.0);
        let none = RunTotals::of(&[RunRecord::default()]);
        assert_eq!(none.direct_seconds(), None);
    }
}
