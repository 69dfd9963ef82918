//! What the launcher shows: progress on a terminal, a line a checkpoint, the cost at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::checkpoint::Saved;

/// Collects costs and shows how far the run is.
pub struct Report {
    steps: u64,
    bar: bool,
    begin: Instant,
    slowest: Vec<Duration>,
    writes: u64,
    bytes: u64,
}

impl Report {
    /// For a run of so many steps.
    pub fn new(steps: u64) -> Report {
        let bar = std::io::stderr().is_terminal();
        Report {
            steps,
            bar,
            begin: Instant::now(),
            slowest: Vec::new(),
            writes: 0,
            bytes: 0,
        }
    }

    /// Shows the step on a terminal.
    pub fn at(&self, step: u64) {
        if self.bar {
            let filled = (step * 30 / self.steps.max(1)) as usize;
            eprint!("\r  [{:30}] step {step}/{}", "#".repeat(filled), self.steps);
            let _ = std::io::stderr().flush();
        }
    }

    /// Takes the files of one checkpoint.
    pub fn checkpoint(&mut self, step: u64, files: &[Saved]) {
        let slowest = files
            .iter()
            .map(|file| file.in_calls)
            .max()
            .unwrap_or_default();
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        self.slowest.push(slowest);
        self.bytes += bytes;
        self.writes += files.iter().map(|file| file.writes).sum::<u64>();
        let clear = if self.bar { "\r\x1b[K" } else { "" };
        eprintln!(
            "{clear}  step {step}: checkpoint of {:.1} MiB in {:.3} s",
            bytes as f64 / f64::from(1 << 20),
            slowest.as_secs_f64()
        );
    }

    /// Ends the line of the bar.
    pub fn end(&self) {
        if self.bar {
            eprint!("\r\x1b[K");
        }
    }

    /// The costs, one `name value` a line, on standard output.
    pub fn print(&self) {
        let mut sorted = self.slowest.clone();
        sorted.sort_unstable();
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
        println!("checkpoints {}", sorted.len());
        println!("checkpoint_bytes {}", self.bytes);
        println!("checkpoint_writes {}", self.writes);
        println!(
            "checkpoint_write_mean_bytes {}",
            self.bytes / self.writes.max(1)
        );
        println!(
            "checkpoint_seconds_total {:.6}",
            sorted.iter().sum::<Duration>().as_secs_f64()
        );
        println!("checkpoint_seconds_median {:.6}", median.as_secs_f64());
        println!("run_seconds {:.6}", self.begin.elapsed().as_secs_f64());
    }
}
