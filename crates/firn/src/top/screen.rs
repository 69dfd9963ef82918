//! Draws the screen of `firn top` from a view, which has all that is shown. The screen fits into 80 columns and 24
//! lines. A larger terminal shows more rows and longer bars. A *lane* is one I/O server; its *token* is the lock that
//! makes one host its only writer.
//!
//! ```text
//!   firn top  node1  2 mounts                        one line
//!   MOUNT …                                          a row for each mount, or for each host of the job
//!   IN ▁▂▃ …          OUT ▁▂▃ …                      of the selected mount, or of the whole job
//!   CHECKPOINT … █▓░                                 the remaining lines of the screen
//!   LANE …                                           only with several lanes, or with tokens
//!   q quit …                                         one line
//! ```

use std::collections::VecDeque;

use firn_format::quote::printable;
use firn_hosts::Life;
use firn_protocol::{HostReport, LaneReport, Status};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline, Wrap};

use super::{Checkpoints, JobView, MountView, Pane, Rates, UNUSED_USER_ID, View};
use crate::job::{Host, Job, Trouble, TroubleColour, life_word};
use crate::text::{bytes, count, rate, seconds};
use crate::verb::history::CheckpointEntry;

/// Minimum width of the terminal. A smaller terminal shows only a sentence that says so.
const WIDTH_MIN: u16 = 40;
/// Minimum height of the terminal.
const HEIGHT_MIN: u16 = 10;
/// Height in lines of the head of a table.
const HEAD_HEIGHT: u16 = 1;
/// Height in lines of the part with the rates.
const RATES_HEIGHT: u16 = 3;
/// Minimum height in lines of the table of checkpoints.
const CHECKPOINTS_HEIGHT_MIN: u16 = 2;
/// Rows of the upper table (mounts or hosts) that leave space for the other parts on 24 lines.
const UPPER_ROWS_MAX: usize = 6;
/// Number of columns in the table of mounts that come from a status: all but the mount point and the state.
const STATUS_COLUMNS: usize = 5;
/// Maximum number of rows in the table of lanes.
const LANE_ROWS_MAX: usize = 4;
/// Widths of the columns in the table of checkpoints, in characters.
const CHECKPOINT_NAME_WIDTH: usize = 18;
const CHECKPOINT_STATE_WIDTH: usize = 14;
const BYTES_WIDTH: usize = 10;
const FILES_WIDTH: usize = 5;
/// Minimum width of a checkpoint's bar in characters.
const BAR_WIDTH_MIN: usize = 10;
/// Maximum width of a last column, which takes the rest of a line. Texts in it are shorter.
const LAST_COLUMN_WIDTH_MAX: usize = 200;
/// Maximum number of lines about the trouble of the selected mount.
const TROUBLE_LINES_MAX: usize = 2;
/// Maximum number of lines about the selected host.
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

    fn selected(self) -> Style {
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
    frame.render_widget(first_line(view, theme, head.width), head);
    frame.render_widget(
        Line::styled(last_line(foot.width), theme.coloured(Color::Cyan)),
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
fn last_line(width: u16) -> String {
    let text_width = KEYS.chars().count() + LEGEND.chars().count();
    let gap = (width as usize).saturating_sub(text_width);
    if gap == 0 {
        return truncate(KEYS, width);
    }
    format!("{KEYS}{}{LEGEND}", " ".repeat(gap))
}

/// Returns the first line: the host's name, what is shown, and whether the screen is paused.
fn first_line(view: &View, theme: Theme, width: u16) -> Line<'static> {
    let left = format!(
        "firn top  {}  {}",
        printable(&view.host),
        shown_objects(view)
    );
    let right = if view.is_paused {
        "paused".to_owned()
    } else {
        format!("every {}", seconds(view.interval_s))
    };
    // At least one space stays between the two parts.
    let left_width = (width as usize).saturating_sub(right.chars().count() + 1);
    let cut_left = truncate(&left, left_width as u16);
    Line::styled(format!("{cut_left:<left_width$} {right}"), theme.head())
}

/// Returns what the screen shows: a job, or the number of mounts.
fn shown_objects(view: &View) -> String {
    if let Some(job) = &view.job {
        return match &job.answer {
            Some(Ok(job)) => format!("job on {}", job.backing),
            Some(Err(_)) | None => "job".to_owned(),
        };
    }
    let mounts = count(view.mounts.len() as u64, "mount");
    match view.unreachable_mounts {
        0 => mounts,
        unreachable => format!("{mounts}, {unreachable} with another FIRN_RUNTIME_DIR"),
    }
}

/// Draws the table of mounts and, below it for the selected mount: the notes about its trouble, its rates, its
/// checkpoints, and its lanes (I/O servers).
fn draw_mounts(frame: &mut Frame<'_>, area: Rect, view: &View, theme: Theme) {
    let mounts = view.ordered_mounts();
    let last_row = mounts.len().saturating_sub(1);
    let Some(selected_mount) = mounts.get(view.upper_row.min(last_row)) else {
        draw_no_mounts(frame, area, view.list_error.as_deref(), theme);
        return;
    };
    let lanes = match selected_mount.status.as_deref() {
        Some(status) => lanes_with_reports(status),
        None => Vec::new(),
    };
    let trouble = describe_trouble(selected_mount);
    let lane_table_height = match lanes.len().min(LANE_ROWS_MAX) {
        0 => 0,
        rows => HEAD_HEIGHT + rows as u16,
    };
    let [
        table_area,
        trouble_area,
        rates_area,
        checkpoints_area,
        lanes_area,
    ] = Layout::vertical([
        Constraint::Length(HEAD_HEIGHT + mounts.len().min(UPPER_ROWS_MAX) as u16),
        Constraint::Length(trouble.len().min(TROUBLE_LINES_MAX) as u16),
        Constraint::Length(RATES_HEIGHT),
        Constraint::Min(CHECKPOINTS_HEIGHT_MIN),
        Constraint::Length(lane_table_height),
    ])
    .areas(area);
    draw_mount_table(frame, table_area, &mounts, view, theme);
    let trouble_lines: Vec<Line<'_>> = trouble
        .iter()
        .take(TROUBLE_LINES_MAX)
        .map(|line| {
            let text = truncate(&format!(" {line}"), trouble_area.width);
            Line::styled(text, theme.error())
        })
        .collect();
    frame.render_widget(Paragraph::new(trouble_lines), trouble_area);
    draw_rates(frame, rates_area, &selected_mount.rates, theme);
    draw_checkpoints(frame, checkpoints_area, view, theme);
    draw_lanes(frame, lanes_area, &lanes, theme);
}

/// Draws why no mount is shown: the error of the list, or that there are no mounts.
fn draw_no_mounts(frame: &mut Frame<'_>, area: Rect, list_error: Option<&str>, theme: Theme) {
    if let Some(error) = list_error {
        let text = Paragraph::new(format!("\n {}", printable(error)));
        frame.render_widget(text.wrap(Wrap { trim: false }).style(theme.error()), area);
        return;
    }
    let text = "\n you have no mounts on this host\n\n `firn mount BACKING DIR` mounts; `firn top --job BACKING` \
    shows the hosts of a job, even if this host has no part in it";
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), area);
}

