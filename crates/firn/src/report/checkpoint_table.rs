//! The table of checkpoints in a report. A bar shows when each checkpoint was written to memory, drained (written to
//! the backing) and made durable (synced there).
//!
//! Each host records its own files of a checkpoint. [`merge_checkpoints`] joins these records to one row for each
//! checkpoint.

use std::collections::BTreeMap;
use std::fmt::Write;

use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::record::{CheckpointRecord, RunRecord};

use super::html::HtmlText;
use super::{CurrentCheckpoint, Run};
use crate::text::{bytes, seconds};

/// Maximum number of rows. The newest checkpoints are shown.
const ROWS_MAX: usize = 200;

/// A checkpoint of all hosts. Times are seconds since the first host began.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedCheckpoint {
    /// Path of the checkpoint below the mount point.
    path: BytePath,
    /// Number of the checkpoint.
    step: u64,
    /// When the first host began to write its files.
    began: f64,
    /// When the last host closed its files. `None` means that a host has not closed its files.
    closed: Option<f64>,
    /// When the last host had drained its files. `None` means that a host has not drained its files.
    drained: Option<f64>,
    /// When the last host had made its files durable. `None` means that the files of a host are not durable.
    durable: Option<f64>,
    /// Number of files on all hosts.
    files: u64,
}

/// Joins the records that hosts have of the same checkpoint. Returns the checkpoints in the order in which they began.
///
/// A checkpoint is closed, drained (in the backing) or durable (synced there) once the files of all hosts are.
/// `began_unix_us` is when the run began; no record began earlier.
pub fn merge_checkpoints(records: &[RunRecord], began_unix_us: u64) -> Vec<MergedCheckpoint> {
    let mut by_step_and_path: BTreeMap<(u64, Vec<u8>), MergedCheckpoint> = BTreeMap::new();
    for record in records {
        let host_offset_s = (record.began_unix_us - began_unix_us) as f64 / 1e6;
        for checkpoint in &record.checkpoints {
            let part_of_host = MergedCheckpoint::from_record(checkpoint, host_offset_s);
            by_step_and_path
                .entry((checkpoint.step, checkpoint.path.as_bytes().to_vec()))
                .and_modify(|merged| merged.add_host(&part_of_host))
                .or_insert(part_of_host);
        }
    }
    let mut checkpoints: Vec<MergedCheckpoint> = by_step_and_path.into_values().collect();
    checkpoints.sort_by(|a, b| a.began.total_cmp(&b.began));
    checkpoints
}

/// A part of a checkpoint's bar. Times are seconds since the first host began.
#[derive(Debug)]
struct BarSpan {
    /// CSS class of the state that the checkpoint had.
    class: &'static str,
    /// When the state began.
    begin: f64,
    /// When the state ended.
    end: f64,
}

impl MergedCheckpoint {
    /// Returns the files of one host. `host_offset_s` is added to the host's times, so that all hosts count from the
    /// same moment.
    fn from_record(record: &CheckpointRecord, host_offset_s: f64) -> Self {
        let shift = |time: f64| time + host_offset_s;
        Self {
            path: record.path.clone(),
            step: record.step,
            began: shift(record.began_seconds),
            closed: record.closed_seconds.map(shift),
            drained: record.drained_seconds.map(shift),
            durable: record.durable_seconds.map(shift),
            files: record.files,
        }
    }

    /// Adds another host's files of the same checkpoint.
    fn add_host(&mut self, host: &Self) {
        // A host without a time has not reached the state, so both together have not.
        let later = |a: Option<f64>, b: Option<f64>| Some(a?.max(b?));
        self.began = self.began.min(host.began);
        self.closed = later(self.closed, host.closed);
        self.drained = later(self.drained, host.drained);
        self.durable = later(self.durable, host.durable);
        self.files = self.files.saturating_add(host.files);
    }

    /// Returns the parts of the checkpoint's bar in order, one for each state: open, held (in memory only), drained (in
    /// the backing) and durable (synced there). A state that was not reached has length 0.
    fn bar_spans(&self, run_seconds: f64) -> Vec<BarSpan> {
        // A state that was not reached begins at the end of the run. No state begins before the one that precedes it.
        let closed = self.closed.unwrap_or(run_seconds);
        let drained = self
            .drained
            .map_or(run_seconds, |drained| drained.max(closed));
        let durable = self
            .durable
            .map_or(run_seconds, |durable| durable.max(drained));
        let span = |class, begin, end| BarSpan { class, begin, end };
        vec![
            span("open", self.began, closed),
            span("held", closed, drained),
            span("drained", drained, durable),
            span("durable", durable, run_seconds),
        ]
    }
}

