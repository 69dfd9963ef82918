//! Draws a view of `firn top`. The screen fits into 80 columns and 24 lines. A larger terminal shows more rows and longer
//! bars.
//!
//! ```text
//!   firn top  node1  2 mounts                        one line
//!   MOUNT …                                          a row for each mount, or for each host of the job
//!   IN ▁▂▃ …          OUT ▁▂▃ …                      of the chosen mount, or of the whole job
//!   CHECKPOINT … █▓░                                 what is left of the screen
//!   LANE …                                           where there are several, or tokens
//!   q quit …                                         one line
//! ```

use firn_format::quote::printable;
use firn_hosts::Life;
use firn_protocol::{LaneReport, Status};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline, Wrap};

use super::{Checkpoints, JobView, MountView, Pane, Rates, View};
use crate::job::{Host, Job, Trouble, TroubleColour, life_word};
use crate::text::{bytes, count, rate, seconds};
use crate::verb::history::CheckpointEntry;

/// Minimum width of the terminal. A smaller terminal shows only a sentence that says so.
const WIDTH_MIN: u16 = 40;
/// Minimum height of the terminal.
const HEIGHT_MIN: u16 = 10;
/// Rows of the upper table (mounts or hosts) that leave space for the other parts on 24 lines.
const UPPER_ROWS_MAX: usize = 6;
/// Maximum number of rows in the table of lanes.
const LANE_ROWS_MAX: usize = 4;
/// Minimum width of a checkpoint's bar in characters.
const BAR_MIN: usize = 10;
/// Maximum width of a last column, which takes the rest of a line. It is wider than the texts in it.
const UNBOUNDED: usize = 200;
/// Maximum number of lines about the trouble of the chosen mount.
const TROUBLE_LINES_MAX: usize = 2;
/// Maximum number of lines about the chosen host.
const HOST_LINES_MAX: usize = 7;

const DURABLE: char = '█';
const DRAINED: char = '▓';
const HELD: char = '░';

const KEYS: &str = "q quit  ↑↓ choose  tab table  p pause  j job  ? help";
const LEGEND: &str = "█ durable ▓ drained ░ held";

/// The styles of the screen. Without colours they differ only in bold, reversed and dim.
#[derive(Clone, Copy)]
struct Theme {
    has_colour: bool,
}

