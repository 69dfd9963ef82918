//! The timeline of a run as an SVG chart.
//!
//! From top to bottom the chart has a panel with the rates of all hosts, a panel with the bytes in memory, and three
//! thin *strips* for each host. All of them have the same time axis, on which events are marked.
//!
//! Colours are CSS classes, so the page's style decides between light and dark.

use std::fmt::Write;

use firn_protocol::record::Bucket;

use super::html::HtmlText;
use super::timeline::{HostLine, Timeline};
use crate::text::{bytes, rate, seconds};

/// Layout of a chart. Each chart is drawn for wide and for narrow screens, because scaled text is hard to read.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Class of the chart in the page's style.
    pub class: &'static str,
    /// Width of the chart in pixels.
    pub width: f64,
    /// Pixels at the left for the labels of the values.
    pub left: f64,
    /// Minimum distance of two ticks of the time axis in pixels.
    pub tick_distance: f64,
}

/// Both layouts: for wide and for narrow screens.
pub const LAYOUTS: [Layout; 2] = [
    Layout {
        class: "wide",
        width: 1060.0,
        left: 92.0,
        tick_distance: 110.0,
    },
    Layout {
        class: "narrow",
        width: 340.0,
        left: 80.0,
        tick_distance: 80.0,
    },
];

/// Free pixels at the right, into which the last label extends.
const RIGHT_MARGIN: f64 = 18.0;
/// Height of a panel of values in pixels.
const PANEL_HEIGHT: f64 = 130.0;
/// Height of the text above a panel in pixels.
const PANEL_HEAD_HEIGHT: f64 = 34.0;
/// Height of all strips of a host in pixels.
const HOST_HEIGHT: f64 = 34.0;
/// Height of one strip in pixels.
const STRIP_HEIGHT: f64 = 7.0;
/// Free height between two strips of a host in pixels.
const STRIP_GAP: f64 = 1.0;
/// Free height between the title of the hosts and the first host, in addition to the panel's head.
const HOSTS_GAP: f64 = 8.0;
/// Height between the baseline of the hosts' title and the first host, in pixels.
const HOSTS_TITLE_HEIGHT: f64 = 12.0;
/// Height between the top of a host's strips and the baseline of its name, in pixels.
const HOST_NAME_BASELINE: f64 = 15.0;
/// Distance of a label at the left from the axis in pixels.
const LABEL_GAP: f64 = 8.0;
/// Height from the line of a tick to the baseline of its label, which is then centred on the line.
const TICK_LABEL_BASELINE: f64 = 4.0;
/// Estimated width of a character in pixels. Host names are cut to the width of the labels.
const CHARACTER_WIDTH: usize = 8;
/// Height of the labels below the time axis in pixels.
const TIME_LABELS_HEIGHT: f64 = 30.0;
/// Factor for the end of an axis, so that rounding errors do not suppress its last tick.
const AXIS_TOLERANCE: f64 = 1.0001;
/// Maximum number of hosts with strips. The table of hosts lists the others.
pub const HOSTS_MAX: usize = 24;

/// A mark of an event on the axis.
pub struct Mark {
    /// Seconds since the beginning of the run.
    pub at_seconds: f64,
    /// Whether the event is a problem.
    pub is_bad: bool,
    /// Text that appears under the pointer.
    pub title: String,
}

impl Layout {
    /// Returns the width in pixels that is left for the time axis.
    fn plot_width(&self) -> f64 {
        self.width - self.left - RIGHT_MARGIN
    }

    /// Returns the number of bins that a reader can distinguish.
    pub fn bin_count(&self) -> usize {
        (self.plot_width() / 3.0) as usize
    }
}

