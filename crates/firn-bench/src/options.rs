//! The command-line options that all benchmarks have, and what they stand for: the work directory, the progress line
//! and the output of the report.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use firn_testfs::cleanup::{Guard, Leftover, expect};
use indicatif::{ProgressBar, ProgressStyle};

use crate::report::Report;
use crate::supervisor::FIRN_VARIABLE;

/// Options of every benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// How often each candidate is measured; figures are medians. Candidates take turns.
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeats: u32,
    /// Less data, two repeats, fewer cases: a look or a smoke test, no figures to quote.
    #[arg(long)]
    pub quick: bool,
    /// Measure the baselines alone, without Firn: what can this machine do?
    #[arg(long)]
    pub baseline_only: bool,
    /// Also write every sample to FILE as JSON; `-`: print JSON instead of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Directory to work in: a directory of its own is made there and removed at the end. Its file
    /// system is what the benchmark measures.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// The firn program to mount with (default: the one that started this, or lies beside it).
    #[arg(long, value_name = "PROGRAM", env = FIRN_VARIABLE)]
    pub firn: Option<PathBuf>,
}

impl Common {
    /// Returns how often each candidate is measured in this run.
    pub fn repeats(&self) -> u32 {
        if self.quick {
            self.repeats.min(2)
        } else {
            self.repeats
        }
    }

    /// Returns `quick` in a quick run, else `full`.
    pub fn choose<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Creates a directory for this run. It is removed however the run ends.
    pub fn work_dir(&self) -> anyhow::Result<WorkDir> {
        WorkDir::new(&self.dir)
    }

    /// Prints the report as a table or as JSON, and writes it to a file if the options say so.
    pub fn publish(&self, report: &Report) -> anyhow::Result<()> {
        let Some(path) = &self.json else {
            report.print();
            return Ok(());
        };
        if path.as_os_str() == "-" {
            print!("{}", report.json()?);
            return Ok(());
        }
        report.print();
        report.write_json(path)
    }
}

/// A directory that is removed when the value is dropped.
pub struct WorkDir {
    path: PathBuf,
    _remove: Guard,
}

impl WorkDir {
    /// Creates a new directory in `parent`. It is removed when the value is dropped, or else at the end of the program.
    pub fn new(parent: &Path) -> anyhow::Result<Self> {
        let parent = parent
            .canonicalize()
            .with_context(|| format!("cannot work in {}; name another --dir", parent.display()))?;
        ensure!(
            parent.to_str().is_some(),
            "{} is not UTF-8; name another --dir",
            parent.display()
        );
        // Registered before the directory exists: at its exit the program removes the directory of this new name.
        let path = parent.join(format!("firn-bench-{:016x}", rand::random::<u64>()));
        let _remove = expect(Leftover::Dir(path.clone()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("cannot make a directory in {}", parent.display()))?;
        Ok(Self { path, _remove })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a directory with this name in it, and returns its path.
    pub fn subdir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.path.join(name);
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}

/// Returns a progress line for `steps` steps. It is shown only if standard error is a terminal.
pub fn progress(steps: u64, title: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} ({elapsed})")
        .expect("the template is fixed")
        .progress_chars("=> ");
    let bar = ProgressBar::new(steps)
        .with_style(style)
        .with_prefix(title.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Parses a size of at least one byte, such as `64M`, in the syntax of mount options.
pub fn parse_size(text: &str) -> Result<u64, String> {
    match firn_config::parse_size(text)? {
        0 => Err(format!("`{text}` is no size to measure: write 1 or more")),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use firn_config::size_text;

    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_shown() {
        for text in ["1", "4096K", "64K", "1M", "16M", "2G", "1000"] {
            let bytes = parse_size(text).unwrap();
            assert_eq!(parse_size(&size_text(bytes)).unwrap(), bytes);
        }
        assert_eq!(parse_size("64k"), Ok(65536));
        for text in ["", "0", "K", "1KB", "-1", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
    }
}