impl Theme {
    fn coloured(self, colour: Color) -> Style {
        if self.has_colour {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    fn head(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn error(self) -> Style {
        self.coloured(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn warning(self) -> Style {
        self.coloured(Color::Yellow)
    }

    fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// Draws the whole screen.
pub fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    let theme = Theme {
        has_colour: view.has_colour,
    };
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let text = format!("firn top needs {WIDTH_MIN} columns and {HEIGHT_MIN} lines; q quits");
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(head_line(view, theme, head.width), head);
    frame.render_widget(
        Line::styled(foot_text(foot.width), theme.coloured(Color::Cyan)),
        foot,
    );
    if view.shows_help {
        frame.render_widget(Paragraph::new(HELP).wrap(Wrap { trim: false }), body);
        return;
    }
    match &view.job {
        Some(job) => draw_job(frame, body, view, job, theme),
        None => draw_mounts(frame, body, view, theme),
    }
}

const HELP: &str = "
 The one in trouble is first, then the one that holds most.

 HELD      bytes in memory only; they survive every process, and not the host
 ARENA     how much of the memory for that is in use
 IN, OUT   bytes a second from programs, and to the backing, over 5 s
 WAITS     what programs, lanes or the drain wait for
 BAR       █ durable   ▓ drained, not synced   ░ held
 STATE     of a checkpoint: whole, written (a program writes), cut (its
           writer was killed); of a host: alive, silent, dead

 q, Ctrl-C    quit                    tab       mounts or checkpoints
 ↑ ↓          choose a row            p, space  pause
 PgUp PgDn    ten rows                j         this host, or all hosts
 ? h          this page

 Without a terminal: firn top --once, firn status --watch, firn status --json";

/// Returns the foot line: the keys, and the meaning of the bars if the width allows both.
fn foot_text(width: u16) -> String {
    let used = KEYS.chars().count() + LEGEND.chars().count();
    match (width as usize).checked_sub(used) {
        Some(gap @ 1..) => format!("{KEYS}{}{LEGEND}", " ".repeat(gap)),
        _ => truncate(KEYS, width),
    }
}

/// Returns the first line: the host's name, what is shown, and whether the screen is paused.
fn head_line(view: &View, theme: Theme, width: u16) -> Line<'static> {
    let what = match view.job.as_ref().map(|job| &job.seen) {
        Some(Some(Ok(job))) => format!("job on {}", job.backing),
        Some(_) => "job".to_owned(),
        None => {
            let mounts = count(view.mounts.len() as u64, "mount");
            match view.elsewhere {
                0 => mounts,
                others => format!("{mounts}, {others} with another FIRN_RUNTIME_DIR"),
            }
        }
    };
    let left = format!("firn top  {}  {what}", printable(&view.host));
    let right = if view.is_paused {
        "paused".to_owned()
    } else {
        format!("every {}", seconds(view.interval_s))
    };
    let room = (width as usize).saturating_sub(right.chars().count() + 1);
    let left = truncate(&left, room as u16);
    let gap = room.saturating_sub(left.chars().count()) + 1;
    Line::styled(format!("{left}{}{right}", " ".repeat(gap)), theme.head())
}

/// Draws the table of mounts and, below it, the sentences about the chosen mount's trouble.
fn draw_mounts(frame: &mut Frame<'_>, area: Rect, view: &View, theme: Theme) {
    let mounts = view.ordered_mounts();
    let Some(chosen) = mounts.get(view.upper.min(mounts.len().saturating_sub(1))) else {
        if let Some(fault) = &view.fault {
            let text = Paragraph::new(format!("\n {}", printable(fault)));
            frame.render_widget(text.wrap(Wrap { trim: false }).style(theme.error()), area);
            return;
        }
        let text = "\n you have no mounts on this host\n\n `firn mount BACKING DIR` mounts; `firn top --job BACKING` \
        shows the hosts of a job, even if this host has no part in it";
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), area);
        return;
    };
    let status = chosen.status.as_deref();
    let lanes = status.map_or_else(Vec::new, lanes_with_reports);
    let trouble = trouble_sentences(chosen);
    let [table_area, notes, rates, checkpoints, lane_area] = Layout::vertical([
        Constraint::Length(1 + mounts.len().min(UPPER_ROWS_MAX) as u16),
        Constraint::Length(trouble.len().min(TROUBLE_LINES_MAX) as u16),
        Constraint::Length(3),
        Constraint::Min(2),
        Constraint::Length(match lanes.len().min(LANE_ROWS_MAX) {
            0 => 0,
            rows => rows as u16 + 1,
        }),
    ])
    .areas(area);
    let columns = [
        Column::new("MOUNT", 22, 14),
        Column::new("STATE", 7, 6),
        Column::new("HELD", 11, 10),
        Column::new("ARENA", 5, 5),
        Column::new("IN", 13, 12),
        Column::new("OUT", 13, 12),
        Column::new("WAITS", UNBOUNDED, 9),
    ];
    let table = Table {
        columns: &columns,
        rows: mounts.iter().map(|mount| mount_row(mount)).collect(),
        styles: mounts
            .iter()
            .map(|mount| trouble_style(mount.trouble(), theme))
            .collect(),
        chosen: Some(view.upper),
        has_keys: view.pane == Pane::Upper,
    };
    draw_table(frame, table_area, &table, theme);
    let trouble_lines: Vec<Line<'_>> = trouble
        .iter()
        .take(TROUBLE_LINES_MAX)
        .map(|line| Line::styled(truncate(&format!(" {line}"), notes.width), theme.error()))
        .collect();
    frame.render_widget(Paragraph::new(trouble_lines), notes);
    draw_rates(frame, rates, &chosen.rates, theme);
    draw_checkpoints(frame, checkpoints, view, theme);
    draw_lanes(frame, lane_area, &lanes, theme);
}

/// Returns sentences about what is wrong with a mount and what its programs and lanes (I/O servers) wait for.
fn trouble_sentences(mount: &MountView) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(silence) = &mount.silent {
        lines.push(printable(&silence.error));
    }
    let errors = mount.status.iter().flat_map(|status| &status.errors);
    lines.extend(errors.rev().map(|error| {
        let message = printable(&error.message);
        format!("error: {}: {message}, {} times", error.path, error.repeats)
    }));
    // The column of the table shows only the first words of the waits, so they are repeated here in full.
    let waits = mount.waits();
    if !waits.is_empty() {
        lines.push(printable(&waits.join("; ")));
    }
    lines
}

/// Returns the cells of a mount's row.
fn mount_row(mount: &MountView) -> Vec<String> {
    let dash = || "-".to_owned();
    let Some(status) = mount.status.as_deref() else {
        let state = if mount.silent.is_some() {
            "silent"
        } else {
            "asked"
        };
        let mut row = vec![mount.mount_point.clone(), state.to_owned()];
        row.extend(std::iter::repeat_with(dash).take(5));
        return row;
    };
    let (state, waits) = match &mount.silent {
        Some(silence) => {
            let silent_for = seconds(silence.seconds);
            ("silent", format!("no answer for {silent_for}"))
        }
        None if !status.errors.is_empty() => ("errors", mount.waits().join("; ")),
        None => ("ok", mount.waits().join("; ")),
    };
    // The last known rate of a firnd that no longer answers is not a current rate, so a dash replaces it.
    let now = |value| match mount.silent {
        Some(_) => dash(),
        None => rate(value),
    };
    let fill = (status.arena_used_bytes as f64 / status.arena_bytes.max(1) as f64).min(1.0);
    vec![
        mount.mount_point.clone(),
        state.to_owned(),
        bytes(status.held_bytes),
        format!("{:.0}%", fill * 100.0),
        now(status.ingest_bytes_per_second),
        now(status.drain_bytes_per_second),
        if waits.is_empty() { dash() } else { waits },
    ]
}

fn trouble_style(trouble: Trouble, theme: Theme) -> Style {
    match trouble.colour() {
        TroubleColour::Error => theme.error(),
        TroubleColour::Warning => theme.warning(),
        TroubleColour::Plain => Style::new(),
    }
}

/// A column of a table. All widths are in characters.
struct Column {
    /// Heading of the column.
    name: &'static str,
    /// Width that the column never exceeds.
    max_width: usize,
    /// Width below which the column does not shrink for the columns after it. It is left out if it does not fit.
    min_width: usize,
}

impl Column {
    const fn new(name: &'static str, max_width: usize, min_width: usize) -> Self {
        Self {
            name,
            max_width,
            min_width,
        }
    }
}

/// A table with a head line.
struct Table<'a> {
    columns: &'a [Column],
    /// The cells of each row, in the order of the columns.
    rows: Vec<Vec<String>>,
    /// The style of each row.
    styles: Vec<Style>,
    /// Index of the marked row. `None` means that no row is marked.
    chosen: Option<usize>,
    /// Whether the arrow keys move the mark.
    has_keys: bool,
}