/// Returns the chart of a run as SVG: rates, bytes in memory, and strips for each host up to [`HOSTS_MAX`].
/// `arena_bytes` is the size of all arenas (the memory of the mounts) together, and is drawn as a limit of the bytes in
/// memory.
pub fn render_chart(
    layout: &Layout,
    timeline: &Timeline,
    arena_bytes: u64,
    marks: &[Mark],
) -> String {
    let drawn_hosts = &timeline.hosts[..timeline.hosts.len().min(HOSTS_MAX)];
    let hosts_top = 2.0 * (PANEL_HEAD_HEIGHT + PANEL_HEIGHT) + PANEL_HEAD_HEIGHT + HOSTS_GAP;
    let bottom = hosts_top + HOST_HEIGHT * drawn_hosts.len() as f64;
    let height = bottom + TIME_LABELS_HEIGHT;
    let width = layout.width;
    let mut svg = format!(
        "<svg class=\"chart {}\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         aria-label=\"Rates, memory and hosts over time\">\n",
        layout.class
    );
    let axis = TimeAxis {
        layout,
        seconds: timeline.seconds,
    };
    axis.draw_ticks(&mut svg, PANEL_HEAD_HEIGHT, bottom);
    let sums = HostSums::from_timeline(timeline);
    draw_rate_panel(&mut svg, &axis, &sums);
    draw_memory_panel(&mut svg, &axis, &sums, arena_bytes);
    let _ = writeln!(
        svg,
        "<text class=\"title\" x=\"{}\" y=\"{:.1}\">Each host</text>",
        layout.left,
        hosts_top - HOSTS_TITLE_HEIGHT
    );
    for (index, host) in drawn_hosts.iter().enumerate() {
        axis.draw_host(&mut svg, hosts_top + HOST_HEIGHT * index as f64, host);
    }
    for mark in marks {
        axis.draw_mark(&mut svg, bottom, mark);
    }
    axis.draw_pointer_area(&mut svg, bottom, &sums);
    svg += "</svg>\n";
    svg
}

/// Sums over all hosts of a run, with a value for each bin of the time axis.
struct HostSums {
    /// Bytes per second that programs wrote.
    ingest_rates: Vec<f64>,
    /// Bytes per second that were written to the backing.
    drain_rates: Vec<f64>,
    /// Bytes in memory that the backing lacks.
    held_bytes: Vec<f64>,
}

impl HostSums {
    fn from_timeline(timeline: &Timeline) -> Self {
        let per_second = |sums: Vec<f64>| -> Vec<f64> {
            sums.iter().map(|sum| sum / timeline.bin_seconds).collect()
        };
        Self {
            ingest_rates: per_second(timeline.sum(|bin| bin.ingest_bytes)),
            drain_rates: per_second(timeline.sum(|bin| bin.drain_bytes)),
            held_bytes: timeline.sum(|bin| bin.held_bytes),
        }
    }
}

/// Draws the upper panel: the rates of all hosts together.
fn draw_rate_panel(svg: &mut String, axis: &TimeAxis<'_>, sums: &HostSums) {
    let panel = Panel {
        axis,
        top: PANEL_HEAD_HEIGHT,
        title: "Bytes per second, all hosts",
        format_value: &|value| rate(value),
    };
    let areas: [(&str, &[f64]); 2] = [("in", &sums.ingest_rates), ("out", &sums.drain_rates)];
    panel.draw(svg, &areas);
}

/// Draws the lower panel: the bytes in memory of all hosts together, and the size of all arenas.
fn draw_memory_panel(svg: &mut String, axis: &TimeAxis<'_>, sums: &HostSums, arena_bytes: u64) {
    let panel = Panel {
        axis,
        top: PANEL_HEAD_HEIGHT + PANEL_HEIGHT + PANEL_HEAD_HEIGHT,
        title: "In memory, not yet in the backing",
        format_value: &|value| bytes(value as u64),
    };
    let scale = panel.draw(svg, &[("held", &sums.held_bytes)]);
    panel.draw_arena_limit(svg, &scale, arena_bytes);
}

/// Returns values as text for the page's script, with `|` between them.
fn join_values(values: &[f64], format_value: impl Fn(f64) -> String) -> String {
    let texts: Vec<String> = values.iter().map(|value| format_value(*value)).collect();
    texts.join("|")
}

/// The time axis of a chart.
struct TimeAxis<'a> {
    /// Layout of the chart.
    layout: &'a Layout,
    /// Length of the axis in seconds.
    seconds: f64,
}

