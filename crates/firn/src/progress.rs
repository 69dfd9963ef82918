//! Progress of a long operation: a bar on a terminal, and an occasional line elsewhere.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::{output, text};

/// Time before the first line. A shorter operation needs no line in a job's log.
const FIRST_LINE_DELAY: Duration = Duration::from_secs(2);
/// Time between two lines: short enough to show that the process works, and long enough to keep a log readable.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const TEMPLATE: &str =
    "{prefix:>10} [{bar:30}] {done} of {total}, {msg} ({speed}, {time_left} to go)";

/// Shows how many bytes of an operation remain.
pub struct ProgressMeter {
    /// Whether stderr is a terminal, which decides between a bar and lines.
    is_on_terminal: bool,
    /// The bar. `None` means that there was nothing to show yet.
    bar: Option<ProgressBar>,
    /// The largest number of remaining bytes until now, which is the size of the whole operation.
    total_bytes: u64,
    /// The largest number of remaining files until now.
    total_files: u64,
    /// When the operation began.
    started_at: Instant,
    /// When the next line is due.
    next_line_at: Instant,
    /// Bytes that remained at the last call of [`ProgressMeter::show`].
    remaining_bytes: u64,
    /// Whether nothing is shown.
    is_quiet: bool,
}

/// What a command waited for, and how long.
#[derive(Clone, Copy, Debug)]
pub struct WaitSummary {
    /// The largest number of remaining bytes.
    pub bytes: u64,
    /// The largest number of files with remaining bytes.
    pub files: u64,
    /// Time since the operation began.
    pub time: Duration,
}

impl WaitSummary {
    /// Returns the amount in words, such as `768.0 MiB in 32 files`.
    pub fn amount_text(&self) -> String {
        format!(
            "{} in {}",
            text::bytes(self.bytes),
            text::count(self.files, "file")
        )
    }

    /// Returns the time in words, such as `0.7 s`.
    pub fn time_text(&self) -> String {
        text::seconds(self.time.as_secs_f64())
    }
}

impl ProgressMeter {
    /// Creates a meter. It shows nothing before the first call of [`ProgressMeter::show`].
    pub fn new() -> Self {
        Self::with_quiet(false)
    }

    /// Creates a meter. A quiet one shows nothing, and still counts.
    pub fn with_quiet(is_quiet: bool) -> Self {
        let started_at = Instant::now();
        Self {
            is_on_terminal: io::stderr().is_terminal(),
            bar: None,
            total_bytes: 0,
            total_files: 0,
            started_at,
            next_line_at: started_at + FIRST_LINE_DELAY,
            remaining_bytes: 0,
            is_quiet,
        }
    }

    /// Returns what was waited for until now.
    pub fn summary(&self) -> WaitSummary {
        WaitSummary {
            bytes: self.total_bytes,
            files: self.total_files,
            time: self.started_at.elapsed(),
        }
    }

    /// Shows the remaining bytes and files, and what is done with them (`phase`). On a terminal this updates the bar.
    /// Elsewhere it prints a line, but at most one in each interval.
    pub fn show(&mut self, remaining_bytes: u64, remaining_files: u64, phase: &str) {
        self.total_bytes = self.total_bytes.max(remaining_bytes);
        self.total_files = self.total_files.max(remaining_files);
        self.remaining_bytes = remaining_bytes;
        if self.total_bytes == 0 || self.is_quiet {
            return;
        }
        let phase = text::escaped(phase);
        let files = text::count(remaining_files, "file");
        if self.is_on_terminal {
            self.draw_bar(phase, format!("{files} left"));
        } else if Instant::now() >= self.next_line_at {
            self.next_line_at = Instant::now() + LINE_INTERVAL;
            let remaining = text::bytes(remaining_bytes);
            let total = text::bytes(self.total_bytes);
            output::print_message(&format!("{phase}: {remaining} of {total} left in {files}"));
        }
    }

    /// Draws the bar on a terminal, and creates it at the first call.
    fn draw_bar(&mut self, phase: String, message: String) {
        let done_bytes = self.total_bytes - self.remaining_bytes;
        match &self.bar {
            Some(bar) => {
                bar.set_length(self.total_bytes);
                bar.set_position(done_bytes);
                bar.set_prefix(phase);
                bar.set_message(message);
            }
            None => {
                let bar = ProgressBar::new(self.total_bytes)
                    .with_style(bar_style())
                    .with_prefix(phase)
                    .with_message(message)
                    .with_position(done_bytes);
                bar.tick();
                self.bar = Some(bar);
            }
        }
    }

    /// Returns the bytes that remained at the last call of [`ProgressMeter::show`].
    pub fn remaining_bytes(&self) -> u64 {
        self.remaining_bytes
    }
}

/// Returns the style of the bar, whose sizes and times are written as in all other output.
fn bar_style() -> ProgressStyle {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is fixed");
    // `out` is a text in memory, so writes to it do not fail.
    style
        .with_key("done", |state: &ProgressState, out: &mut dyn Write| {
            let _ = out.write_str(&text::bytes(state.pos()));
        })
        .with_key("total", |state: &ProgressState, out: &mut dyn Write| {
            let _ = out.write_str(&text::bytes(state.len().unwrap_or_default()));
        })
        .with_key("speed", |state: &ProgressState, out: &mut dyn Write| {
            let _ = out.write_str(&text::rate(state.per_sec()));
        })
        .with_key("time_left", |state: &ProgressState, out: &mut dyn Write| {
            let _ = out.write_str(&text::seconds(state.eta().as_secs_f64()));
        })
        .progress_chars("=> ")
}

impl Drop for ProgressMeter {
    /// Clears the bar, so that the next message begins on an empty line.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    /// A terminal for tests, which stores what is written to it.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_has_sizes_as_everywhere_and_the_time_left() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let bar = ProgressBar::with_draw_target(Some(100 << 20), target)
            .with_style(bar_style())
            .with_prefix("draining")
            .with_message("3 files left")
            .with_position(25 << 20);
        bar.tick();
        let shown = screen.0.lock().unwrap().clone();
        assert!(
            shown.contains("25.0 MiB of 100.0 MiB, 3 files left (") && shown.contains(" to go)"),
            "{shown}"
        );
    }

    #[test]
    fn what_was_waited_for_is_the_most_that_was_left() {
        let mut meter = ProgressMeter::with_quiet(true);
        for (bytes, files) in [(3 << 20, 2), (1 << 20, 1), (0, 0)] {
            meter.show(bytes, files, "draining");
        }
        assert_eq!(meter.summary().amount_text(), "3.0 MiB in 2 files");
        assert_eq!(meter.remaining_bytes(), 0);
    }
}
