//! The timeline of a run as an SVG chart.
//!
//! From top to bottom the chart has a panel with the rates of all hosts, a panel with the bytes in memory, and three thin
//! *strips* for each host. All of them have the same time axis, on which events are marked.
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
    pub tick: f64,
}

/// Both layouts: for wide and for narrow screens.
pub const LAYOUTS: [Layout; 2] = [
    Layout {
        class: "wide",
        width: 1060.0,
        left: 92.0,
        tick: 110.0,
    },
    Layout {
        class: "narrow",
        width: 340.0,
        left: 80.0,
        tick: 80.0,
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

/// Returns the chart of a run as SVG. `arena_bytes` is the size of all arenas together, which is drawn as a limit of the
/// bytes in memory.
pub fn render_chart(
    layout: &Layout,
    timeline: &Timeline,
    arena_bytes: u64,
    marks: &[Mark],
) -> String {
    let shown = timeline.hosts.len().min(HOSTS_MAX);
    let hosts_top = 2.0 * (PANEL_HEAD_HEIGHT + PANEL_HEIGHT) + PANEL_HEAD_HEIGHT + 8.0;
    let bottom = hosts_top + HOST_HEIGHT * shown as f64;
    let height = bottom + 30.0;
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
    axis.draw(&mut svg, PANEL_HEAD_HEIGHT, bottom);
    let per_second = |value: Vec<f64>| -> Vec<f64> {
        value.iter().map(|sum| sum / timeline.bin_seconds).collect()
    };
    let ingest = per_second(timeline.sum(|bin| bin.ingest_bytes));
    let drain = per_second(timeline.sum(|bin| bin.drain_bytes));
    let panel = Panel {
        axis: &axis,
        top: PANEL_HEAD_HEIGHT,
        title: "Bytes per second, all hosts",
        unit: &|value| rate(value),
    };
    let max = ingest.iter().chain(&drain).copied().fold(0.0, f64::max);
    panel.draw(&mut svg, max, &[("in", &ingest), ("out", &drain)]);
    let held = timeline.sum(|bin| bin.held_bytes);
    let panel = Panel {
        axis: &axis,
        top: PANEL_HEAD_HEIGHT + PANEL_HEIGHT + PANEL_HEAD_HEIGHT,
        title: "In memory, not yet in the backing",
        unit: &|value| bytes(value as u64),
    };
    let max = held.iter().copied().fold(0.0, f64::max);
    let scale = panel.draw(&mut svg, max, &[("held", &held)]);
    panel.draw_arena_limit(&mut svg, &scale, arena_bytes);
    let _ = writeln!(
        svg,
        "<text class=\"title\" x=\"{}\" y=\"{:.1}\">Each host</text>",
        layout.left,
        hosts_top - 12.0
    );
    for (index, host) in timeline.hosts.iter().take(shown).enumerate() {
        axis.draw_host(&mut svg, hosts_top + HOST_HEIGHT * index as f64, host);
    }
    for mark in marks {
        axis.draw_mark(&mut svg, bottom, mark);
    }
    // The page's script reads these values and shows them under the pointer. They are all in the chart already.
    let column = |values: &[f64], shown: &dyn Fn(f64) -> String| {
        let texts: Vec<String> = values.iter().map(|value| shown(*value)).collect();
        texts.join("|")
    };
    let _ = writeln!(
        svg,
        "<rect class=\"pointer\" x=\"{}\" y=\"{PANEL_HEAD_HEIGHT}\" width=\"{:.1}\" height=\"{:.1}\" data-seconds=\"{}\" data-in=\"{}\" \
         data-out=\"{}\" data-held=\"{}\"/><line class=\"cursor\" y1=\"{PANEL_HEAD_HEIGHT}\" y2=\"{bottom}\"/>\n</svg>",
        layout.left,
        layout.plot_width(),
        bottom - PANEL_HEAD_HEIGHT,
        timeline.seconds,
        column(&ingest, &|value| rate(value)),
        column(&drain, &|value| rate(value)),
        column(&held, &|value| bytes(value as u64)),
    );
    svg
}

/// The time axis of a chart.
struct TimeAxis<'a> {
    layout: &'a Layout,
    seconds: f64,
}

impl TimeAxis<'_> {
    /// Returns the horizontal position in pixels of a time in seconds. A time beyond the axis gets the nearer end.
    fn x_of(&self, at_seconds: f64) -> f64 {
        let share = (at_seconds / self.seconds).clamp(0.0, 1.0);
        self.layout.left + share * self.layout.plot_width()
    }

    /// Draws the ticks of the time axis as vertical lines, with labels at the bottom.
    fn draw(&self, svg: &mut String, top: f64, bottom: f64) {
        let step = time_step(self.seconds, self.layout.plot_width() / self.layout.tick);
        let mut at_seconds = 0.0;
        while at_seconds <= self.seconds * 1.0001 {
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

    /// Draws the name of a host and its three strips: written by programs, written to the backing, and waits.
    fn draw_host(&self, svg: &mut String, top: f64, host: &HostLine) {
        let left = self.layout.left;
        let name: String = host.host.chars().take(left as usize / 8).collect();
        let _ = writeln!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            top + 15.0,
            HtmlText(name)
        );
        let values =
            |of_bin: fn(&Bucket) -> f64| -> Vec<f64> { host.bins.iter().map(of_bin).collect() };
        let strips = [
            ("in", values(|bin| bin.ingest_bytes as f64)),
            ("out", values(|bin| bin.drain_bytes as f64)),
            (
                "wait",
                values(|bin| {
                    let waits_us = bin.close_us + bin.fsync_us;
                    bin.waiting_writers as f64 + waits_us as f64 / 1e6
                }),
            ),
        ];
        for (number, (class, values)) in strips.iter().enumerate() {
            let y = top + number as f64 * (STRIP_HEIGHT + 1.0);
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

    /// Draws a strip: a rectangle wherever a value is not 0. Its strength shows the value relative to the maximum.
    fn draw_strip(&self, svg: &mut String, class: &str, y: f64, values: &[f64]) {
        let max = values.iter().copied().fold(0.0, f64::max);
        let width = self.layout.plot_width() / values.len().max(1) as f64;
        let _ = writeln!(
            svg,
            "<rect class=\"lane\" x=\"{}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{STRIP_HEIGHT}\"/>",
            self.layout.left,
            self.layout.plot_width()
        );
        // The strength has only three steps, so that equal neighbours become one rectangle.
        let strength = |value: f64| {
            if value <= 0.0 {
                0
            } else {
                (value / max * 3.0).ceil().clamp(1.0, 3.0) as u32
            }
        };
        let mut start = 0;
        for end in 1..=values.len() {
            let now = strength(values[start]);
            if end < values.len() && strength(values[end]) == now {
                continue;
            }
            if now > 0 {
                let x = self.layout.left + start as f64 * width;
                let wide = ((end - start) as f64 * width).max(1.5);
                let _ = writeln!(
                    svg,
                    "<rect class=\"{class} s{now}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{STRIP_HEIGHT}\"/>"
                );
            }
            start = end;
        }
    }
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
    axis: &'a TimeAxis<'a>,
    /// Vertical position of its upper end in pixels.
    top: f64,
    title: &'static str,
    /// Formats a value with its unit.
    unit: &'a dyn Fn(f64) -> String,
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

    /// Draws the axis of values, and an area for each of `rows`: a CSS class, and a value for each bin. `max` is the
    /// largest value. Returns the scale of the axis.
    fn draw(&self, svg: &mut String, max: f64, rows: &[(&str, &[f64])]) -> Scale {
        let layout = self.axis.layout;
        let scale = byte_scale(max);
        let _ = writeln!(
            svg,
            "<text class=\"title\" x=\"{}\" y=\"{:.1}\">{}</text>",
            layout.left,
            self.top - 13.0,
            self.title
        );
        let mut value = 0.0;
        while value <= scale.max * 1.0001 {
            let y = self.y_of(&scale, value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                layout.left,
                layout.width - RIGHT_MARGIN,
                layout.left - 8.0,
                y + 4.0,
                // The labels have round values, so a decimal `.0` is left out.
                (self.unit)(value).replace(".0 ", " ")
            );
            value += scale.step;
        }
        for (class, values) in rows {
            let line = self.step_path(&scale, values);
            let base = self.top + PANEL_HEIGHT;
            let (left, right) = (layout.left, layout.width - RIGHT_MARGIN);
            let _ = writeln!(
                svg,
                "<path class=\"area {class}\" d=\"M{left} {base}{line}L{right:.1} {base}Z\"/>\
                 <path class=\"line {class}\" d=\"M{left} {base}{line}L{right:.1} {base}\"/>"
            );
        }
        scale
    }

    /// Returns the path of a line of steps: each value holds for its whole bin. Equal values in a row make one step.
    fn step_path(&self, scale: &Scale, values: &[f64]) -> String {
        let layout = self.axis.layout;
        let width = layout.plot_width() / values.len().max(1) as f64;
        let mut line = String::new();
        for (index, value) in values.iter().enumerate() {
            let is_repeated = index > 0 && values[index - 1] == *value;
            if !is_repeated {
                let x = layout.left + index as f64 * width;
                let y = self.y_of(scale, *value);
                let _ = write!(line, "L{x:.1} {:.1}", self.y_before(scale, values, index));
                let _ = write!(line, "L{x:.1} {y:.1}");
            }
        }
        let last = values.last().copied().unwrap_or(0.0);
        let _ = write!(
            line,
            "L{:.1} {:.1}",
            layout.width - RIGHT_MARGIN,
            self.y_of(scale, last)
        );
        line
    }

    /// Returns the vertical position of the value before the one at `index`. Before the first value it is that of 0.
    fn y_before(&self, scale: &Scale, values: &[f64], index: usize) -> f64 {
        let before = index.checked_sub(1).map_or(0.0, |before| values[before]);
        self.y_of(scale, before)
    }
}

/// Returns a scale with steps of 1, 2 or 5 times a power of 1024, so that three to five of them reach the maximum.
fn byte_scale(max: f64) -> Scale {
    let mut unit = 1.0;
    while max / unit > 1024.0 {
        unit *= 1024.0;
    }
    let wanted = (max / unit / 4.0).max(1e-9);
    let power = 10f64.powf(wanted.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= wanted)
        .unwrap_or(10.0 * power)
        * unit;
    let step = step.max(1.0);
    let count = (max / step).ceil().max(1.0);
    Scale {
        step,
        max: count * step,
    }
}

/// Returns the time between two ticks, so that there are at most `ticks_max` of them.
fn time_step(whole: f64, ticks_max: f64) -> f64 {
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
    let wanted = whole / ticks_max.max(1.0);
    let step = STEPS.into_iter().find(|step| *step >= wanted);
    step.unwrap_or(wanted)
}

/// Returns a moment on the axis as text.
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