impl TimeAxis<'_> {
    /// Returns the horizontal position in pixels of a time in seconds. A time beyond the axis gets the nearer end.
    fn x_of(&self, at_seconds: f64) -> f64 {
        let share = (at_seconds / self.seconds).clamp(0.0, 1.0);
        self.layout.left + share * self.layout.plot_width()
    }

    /// Draws the ticks of the time axis as vertical lines, with labels at the bottom.
    fn draw_ticks(&self, svg: &mut String, top: f64, bottom: f64) {
        let ticks_max = self.layout.plot_width() / self.layout.tick_distance;
        let step = time_step(self.seconds, ticks_max);
        let mut at_seconds = 0.0;
        while at_seconds <= self.seconds * AXIS_TOLERANCE {
            let x = self.x_of(at_seconds);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>\
                 <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                time_text(at_seconds, step)
            );
            at_seconds += step;
        }
    }

    /// Draws the name of a host and its three strips: bytes written by programs (`in`), bytes written to the backing
    /// (`out`), and waits of programs (`wait`). A strip shows the value of each bin (a time interval of the axis) by
    /// its colour.
    fn draw_host(&self, svg: &mut String, top: f64, host: &HostLine) {
        let left = self.layout.left;
        let name_chars_max = left as usize / CHARACTER_WIDTH;
        let name: String = host.host.chars().take(name_chars_max).collect();
        let _ = writeln!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - LABEL_GAP,
            top + HOST_NAME_BASELINE,
            HtmlText(name)
        );
        let values_of_bins =
            |value_of_bin: fn(&Bucket) -> f64| host.bins.iter().map(value_of_bin).collect();
        let strips: [(&str, Vec<f64>); 3] = [
            ("in", values_of_bins(|bin| bin.ingest_bytes as f64)),
            ("out", values_of_bins(|bin| bin.drain_bytes as f64)),
            ("wait", values_of_bins(waits_in_bin)),
        ];
        for (index, (class, values)) in strips.iter().enumerate() {
            let y = top + index as f64 * (STRIP_HEIGHT + STRIP_GAP);
            self.draw_strip(svg, class, y, values);
        }
    }

    /// Draws the mark of an event as a vertical line through the whole chart.
    fn draw_mark(&self, svg: &mut String, bottom: f64, mark: &Mark) {
        let x = self.x_of(mark.at_seconds);
        let class = if mark.is_bad { "mark bad" } else { "mark" };
        let _ = writeln!(
            svg,
            "<g class=\"{class}\"><title>{}</title><line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{PANEL_HEAD_HEIGHT}\" y2=\"{bottom}\"/>\
             <circle cx=\"{x:.1}\" cy=\"{PANEL_HEAD_HEIGHT}\" r=\"3.5\"/></g>",
            HtmlText(&mark.title)
        );
    }

    /// Draws an invisible area over the chart. From its attributes the page's script takes the values that it shows
    /// under the pointer.
    fn draw_pointer_area(&self, svg: &mut String, bottom: f64, sums: &HostSums) {
        let _ = writeln!(
            svg,
            "<rect class=\"pointer\" x=\"{}\" y=\"{PANEL_HEAD_HEIGHT}\" width=\"{:.1}\" height=\"{:.1}\" data-seconds=\"{}\" data-in=\"{}\" \
             data-out=\"{}\" data-held=\"{}\"/><line class=\"cursor\" y1=\"{PANEL_HEAD_HEIGHT}\" y2=\"{bottom}\"/>",
            self.layout.left,
            self.layout.plot_width(),
            bottom - PANEL_HEAD_HEIGHT,
            self.seconds,
            join_values(&sums.ingest_rates, rate),
            join_values(&sums.drain_rates, rate),
            join_values(&sums.held_bytes, |value| bytes(value as u64)),
        );
    }

    /// Draws a strip: a rectangle wherever a value is not 0. Its strength shows the value relative to the maximum.
    /// There is one value for each bin, a time interval of the axis.
    fn draw_strip(&self, svg: &mut String, class: &str, y: f64, values: &[f64]) {
        let max = values.iter().copied().fold(0.0, f64::max);
        let bin_width = self.layout.plot_width() / values.len().max(1) as f64;
        let _ = writeln!(
            svg,
            "<rect class=\"lane\" x=\"{}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{STRIP_HEIGHT}\"/>",
            self.layout.left,
            self.layout.plot_width()
        );
        // The strength has only three steps, so that equal neighbours become one rectangle.
        let strength_of = |value: f64| {
            if value <= 0.0 {
                0
            } else {
                (value / max * 3.0).ceil().clamp(1.0, 3.0) as u32
            }
        };
        let strengths: Vec<u32> = values.iter().map(|value| strength_of(*value)).collect();
        let mut first_bin = 0;
        for equal_bins in strengths.chunk_by(|a, b| a == b) {
            let strength = equal_bins[0];
            if strength > 0 {
                let x = self.layout.left + first_bin as f64 * bin_width;
                // A narrower rectangle could not be seen.
                let width = (equal_bins.len() as f64 * bin_width).max(1.5);
                let _ = writeln!(
                    svg,
                    "<rect class=\"{class} s{strength}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{STRIP_HEIGHT}\"/>"
                );
            }
            first_bin += equal_bins.len();
        }
    }
}