/// Draws the table of mounts. The selected mount is marked. HELD is what is in memory only, and ARENA how full that
/// memory is.
fn draw_mount_table(
    frame: &mut Frame<'_>,
    area: Rect,
    mounts: &[&MountView],
    view: &View,
    theme: Theme,
) {
    // Each column has its heading, its maximum width and its minimum width.
    let columns = [
        Column::new("MOUNT", 22, 14),
        Column::new("STATE", 7, 6),
        Column::new("HELD", 11, 10),
        Column::new("ARENA", 5, 5),
        Column::new("IN", 13, 12),
        Column::new("OUT", 13, 12),
        Column::new("WAITS", LAST_COLUMN_WIDTH_MAX, 9),
    ];
    let table = Table {
        columns: &columns,
        rows: mounts.iter().map(|mount| mount_row(mount)).collect(),
        styles: mounts
            .iter()
            .map(|mount| trouble_style(mount.trouble(), theme))
            .collect(),
        marked_row: Some(view.upper_row),
        has_focus: view.pane == Pane::Upper,
    };
    draw_table(frame, area, &table, theme);
}

/// Returns notes about what is wrong with a mount and what its programs and lanes (I/O servers) wait for.
fn describe_trouble(mount: &MountView) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(silence) = &mount.silence {
        lines.push(printable(&silence.error));
    }
    if let Some(status) = &mount.status {
        // The newest error comes first.
        for error in status.errors.iter().rev() {
            let message = printable(&error.message);
            lines.push(format!(
                "error: {}: {message}, {} times",
                error.path, error.repeats
            ));
        }
    }
    // The column of the table shows only the first words of the waits, so they are repeated here in full.
    let waits = mount.waits();
    if !waits.is_empty() {
        lines.push(printable(&waits.join("; ")));
    }
    lines
}