/// Returns the section of the page with the table of checkpoints, as HTML: a legend, the rows and a note. If there
/// are more than [`ROWS_MAX`] checkpoints, the oldest are left out, and a second note says so. Without checkpoints it
/// is only a sentence.
pub fn render_section(run: &Run, checkpoints: &[MergedCheckpoint], run_seconds: f64) -> String {
    let mut html = String::from("<section><h2>Checkpoints</h2>\n");
    if checkpoints.is_empty() {
        html += "<p class=\"note\">There were no checkpoints: no file or directory with a step in its name \
        (<code>step_100</code>, <code>ckpt-0100.pt</code>) was written.</p></section>\n";
        return html;
    }
    html += "<p class=\"legend\"><span><i class=\"key open\"></i>being written</span> \
             <span><i class=\"key held\"></i>closed, in memory</span> <span><i class=\"key drained\"></i>in the backing</span> \
             <span><i class=\"key durable\"></i>durable</span></p>\n\
             <div class=\"scroll\"><table class=\"checkpoints\"><thead><tr><th class=\"n\">Step</th><th>Checkpoint</th>\
             <th class=\"n\">Size</th><th class=\"n extra\">Files</th><th class=\"n extra\">Began at</th>\
             <th class=\"n extra\">Written in</th><th class=\"n\">In backing after</th><th class=\"n extra\">Durable after</th>\
             <th>Now</th></tr></thead><tbody>\n";
    let left_out_count = checkpoints.len().saturating_sub(ROWS_MAX);
    for checkpoint in &checkpoints[left_out_count..] {
        html += &render_row(run, checkpoint, run_seconds);
    }
    html += "</tbody></table></div>\n";
    if left_out_count > 0 {
        let _ = writeln!(
            html,
            "<p class=\"note\">{left_out_count} older checkpoints are left out.</p>"
        );
    }
    html += "<p class=\"note\">“In backing after” and “durable after” count from the last close. A checkpoint is durable when \
    each file was synced, by fsync(2) or <code>firn wait --until durable</code>. The size of a removed checkpoint \
    is not known.</p></section>\n";
    html
}

/// Returns the current state of a checkpoint in one word. `present` is `None` if the checkpoint no longer exists.
fn state_text(checkpoint: &MergedCheckpoint, present: Option<&CurrentCheckpoint>) -> String {
    let Some(present) = present else {
        return "removed".to_owned();
    };
    if let Some(fault) = &present.fault {
        return fault.clone();
    }
    if checkpoint.durable.is_some() {
        return "durable".to_owned();
    }
    let level = present.level.map_or("empty", DurabilityLevel::as_str);
    level.to_owned()
}

/// Returns the parts of a checkpoint's bar as HTML. Their positions and widths are shares of the run's length.
fn render_bar(checkpoint: &MergedCheckpoint, run_seconds: f64) -> String {
    let mut html = String::new();
    for BarSpan { class, begin, end } in checkpoint.bar_spans(run_seconds) {
        if end <= begin {
            continue;
        }
        let left = begin / run_seconds * 100.0;
        let width = (end - begin) / run_seconds * 100.0;
        html += &format!("<i class=\"{class}\" style=\"left:{left:.2}%;width:{width:.2}%\"></i>");
    }
    html
}

/// Returns the HTML row of a checkpoint, and a second row with its bar. A dash stands for what is not known or did not
/// happen.
///
/// The cells are in the order of the heads in [`render_section`]: step, name, size, files, begin, time of writing,
/// times from the last close until it was drained (in the backing) and durable (synced there), and state now.
fn render_row(run: &Run, checkpoint: &MergedCheckpoint, run_seconds: f64) -> String {
    let present = run.checkpoints.get(&checkpoint.path);
    let time_since_close = |time: Option<f64>| match (time, checkpoint.closed) {
        (Some(time), Some(closed)) => seconds((time - closed).max(0.0)),
        _ => "–".to_owned(),
    };
    let size = present.map_or("–".to_owned(), |present| bytes(present.bytes));
    let files = present.map_or(checkpoint.files, |present| present.files);
    let written = match checkpoint.closed {
        Some(closed) => seconds((closed - checkpoint.began).max(0.0)),
        None => "open".to_owned(),
    };
    let bar = render_bar(checkpoint, run_seconds);
    format!(
        "<tr><td class=\"n\">{}</td><td class=\"path\">{}</td><td class=\"n\">{size}</td><td class=\"n extra\">{files}</td>\
         <td class=\"n extra\">{}</td><td class=\"n extra\">{written}</td><td class=\"n\">{}</td><td class=\"n extra\">{}</td><td>{}</td></tr>\n\
         <tr class=\"way\"><td colspan=\"9\"><div class=\"bar\">{bar}</div></td></tr>\n",
        checkpoint.step,
        HtmlText(&checkpoint.path),
        seconds(checkpoint.began),
        time_since_close(checkpoint.drained),
        time_since_close(checkpoint.durable),
        HtmlText(state_text(checkpoint, present))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_of_two_hosts_is_durable_with_the_last_one() {
        let record = |host: &str, began_unix_us, durable_seconds| RunRecord {
            host: host.into(),
            began_unix_us,
            checkpoints: vec![CheckpointRecord {
                path: "step_5".into(),
                step: 5,
                began_seconds: 1.0,
                closed_seconds: Some(2.0),
                drained_seconds: Some(3.0),
                durable_seconds,
                files: 4,
            }],
            ..RunRecord::default()
        };
        let records = [
            record("a", 0, Some(4.0)),
            record("b", 10_000_000, Some(5.0)),
        ];
        let merged = merge_checkpoints(&records, 0);
        let expected = MergedCheckpoint {
            path: "step_5".into(),
            step: 5,
            began: 1.0,
            closed: Some(12.0),
            drained: Some(13.0),
            durable: Some(15.0),
            files: 8,
        };
        assert_eq!(merged, std::slice::from_ref(&expected));
        let records = [record("a", 0, Some(4.0)), record("b", 10_000_000, None)];
        assert_eq!(super::merge_checkpoints(&records, 0)[0].durable, None);
        // The bar has no gap, and extends to the end of the run.
        let spans = expected.bar_spans(20.0);
        assert!(
            spans.windows(2).all(|pair| pair[0].end == pair[1].begin),
            "{spans:?}"
        );
        assert_eq!(spans.last().map(|span| span.end), Some(20.0));
    }
}