/// Draws a table. If the area is too small for all rows, it shows those up to the marked one.
fn draw_table(frame: &mut Frame<'_>, area: Rect, table: &Table<'_>, theme: Theme) {
    let Table {
        columns,
        rows,
        styles,
        chosen,
        has_keys,
    } = table;
    let (chosen, has_keys) = (*chosen, *has_keys);
    let widths = column_widths(columns, rows, area.width as usize);
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells: Vec<String> = cells
            .zip(&widths)
            .filter(|(_, width)| **width > 0)
            .map(|(cell, width)| {
                format!("{:<width$}", truncate(cell, *width as u16), width = *width)
            })
            .collect();
        truncate(&format!(" {}", cells.join(" ")), area.width)
    };
    let mut lines = vec![Line::styled(
        line(&mut columns.iter().map(|column| column.name)),
        theme.head(),
    )];
    let room = (area.height as usize).saturating_sub(1);
    let first = chosen.map_or(0, |chosen| (chosen + 1).saturating_sub(room));
    for (index, row) in rows.iter().enumerate().skip(first).take(room) {
        let mut text = line(&mut row.iter().map(String::as_str));
        let mut style = styles.get(index).copied().unwrap_or_default();
        if chosen == Some(index) && rows.len() > 1 {
            text.replace_range(..1, ">");
            if has_keys {
                style = style.patch(theme.chosen());
            }
        }
        lines.push(Line::styled(text, style));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the width of each column in characters. A width of 0 means that the column does not fit and is left out.
///
/// Columns get their widths from left to right. A column gets what its cells need, up to its maximum width. It gives
/// up width for the columns after it, down to its minimum width.
fn column_widths(columns: &[Column], rows: &[Vec<String>], line_width: usize) -> Vec<usize> {
    let needed_width = |(index, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(index));
        let longest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
        longest.max(column.name.len()).min(column.max_width)
    };
    let needed: Vec<usize> = columns.iter().enumerate().map(needed_width).collect();
    let smallest = |index: usize| needed[index].min(columns[index].min_width);
    let mut widths: Vec<usize> = Vec::new();
    for (index, needed_width) in needed.iter().enumerate() {
        // Each column has one space before it.
        let used: usize = widths.iter().map(|width| width + 1).sum();
        let reserved: usize = (index + 1..columns.len())
            .map(|later| smallest(later) + 1)
            .sum();
        let available = line_width.saturating_sub(used + 1);
        let unreserved = available.saturating_sub(reserved);
        let width = (*needed_width).min(unreserved.max(smallest(index)));
        widths.push(if width > available { 0 } else { width });
    }
    widths
}