/// Returns the cells of a mount's row, in the order of the columns in [`draw_mount_table`]. A mount without a status
/// yet, or with a firnd (its daemon) that does not answer, has dashes for figures that are not current.
fn mount_row(mount: &MountView) -> Vec<String> {
    let Some(status) = mount.status.as_deref() else {
        let state = if mount.silence.is_some() {
            "silent"
        } else {
            "asked"
        };
        let mut row = vec![mount.mount_point.clone(), state.to_owned()];
        row.extend(std::iter::repeat_with(unknown_value).take(STATUS_COLUMNS));
        return row;
    };
    let (state, waits) = match &mount.silence {
        Some(silence) => {
            let silent_for = seconds(silence.seconds);
            ("silent", format!("no answer for {silent_for}"))
        }
        None if !status.errors.is_empty() => ("errors", mount.waits().join("; ")),
        None => ("ok", mount.waits().join("; ")),
    };
    // The last known rate of a firnd that no longer answers is not a current rate, so a dash replaces it.
    let current_rate = |bytes_per_second| match mount.silence {
        Some(_) => unknown_value(),
        None => rate(bytes_per_second),
    };
    let used_share = (status.arena_used_bytes as f64 / status.arena_bytes.max(1) as f64).min(1.0);
    vec![
        mount.mount_point.clone(),
        state.to_owned(),
        bytes(status.held_bytes),
        format!("{:.0}%", used_share * 100.0),
        current_rate(status.ingest_bytes_per_second),
        current_rate(status.drain_bytes_per_second),
        if waits.is_empty() {
            unknown_value()
        } else {
            waits
        },
    ]
}

/// Returns the sign for a value that is not known, or does not exist.
fn unknown_value() -> String {
    "-".to_owned()
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
    /// Returns a column with its heading, its maximum width and its minimum width.
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
    /// The columns, from left to right.
    columns: &'a [Column],
    /// The cells of each row, in the order of the columns.
    rows: Vec<Vec<String>>,
    /// The style of each row.
    styles: Vec<Style>,
    /// Index of the marked row. `None` means that no row is marked.
    marked_row: Option<usize>,
    /// Whether the arrow keys move the mark of this table.
    has_focus: bool,
}