/// Returns how much programs waited in a bin: the writers that waited for memory, and the seconds in close and fsync.
fn waits_in_bin(bin: &Bucket) -> f64 {
    let waits_us = bin.close_us + bin.fsync_us;
    bin.waiting_writers as f64 + waits_us as f64 / 1e6
}

/// The scale of an axis of values, which begins at 0.
struct Scale {
    /// Distance of two ticks.
    step: f64,
    /// Value at the upper end.
    max: f64,
}

/// A panel with an axis of values above the time axis.
struct Panel<'a> {
    /// The time axis below it.
    axis: &'a TimeAxis<'a>,
    /// Vertical position of its upper end in pixels.
    top: f64,
    /// Title above it.
    title: &'static str,
    /// Formats a value with its unit.
    format_value: &'a dyn Fn(f64) -> String,
}

impl Panel<'_> {
    /// Returns the vertical position of a value in pixels.
    fn y_of(&self, scale: &Scale, value: f64) -> f64 {
        self.top + PANEL_HEIGHT * (1.0 - value / scale.max)
    }

    /// Draws a line at the size of the arenas, unless the panel ends below it.
    fn draw_arena_limit(&self, svg: &mut String, scale: &Scale, arena_bytes: u64) {
        if arena_bytes == 0 || scale.max < arena_bytes as f64 {
            return;
        }
        let y = self.y_of(scale, arena_bytes as f64);
        let layout = self.axis.layout;
        let (left, right) = (layout.left, layout.width - RIGHT_MARGIN);
        let _ = writeln!(
            svg,
            "<line class=\"limit\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"limit-text\" x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">arena {}</text>",
            y - 4.0,
            bytes(arena_bytes)
        );
    }

    /// Draws the panel: its title, the axis of values, and an area for each of `areas`. An area has a CSS class, and a
    /// value for each bin. Returns the scale of the axis.
    fn draw(&self, svg: &mut String, areas: &[(&str, &[f64])]) -> Scale {
        let values = areas.iter().flat_map(|(_, values)| values.iter().copied());
        let scale = byte_scale(values.fold(0.0, f64::max));
        let _ = writeln!(
            svg,
            "<text class=\"title\" x=\"{}\" y=\"{:.1}\">{}</text>",
            self.axis.layout.left,
            self.top - 13.0,
            self.title
        );
        self.draw_ticks(svg, &scale);
        for (class, values) in areas {
            self.draw_area(svg, &scale, class, values);
        }
        scale
    }

    /// Draws the ticks of the axis of values as horizontal lines, with labels at the left.
    fn draw_ticks(&self, svg: &mut String, scale: &Scale) {
        let layout = self.axis.layout;
        let mut value = 0.0;
        while value <= scale.max * AXIS_TOLERANCE {
            let y = self.y_of(scale, value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                layout.left,
                layout.width - RIGHT_MARGIN,
                layout.left - LABEL_GAP,
                y + TICK_LABEL_BASELINE,
                // The labels have round values, so a decimal `.0` before the unit is left out.
                (self.format_value)(value).replace(".0 ", " ")
            );
            value += scale.step;
        }
    }

    /// Draws the values of all bins as a line, and fills the area below it.
    fn draw_area(&self, svg: &mut String, scale: &Scale, class: &str, values: &[f64]) {
        let layout = self.axis.layout;
        let line = self.step_path(scale, values);
        let base = self.top + PANEL_HEIGHT;
        let (left, right) = (layout.left, layout.width - RIGHT_MARGIN);
        let _ = writeln!(
            svg,
            "<path class=\"area {class}\" d=\"M{left} {base}{line}L{right:.1} {base}Z\"/>\
             <path class=\"line {class}\" d=\"M{left} {base}{line}L{right:.1} {base}\"/>"
        );
    }

    /// Returns the SVG path of a line of steps: each value holds for its whole bin, a time interval of the axis. Equal
    /// values in a row make one step.
    fn step_path(&self, scale: &Scale, values: &[f64]) -> String {
        let layout = self.axis.layout;
        let bin_width = layout.plot_width() / values.len().max(1) as f64;
        let mut path = String::new();
        // The line begins at the value 0.
        let mut previous_value = 0.0;
        for (index, value) in values.iter().enumerate() {
            let is_repeated = index > 0 && previous_value == *value;
            if !is_repeated {
                let x = layout.left + index as f64 * bin_width;
                let previous_y = self.y_of(scale, previous_value);
                let y = self.y_of(scale, *value);
                let _ = write!(path, "L{x:.1} {previous_y:.1}L{x:.1} {y:.1}");
            }
            previous_value = *value;
        }
        let right = layout.width - RIGHT_MARGIN;
        let last_y = self.y_of(scale, previous_value);
        let _ = write!(path, "L{right:.1} {last_y:.1}");
        path
    }
}