/// Draws the two lines of rates (in from programs, out to the backing) with their sparklines.
fn draw_rates(frame: &mut Frame<'_>, area: Rect, rates: &Rates, theme: Theme) {
    let halves = Layout::horizontal([
        Constraint::Fill(1),
        Constraint::Length(2),
        Constraint::Fill(1),
    ]);
    let [left, _, right] = halves.areas(area);
    for (area, name, history, colour) in [
        (left, "IN ", &rates.ingest, Color::Green),
        (right, "OUT", &rates.drain, Color::Blue),
    ] {
        let [words, line] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
        let newest = history.back().copied().unwrap_or(0) as f64;
        let highest = history.iter().max().copied().unwrap_or(0) as f64;
        let text = format!(" {name} {}, most {}", rate(newest), rate(highest));
        frame.render_widget(
            Line::styled(truncate(&text, words.width), theme.head()),
            words,
        );
        let room = line.width.saturating_sub(1) as usize;
        // Zeros fill the line from the left, so that the newest sample is always at the right end.
        let mut shown = vec![0; room.saturating_sub(history.len())];
        shown.extend(
            history
                .iter()
                .skip(history.len().saturating_sub(room))
                .copied(),
        );
        let bars = Rect {
            x: line.x + 1,
            width: room as u16,
            ..line
        };
        frame.render_widget(
            Sparkline::default()
                .data(&shown)
                .style(theme.coloured(colour)),
            bars,
        );
    }
}