/// Draws a table. If the area is too small for all rows, it shows those up to the marked one.
fn draw_table(frame: &mut Frame<'_>, area: Rect, table: &Table<'_>, theme: Theme) {
    let widths = column_widths(table.columns, &table.rows, area.width as usize);
    let head: Vec<&str> = table.columns.iter().map(|column| column.name).collect();
    let head_text = truncate(&join_cells(&head, &widths), area.width);
    let mut lines = vec![Line::styled(head_text, theme.head())];
    let visible_rows = area.height.saturating_sub(HEAD_HEIGHT) as usize;
    let first_row = first_visible_row(table.marked_row, visible_rows);
    let rows = table.rows.iter().enumerate();
    for (index, row) in rows.skip(first_row).take(visible_rows) {
        let mut text = truncate(&join_cells(row, &widths), area.width);
        let mut style = table.styles.get(index).copied().unwrap_or_default();
        // A single row needs no mark.
        if table.marked_row == Some(index) && table.rows.len() > 1 {
            // Each row begins with a space, which the mark replaces.
            text.replace_range(..1, ">");
            if table.has_focus {
                style = style.patch(theme.selected());
            }
        }
        lines.push(Line::styled(text, style));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the first row that a table shows, so that the marked row is among its `visible_rows`.
fn first_visible_row(marked_row: Option<usize>, visible_rows: usize) -> usize {
    match marked_row {
        Some(row) => (row + 1).saturating_sub(visible_rows),
        None => 0,
    }
}

/// Returns the text of a row: its cells, padded or cut to the widths of their columns, with a space before each. A
/// column of width 0 is left out.
fn join_cells<S: AsRef<str>>(cells: &[S], widths: &[usize]) -> String {
    let mut fitted_cells = Vec::with_capacity(cells.len());
    for (cell, width) in cells.iter().zip(widths) {
        if *width > 0 {
            let text = truncate(cell.as_ref(), *width as u16);
            fitted_cells.push(format!("{text:<width$}"));
        }
    }
    format!(" {}", fitted_cells.join(" "))
}

/// Returns the width of each column in characters. A width of 0 means that the column does not fit and is left out.
///
/// Columns get their widths from left to right. A column gets what its cells need, up to its maximum width. It gives
/// up width for the columns after it, down to its minimum width.
fn column_widths(columns: &[Column], rows: &[Vec<String>], line_width: usize) -> Vec<usize> {
    /// Space before each column.
    const GAP: usize = 1;
    let needed_widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(index, column)| {
            let cells = rows.iter().filter_map(|row| row.get(index));
            let longest_cell = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            longest_cell.max(column.name.len()).min(column.max_width)
        })
        .collect();
    let smallest_width = |index: usize| needed_widths[index].min(columns[index].min_width);
    let mut widths: Vec<usize> = Vec::new();
    for (index, needed_width) in needed_widths.iter().enumerate() {
        let used: usize = widths.iter().map(|width| GAP + width).sum();
        let reserved: usize = (index + 1..columns.len())
            .map(|later_column| GAP + smallest_width(later_column))
            .sum();
        let available = line_width.saturating_sub(used + GAP);
        let unreserved = available.saturating_sub(reserved);
        let width = (*needed_width).min(unreserved.max(smallest_width(index)));
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
    let ingest_style = theme.coloured(Color::Green);
    let drain_style = theme.coloured(Color::Blue);
    draw_rate_history(
        frame,
        left,
        "IN ",
        &rates.ingest,
        theme.head(),
        ingest_style,
    );
    draw_rate_history(frame, right, "OUT", &rates.drain, theme.head(), drain_style);
}

/// Draws a line with the newest and the highest rate, and below it the sparkline of all samples.
fn draw_rate_history(
    frame: &mut Frame<'_>,
    area: Rect,
    name: &str,
    history: &VecDeque<u64>,
    text_style: Style,
    bar_style: Style,
) {
    let [text_area, line_area] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    let newest = history.back().copied().unwrap_or(0) as f64;
    let highest = history.iter().max().copied().unwrap_or(0) as f64;
    let text = format!(" {name} {}, most {}", rate(newest), rate(highest));
    frame.render_widget(
        Line::styled(truncate(&text, text_area.width), text_style),
        text_area,
    );
    // One column at the left stays empty, as in the line above.
    let bars_area = Rect {
        x: line_area.x + 1,
        width: line_area.width.saturating_sub(1),
        ..line_area
    };
    let bar_count = bars_area.width as usize;
    // Zeros fill the line from the left, so that the newest sample is always at the right end.
    let mut bars = vec![0; bar_count.saturating_sub(history.len())];
    let first_sample = history.len().saturating_sub(bar_count);
    bars.extend(history.iter().skip(first_sample).copied());
    frame.render_widget(Sparkline::default().data(&bars).style(bar_style), bars_area);
}

/// Draws the list of checkpoints, or the reason why there is none.
fn draw_checkpoints(frame: &mut Frame<'_>, area: Rect, view: &View, theme: Theme) {
    let checkpoints = match &view.checkpoints {
        Checkpoints::Listed(checkpoints) => checkpoints,
        Checkpoints::Loading => {
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
    if checkpoints.is_empty() {
        let text = " no checkpoint: no name in the directory has a step, as in step_100";
        frame.render_widget(Line::raw(truncate(text, area.width)), area);
        return;
    }
    let bar_width = bar_width(area.width);
    let head = format!(
        " {:<CHECKPOINT_NAME_WIDTH$} {:<CHECKPOINT_STATE_WIDTH$} {:>BYTES_WIDTH$} {:>FILES_WIDTH$} {:>BYTES_WIDTH$}",
        "CHECKPOINT", "STATE", "SIZE", "FILES", "HELD"
    );
    let mut lines = vec![Line::styled(truncate(&head, area.width), theme.head())];
    let visible_rows = area.height.saturating_sub(HEAD_HEIGHT) as usize;
    let first_row = first_visible_row(Some(view.lower_row), visible_rows);
    let rows = checkpoints.iter().enumerate();
    for (index, checkpoint) in rows.skip(first_row).take(visible_rows) {
        // A single row needs no mark.
        let is_marked =
            index == view.lower_row && checkpoints.len() > 1 && view.pane == Pane::Lower;
        lines.push(checkpoint_line(checkpoint, bar_width, is_marked, theme));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the width of a checkpoint's bar, which takes the rest of the line after the columns.
fn bar_width(width: u16) -> usize {
    const COLUMNS_WIDTH: usize = 63;
    (width as usize)
        .saturating_sub(COLUMNS_WIDTH + 1)
        .max(BAR_WIDTH_MIN)
}

/// Returns the line of a checkpoint: its figures, and a bar of its parts that are durable (synced), drained (in the
/// backing) and held (in memory only). An incomplete checkpoint has the colour of a warning.
fn checkpoint_line(
    checkpoint: &CheckpointEntry,
    bar_width: usize,
    is_marked: bool,
    theme: Theme,
) -> Line<'static> {
    let mark = if is_marked { '>' } else { ' ' };
    let figures = format!(
        "{mark}{:<CHECKPOINT_NAME_WIDTH$} {:<CHECKPOINT_STATE_WIDTH$} {:>BYTES_WIDTH$} {:>FILES_WIDTH$} {:>BYTES_WIDTH$} ",
        truncate(&checkpoint.name.to_string(), CHECKPOINT_NAME_WIDTH as u16),
        truncate(&checkpoint.state, CHECKPOINT_STATE_WIDTH as u16),
        bytes(checkpoint.bytes),
        checkpoint.files,
        bytes(checkpoint.held_bytes),
    );
    let mut style = match checkpoint.whole {
        Some(false) => theme.warning(),
        Some(true) | None => Style::new(),
    };
    if is_marked {
        style = style.patch(theme.selected());
    }
    let cells = bar_cells(checkpoint, bar_width);
    let bar_part = |fill: char, width: usize, colour| {
        let text: String = std::iter::repeat_n(fill, width).collect();
        Span::styled(text, theme.coloured(colour))
    };
    Line::from(vec![
        Span::styled(figures, style),
        bar_part(DURABLE, cells.durable, Color::Green),
        bar_part(DRAINED, cells.drained, Color::Blue),
        bar_part(HELD, cells.held, Color::Yellow),
    ])
}

/// Widths of the three parts of a checkpoint's bar, in characters.
#[derive(Debug, PartialEq, Eq)]
struct BarCells {
    /// Characters for durable bytes (synced).
    durable: usize,
    /// Characters for drained bytes (in the backing).
    drained: usize,
    /// Characters for held bytes (in memory only).
    held: usize,
}

/// Divides the `width` characters of a bar among the durable (synced), drained (in the backing) and held (in memory
/// only) bytes of a checkpoint.
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
    let mut lanes = HostReport::from_status(status, UNUSED_USER_ID).lanes;
    lanes.truncate(LANE_ROWS_MAX);
    lanes
}

/// Draws the table of lanes (I/O servers). IN LINE is the number of files that wait to be drained to the lane, and
/// TOKEN the state of its lock. A lane with a problem has the colour of an error.
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
    // Each column has its heading, its maximum width and its minimum width.
    let columns = [
        Column::new("LANE", 6, 4),
        Column::new("STATE", 6, 5),
        Column::new("HELD", 11, 10),
        Column::new("IN LINE", 9, 9),
        Column::new("WRITERS", 7, 7),
        Column::new("TOKEN", LAST_COLUMN_WIDTH_MAX, 20),
    ];
    let table = Table {
        columns: &columns,
        rows: lanes.iter().map(lane_row).collect(),
        styles: lanes.iter().map(lane_style).collect(),
        marked_row: None,
        has_focus: false,
    };
    draw_table(frame, area, &table, theme);
}

/// Returns the cells of the row of a lane (an I/O server). The last cell describes its token, the lock that makes one
/// host the only writer of the lane.
fn lane_row(lane: &LaneReport) -> Vec<String> {
    let mut token_text = match (lane.token, &lane.token_holder) {
        (Some(state), Some(holder)) => format!("{}, {} has it", state.as_str(), printable(holder)),
        (Some(state), None) => state.as_str().to_owned(),
        (None, _) => "-".to_owned(),
    };
    if let Some(state_seconds) = lane.token_seconds {
        token_text += &format!(" for {}", seconds(state_seconds));
    }
    if let Some(retry_seconds) = lane.retry_seconds {
        token_text += &format!("; tried again in {}", seconds(retry_seconds));
    }
    vec![
        lane.lane.to_string(),
        lane.state.map_or("ok", |state| state.as_str()).to_owned(),
        bytes(lane.held_bytes),
        count(lane.queued_files, "file"),
        lane.writers.to_string(),
        token_text,
    ]
}

/// Draws a job (the hosts that share a backing). Before it is loaded, or if that fails, draws only a message.
fn draw_job(frame: &mut Frame<'_>, area: Rect, view: &View, job: &JobView, theme: Theme) {
    match &job.answer {
        Some(Ok(loaded_job)) => draw_loaded_job(frame, area, view, loaded_job, &job.rates, theme),
        Some(Err(reason)) => {
            let lines =
                Paragraph::new(format!("\n {}", printable(reason))).wrap(Wrap { trim: false });
            frame.render_widget(lines.style(theme.error()), area);
        }
        None => frame.render_widget(Line::raw(" searching for hosts"), area),
    }
}

/// Draws the sums of a job, its rates, the table of its hosts, the notes on the selected host, and the checkpoints.
fn draw_loaded_job(
    frame: &mut Frame<'_>,
    area: Rect,
    view: &View,
    job: &Job,
    rates: &Rates,
    theme: Theme,
) {
    let hosts = view.hosts();
    let last_row = hosts.len().saturating_sub(1);
    let notes = match hosts.get(view.upper_row.min(last_row)) {
        Some(selected_host) => describe_host(selected_host, job),
        None => job.notes.clone(),
    };
    let notes_height = estimate_wrapped_height(&notes, area.width);
    let [
        totals_area,
        rates_area,
        table_area,
        notes_area,
        checkpoints_area,
    ] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(RATES_HEIGHT),
        Constraint::Length(HEAD_HEIGHT + hosts.len().clamp(1, UPPER_ROWS_MAX) as u16),
        Constraint::Max(notes_height.min(HOST_LINES_MAX) as u16),
        Constraint::Min(CHECKPOINTS_HEIGHT_MIN),
    ])
    .areas(area);
    draw_job_totals(frame, totals_area, job, theme);
    draw_rates(frame, rates_area, rates, theme);
    draw_host_table(frame, table_area, &hosts, view, theme);
    let note_lines: Vec<Line<'_>> = notes
        .iter()
        .map(|note| Line::raw(format!(" {}", printable(note))))
        .collect();
    let paragraph = Paragraph::new(note_lines).wrap(Wrap { trim: false });
    frame.render_widget(paragraph, notes_area);
    draw_checkpoints(frame, checkpoints_area, view, theme);
}

/// Returns an estimate of the lines that wrapped notes take. Lines end between words, so the estimate reckons with
/// two characters less than the width.
fn estimate_wrapped_height(notes: &[String], width: u16) -> usize {
    let text_width = width as usize - 2;
    notes
        .iter()
        .map(|note| note.chars().count() / text_width + 1)
        .sum()
}

/// Draws the table of a job's hosts.
fn draw_host_table(frame: &mut Frame<'_>, area: Rect, hosts: &[&Host], view: &View, theme: Theme) {
    let columns = [
        Column::new("HOST", 16, 8),
        Column::new("STATE", 8, 8),
        Column::new("BEAT", 14, 9),
        Column::new("HELD", 11, 10),
        Column::new("IN", 13, 12),
        Column::new("OUT", 13, 12),
        Column::new("WAITS", LAST_COLUMN_WIDTH_MAX, 9),
    ];
    let table = Table {
        columns: &columns,
        rows: hosts.iter().map(|host| host_row(host)).collect(),
        styles: hosts
            .iter()
            .map(|host| trouble_style(host.trouble(), theme))
            .collect(),
        marked_row: Some(view.upper_row),
        has_focus: view.pane == Pane::Upper,
    };
    draw_table(frame, area, &table, theme);
}

/// Draws the sums over all hosts of a job. Held bytes are in memory only, and stranded ones are on a host where nothing
/// drains them (writes them to the backing).
fn draw_job_totals(frame: &mut Frame<'_>, area: Rect, job: &Job, theme: Theme) {
    let total = &job.total;
    let stranded = match total.stranded_bytes {
        0 => String::new(),
        stranded_bytes => format!(", stranded {}", bytes(stranded_bytes)),
    };
    let states = total.hosts_by_state();
    let first_line = format!(
        " hosts {}; held {} in {}{stranded}",
        if states.is_empty() { "none" } else { &states },
        bytes(total.held_bytes),
        count(total.held_files, "file")
    );
    let second_line = format!(
        " written {}, durable {}, logged {}, {}, waiting {}",
        bytes(total.drain_bytes),
        bytes(total.durable_bytes),
        bytes(total.logged_bytes),
        count(total.errors, "error"),
        count(total.waiting_writers, "writer"),
    );
    let first_style = if total.stranded_bytes > 0 || total.silent > 0 {
        theme.error()
    } else {
        Style::new()
    };
    let lines = vec![
        Line::styled(truncate(&first_line, area.width), first_style),
        Line::raw(truncate(&second_line, area.width)),
    ];
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the cells of a row for a host of the job. The figures come from the report that the host wrote at its last
/// heartbeat. Unknown figures are dashes.
fn host_row(host: &Host) -> Vec<String> {
    let report = host.report.as_ref();
    // The last known rate of a host that is not alive is no current rate, so a dash replaces it.
    let current_rate = |value: fn(&HostReport) -> f64| match report {
        Some(report) if host.state == Life::Alive => rate(value(report)),
        _ => unknown_value(),
    };
    let waits = if host.waits.is_empty() {
        unknown_value()
    } else {
        host.waits.join("; ")
    };
    vec![
        printable(&host.name),
        life_word(host.state).to_owned(),
        host.heartbeat_age_seconds
            .map_or_else(unknown_value, |age| format!("{} ago", seconds(age))),
        report.map_or_else(unknown_value, |report| bytes(report.held_bytes)),
        current_rate(|report| report.ingest_bytes_per_second),
        current_rate(|report| report.drain_bytes_per_second),
        waits,
    ]
}

/// Returns notes about a host: why it counts as dead or silent, what the user can do, and where its options differ
/// from those of the other hosts. The notes about the whole job follow.
fn describe_host(host: &Host, job: &Job) -> Vec<String> {
    let name = &host.name;
    let mut notes = Vec::new();
    if host.state != Life::Alive {
        notes.push(format!("{name}: {}", host.evidence));
    }
    for advice in &host.advice {
        notes.push(format!("→ {advice}"));
    }
    for difference in &host.differences {
        notes.push(format!("{name} differs: {difference}"));
    }
    notes.extend(job.notes.iter().cloned());
    notes
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