/// Returns a scale with steps of 1, 2, 5 or 10 times a power of ten, in a unit that is a power of 1024. At most four
/// steps reach the maximum, but a step is at least one byte.
fn byte_scale(max: f64) -> Scale {
    let mut unit = 1.0;
    while max / unit > 1024.0 {
        unit *= 1024.0;
    }
    // The lower bound avoids the logarithm of 0.
    let min_step = (max / unit / 4.0).max(1e-9);
    let power_of_ten = 10f64.powf(min_step.log10().floor());
    let round_step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power_of_ten)
        .find(|step| *step >= min_step)
        .unwrap_or(10.0 * power_of_ten);
    let step = (round_step * unit).max(1.0);
    let step_count = (max / step).ceil().max(1.0);
    Scale {
        step,
        max: step_count * step,
    }
}

/// Returns the seconds between two ticks of an axis of `axis_seconds`, so that it has at most `ticks_max` of them.
fn time_step(axis_seconds: f64, ticks_max: f64) -> f64 {
    const STEPS: [f64; 24] = [
        0.1,
        0.2,
        0.5,
        1.0,
        2.0,
        5.0,
        10.0,
        15.0,
        30.0,
        60.0,
        120.0,
        300.0,
        600.0,
        900.0,
        1800.0,
        3600.0,
        7200.0,
        14_400.0,
        21_600.0,
        43_200.0,
        86_400.0,
        172_800.0,
        604_800.0,
        2_592_000.0,
    ];
    let min_step = axis_seconds / ticks_max.max(1.0);
    STEPS
        .into_iter()
        .find(|step| *step >= min_step)
        .unwrap_or(min_step)
}

/// Returns a moment on the axis as text. `step` is the time between two ticks.
fn time_text(at_seconds: f64, step: f64) -> String {
    if at_seconds == 0.0 {
        "0 s".to_owned()
    } else if step < 1.0 {
        format!("{at_seconds:.1} s")
    } else if at_seconds < 60.0 {
        format!("{at_seconds:.0} s")
    } else {
        seconds(at_seconds)
            .replace(" 0 s", "")
            .replace(" 0 min", "")
            .replace(" 0 h", "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_has_few_steps_and_holds_the_most() {
        for max in [0.0, 1.0, 7.0, 999.0, 1025.0, 3e6, 123_456_789.0, 1e13] {
            let Scale { step, max: top } = byte_scale(max);
            assert!(top >= max, "{max}: {top}");
            assert!((1.0..=5.5).contains(&(top / step)), "{max}: {top} / {step}");
        }
    }

    #[test]
    fn ticks_of_time_are_round_and_do_not_overlap() {
        for whole in [0.1, 3.0, 61.0, 7200.0, 1e6, 1e9] {
            for ticks in [3.0, 9.0] {
                let step = time_step(whole, ticks);
                assert!(whole / step <= ticks, "{whole} {ticks}: {step}");
            }
        }
        assert_eq!(time_text(0.5, 0.5), "0.5 s");
        assert_eq!(time_text(120.0, 60.0), "2 min");
        assert_eq!(time_text(90.0, 30.0), "1 min 30 s");
        assert_eq!(time_text(7200.0, 3600.0), "2 h");
    }
}