/// Draws the list of checkpoints, or the reason why there is none.
fn draw_checkpoints(frame: &mut Frame<'_>, area: Rect, view: &View, theme: Theme) {
    let list = match &view.checkpoints {
        Checkpoints::Listed(list) => list,
        Checkpoints::Asked => {
            frame.render_widget(Line::raw(" searching for checkpoints"), area);
            return;
        }
        Checkpoints::Unknown(reason) => {
            let text = format!(" no checkpoints are shown: {}", printable(reason));
            let lines = Paragraph::new(text).wrap(Wrap { trim: false });
            frame.render_widget(lines.style(theme.warning()), area);
            return;
        }
    };
    if list.is_empty() {
        let text = " no checkpoint: no name in the directory has a step, as in step_100";
        frame.render_widget(Line::raw(truncate(text, area.width)), area);
        return;
    }
    let bar = bar_width(area.width);
    let head = format!(
        " {:<18} {:<14} {:>10} {:>5} {:>10}",
        "CHECKPOINT", "STATE", "SIZE", "FILES", "HELD"
    );
    let mut lines = vec![Line::styled(truncate(&head, area.width), theme.head())];
    let room = (area.height as usize).saturating_sub(1);
    let first = (view.lower + 1).saturating_sub(room);
    for (index, checkpoint) in list.iter().enumerate().skip(first).take(room) {
        let is_chosen = index == view.lower && list.len() > 1 && view.pane == Pane::Lower;
        lines.push(checkpoint_line(checkpoint, bar, is_chosen, theme));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the width of a checkpoint's bar, which takes the rest of the line after the columns.
fn bar_width(width: u16) -> usize {
    const COLUMNS_WIDTH: usize = 63;
    (width as usize)
        .saturating_sub(COLUMNS_WIDTH + 1)
        .max(BAR_MIN)
}

/// Returns the line of a checkpoint: its figures, and a bar of its durable, drained and held parts.
fn checkpoint_line(
    checkpoint: &CheckpointEntry,
    width: usize,
    is_chosen: bool,
    theme: Theme,
) -> Line<'static> {
    let mark = if is_chosen { '>' } else { ' ' };
    let words = format!(
        "{mark}{:<18} {:<14} {:>10} {:>5} {:>10} ",
        truncate(&checkpoint.name.to_string(), 18),
        truncate(&checkpoint.state, 14),
        bytes(checkpoint.bytes),
        checkpoint.files,
        bytes(checkpoint.held_bytes),
    );
    let style = match checkpoint.whole {
        Some(false) => theme.warning(),
        _ => Style::new(),
    };
    let style = if is_chosen {
        style.patch(theme.chosen())
    } else {
        style
    };
    let cells = bar_cells(checkpoint, width);
    let part = |sign: char, cells: usize, colour| {
        Span::styled(
            std::iter::repeat_n(sign, cells).collect::<String>(),
            theme.coloured(colour),
        )
    };
    Line::from(vec![
        Span::styled(words, style),
        part(DURABLE, cells.durable, Color::Green),
        part(DRAINED, cells.drained, Color::Blue),
        part(HELD, cells.held, Color::Yellow),
    ])
}

/// Widths of the three parts of a checkpoint's bar, in characters.
#[derive(Debug, PartialEq, Eq)]
struct BarCells {
    durable: usize,
    drained: usize,
    held: usize,
}

/// Divides the `width` characters of a bar among the durable, drained and held bytes of a checkpoint.
///
/// Each part that has bytes gets one character first, so that a small part is visible. The remaining characters are
/// divided in proportion to the bytes, and the largest part gets what rounding leaves over. A checkpoint without bytes
/// has an empty bar. `width` must be at least the number of parts.
fn bar_cells(checkpoint: &CheckpointEntry, width: usize) -> BarCells {
    let held_bytes = checkpoint.held_bytes.min(checkpoint.bytes);
    let drained_or_durable_bytes = checkpoint.bytes - held_bytes;
    let durable_bytes = checkpoint.durable_bytes.min(drained_or_durable_bytes);
    let drained_bytes = drained_or_durable_bytes - durable_bytes;
    if checkpoint.bytes == 0 {
        return BarCells {
            durable: 0,
            drained: 0,
            held: 0,
        };
    }
    let part_bytes = [durable_bytes, drained_bytes, held_bytes];
    let visible_parts = part_bytes.iter().filter(|bytes| **bytes > 0).count();
    let shared_cells = width.saturating_sub(visible_parts);
    let mut cells = part_bytes.map(|bytes| {
        let proportion = u128::from(bytes) * shared_cells as u128 / u128::from(checkpoint.bytes);
        usize::from(bytes > 0) + proportion as usize
    });
    let largest = (0..part_bytes.len())
        .max_by_key(|part| part_bytes[*part])
        .unwrap_or(0);
    cells[largest] += width.saturating_sub(cells.iter().sum());
    let [durable, drained, held] = cells;
    BarCells {
        durable,
        drained,
        held,
    }
}

/// Returns the lanes (I/O servers) of a mount that have something to report.
fn lanes_with_reports(status: &Status) -> Vec<LaneReport> {
    let mut lanes = firn_protocol::HostReport::of(status, 0).lanes;
    lanes.truncate(LANE_ROWS_MAX);
    lanes
}

/// Draws the table of lanes.
fn draw_lanes(frame: &mut Frame<'_>, area: Rect, lanes: &[LaneReport], theme: Theme) {
    if lanes.is_empty() {
        return;
    }
    let lane_style = |lane: &LaneReport| {
        if lane.is_in_trouble() {
            theme.error()
        } else {
            Style::new()
        }
    };
    let columns = [
        Column::new("LANE", 6, 4),
        Column::new("STATE", 6, 5),
        Column::new("HELD", 11, 10),
        Column::new("IN LINE", 9, 9),
        Column::new("WRITERS", 7, 7),
        Column::new("TOKEN", UNBOUNDED, 20),
    ];
    let table = Table {
        columns: &columns,
        rows: lanes.iter().map(lane_row).collect(),
        styles: lanes.iter().map(lane_style).collect(),
        chosen: None,
        has_keys: false,
    };
    draw_table(frame, area, &table, theme);
}

/// Returns the cells of a lane's row.
fn lane_row(lane: &LaneReport) -> Vec<String> {
    let mut token = match (lane.token, &lane.token_holder) {
        (Some(state), Some(holder)) => format!("{}, {} has it", state.as_str(), printable(holder)),
        (Some(state), None) => state.as_str().to_owned(),
        (None, _) => "-".to_owned(),
    };
    if let Some(wait) = lane.token_seconds {
        token += &format!(" for {}", seconds(wait));
    }
    if let Some(retry) = lane.retry_seconds {
        token += &format!("; tried again in {}", seconds(retry));
    }
    vec![
        lane.lane.to_string(),
        lane.state.map_or("ok", |state| state.as_str()).to_owned(),
        bytes(lane.held_bytes),
        count(lane.queued_files, "file"),
        lane.writers.to_string(),
        token,
    ]
}

/// Draws the table of a job's hosts, and the advice for the chosen host.
fn draw_job(frame: &mut Frame<'_>, area: Rect, view: &View, job: &JobView, theme: Theme) {
    let seen_job = match &job.seen {
        Some(Ok(seen_job)) => seen_job,
        Some(Err(reason)) => {
            let lines =
                Paragraph::new(format!("\n {}", printable(reason))).wrap(Wrap { trim: false });
            frame.render_widget(lines.style(theme.error()), area);
            return;
        }
        None => {
            frame.render_widget(Line::raw(" searching for hosts"), area);
            return;
        }
    };
    let hosts = view.hosts();
    let chosen = hosts.get(view.upper.min(hosts.len().saturating_sub(1)));
    let sentences = chosen.map_or_else(
        || seen_job.notes.clone(),
        |host| host_advice(host, seen_job),
    );
    let paragraph = Paragraph::new(
        sentences
            .iter()
            .map(|line| Line::raw(format!(" {}", printable(line))))
            .collect::<Vec<_>>(),
    )
    .wrap(Wrap { trim: false });
    // An estimate of the lines that the wrapped text takes. It is never too small: each wrapped line adds one more.
    let width = area.width.max(1) as usize;
    let lines: usize = sentences
        .iter()
        .map(|line| line.chars().count() / (width - 2) + 1)
        .sum();
    let [totals, rates, table_area, details, checkpoints] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(3),
        Constraint::Length(1 + hosts.len().clamp(1, UPPER_ROWS_MAX) as u16),
        Constraint::Max(lines.min(HOST_LINES_MAX) as u16),
        Constraint::Min(2),
    ])
    .areas(area);
    draw_job_totals(frame, totals, seen_job, theme);
    draw_rates(frame, rates, &job.rates, theme);
    let columns = [
        Column::new("HOST", 16, 8),
        Column::new("STATE", 8, 8),
        Column::new("BEAT", 14, 9),
        Column::new("HELD", 11, 10),
        Column::new("IN", 13, 12),
        Column::new("OUT", 13, 12),
        Column::new("WAITS", UNBOUNDED, 9),
    ];
    let table = Table {
        columns: &columns,
        rows: hosts.iter().map(|host| host_row(host)).collect(),
        styles: hosts
            .iter()
            .map(|host| trouble_style(host.trouble(), theme))
            .collect(),
        chosen: Some(view.upper),
        has_keys: view.pane == Pane::Upper,
    };
    draw_table(frame, table_area, &table, theme);
    frame.render_widget(paragraph, details);
    draw_checkpoints(frame, checkpoints, view, theme);
}

