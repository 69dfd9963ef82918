//! How far long work is: a bar on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::{output, text};

/// Work that ends before this has passed needs no line in a job's log.
const FIRST_LINE_AFTER: Duration = Duration::from_secs(2);
/// Often enough to see that it lives, seldom enough not to fill a log.
const LINE_EVERY: Duration = Duration::from_secs(5);
const TEMPLATE: &str = "{prefix:>10} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {msg} ({binary_bytes_per_sec})";

/// Shows how many bytes are left.
pub struct Meter {
    on_terminal: bool,
    /// From when on there is something to show.
    bar: Option<ProgressBar>,
    /// The most that was ever left: what there is to do.
    total_bytes: u64,
    next_line: Instant,
    left_bytes: u64,
}

impl Meter {
    /// Shows nothing yet.
    pub fn new() -> Self {
        let next_line = Instant::now() + FIRST_LINE_AFTER;
        Self {
            on_terminal: io::stderr().is_terminal(),
            bar: None,
            total_bytes: 0,
            next_line,
            left_bytes: 0,
        }
    }

    /// So much is left.
    pub fn show(&mut self, left_bytes: u64, left_files: u64, phase: &str) {
        self.total_bytes = self.total_bytes.max(left_bytes);
        self.left_bytes = left_bytes;
        if self.total_bytes == 0 {
            return;
        }
        let phase = text::name(phase);
        let files = text::count(left_files, "file");
        if self.on_terminal {
            self.draw(phase, format!("{files} left"));
        } else if Instant::now() >= self.next_line {
            self.next_line = Instant::now() + LINE_EVERY;
            let left = text::bytes(left_bytes);
            let total = text::bytes(self.total_bytes);
            output::say(&format!("{phase}: {left} of {total} left in {files}"));
        }
    }

    fn draw(&mut self, phase: String, message: String) {
        let done = self.total_bytes - self.left_bytes;
        match &self.bar {
            Some(bar) => {
                bar.set_length(self.total_bytes);
                bar.set_position(done);
                bar.set_prefix(phase);
                bar.set_message(message);
            }
            None => {
                let style = ProgressStyle::with_template(TEMPLATE).expect("the template is fixed");
                let bar =
                    ProgressBar::new(self.total_bytes).with_style(style.progress_chars("=> "));
                let bar = bar
                    .with_prefix(phase)
                    .with_message(message)
                    .with_position(done);
                bar.tick();
                self.bar = Some(bar);
            }
        }
    }

    /// What was left when it was last told.
    pub fn left_bytes(&self) -> u64 {
        self.left_bytes
    }
}

impl Drop for Meter {
    /// Clears the line, so that what is said next stands alone.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