/// Draws the sums over all hosts of a job.
fn draw_job_totals(frame: &mut Frame<'_>, area: Rect, job: &Job, theme: Theme) {
    let total = &job.total;
    let stranded = match total.stranded_bytes {
        0 => String::new(),
        stranded => format!(", stranded {}", bytes(stranded)),
    };
    let states = total.hosts_by_state();
    let first = format!(
        " hosts {}; held {} in {}{stranded}",
        if states.is_empty() { "none" } else { &states },
        bytes(total.held_bytes),
        count(total.held_files, "file")
    );
    let second = format!(
        " written {}, durable {}, logged {}, {}, waiting {}",
        bytes(total.drain_bytes),
        bytes(total.durable_bytes),
        bytes(total.logged_bytes),
        count(total.errors, "error"),
        count(total.waiting_writers, "writer"),
    );
    let is_bad = total.stranded_bytes > 0 || total.silent > 0;
    let lines = vec![
        Line::styled(
            truncate(&first, area.width),
            if is_bad { theme.error() } else { Style::new() },
        ),
        Line::raw(truncate(&second, area.width)),
    ];
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the cells of a row for a host of the job.
fn host_row(host: &Host) -> Vec<String> {
    let dash = || "-".to_owned();
    let report = host.report.as_ref();
    let is_alive = host.state == Life::Alive;
    let now = |value: Option<f64>| value.filter(|_| is_alive).map_or_else(dash, rate);
    vec![
        printable(&host.host),
        life_word(host.state).to_owned(),
        host.beat_age_seconds
            .map_or_else(dash, |age| format!("{} ago", seconds(age))),
        report.map_or_else(dash, |report| bytes(report.held_bytes)),
        now(report.map(|report| report.ingest_bytes_per_second)),
        now(report.map(|report| report.drain_bytes_per_second)),
        match &host.waits[..] {
            [] => dash(),
            waits => waits.join("; "),
        },
    ]
}

/// Returns sentences about a host: why it counts as dead or silent, what the user can do, and where its options differ
/// from those of the other hosts. The notes about the whole job follow.
fn host_advice(host: &Host, job: &Job) -> Vec<String> {
    let mut words = Vec::new();
    if host.state != Life::Alive {
        words.push(format!("{}: {}", host.host, host.evidence));
    }
    words.extend(host.advice.iter().map(|advice| format!("→ {advice}")));
    let differs = host.differences.iter();
    words.extend(differs.map(|what| format!("{} differs: {what}", host.host)));
    words.extend(job.notes.iter().cloned());
    words
}

/// Returns `text`, cut to `width` characters if it is longer.
fn truncate(text: &str, width: u16) -> String {
    let width = width as usize;
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(bytes: u64, durable_bytes: u64, held_bytes: u64) -> CheckpointEntry {
        CheckpointEntry {
            name: "step_1".into(),
            path: "/ckpt/step_1".into(),
            step: 1,
            bytes,
            held_bytes,
            durable_bytes,
            files: 1,
            whole: Some(true),
            state: "whole".to_owned(),
            level: None,
            age_seconds: 0.0,
            host: None,
        }
    }

    /// Returns the widths of the durable, drained and held parts of a bar of ten characters.
    fn ten_cells(bytes: u64, durable_bytes: u64, held_bytes: u64) -> [usize; 3] {
        let cells = bar_cells(&checkpoint(bytes, durable_bytes, held_bytes), 10);
        [cells.durable, cells.drained, cells.held]
    }

    #[test]
    fn regression_a_small_part_of_a_bar_has_one_character() {
        assert_eq!(ten_cells(1000, 990, 0), [9, 1, 0]);
        assert_eq!(ten_cells(1000, 10, 990), [1, 0, 9]);
        assert_eq!(ten_cells(1000, 1, 1), [1, 8, 1]);
        assert_eq!(ten_cells(1000, 998, 1), [8, 1, 1]);
    }

    #[test]
    fn a_bar_is_divided_in_proportion_to_the_bytes() {
        assert_eq!(ten_cells(0, 0, 0), [0, 0, 0]);
        assert_eq!(ten_cells(1000, 1000, 0), [10, 0, 0]);
        assert_eq!(ten_cells(1000, 0, 0), [0, 10, 0]);
        assert_eq!(ten_cells(1000, 0, 1000), [0, 0, 10]);
        assert_eq!(ten_cells(1000, 500, 500), [5, 0, 5]);
        assert_eq!(ten_cells(u64::MAX, u64::MAX, 0), [10, 0, 0]);
    }
}
