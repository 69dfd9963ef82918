//! `firn bench spill`: measures writes of a file that does not fit into memory, so that a part of it goes to the spill
//! file (table 3 of the CRUISE paper).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::cpu;
use crate::firn::{Firn, Mount};
use crate::machine;
use crate::options::{Common, WorkDir, parse_size, progress};
use crate::report::{Limit, Point, Report, Sample, median};
use crate::worker::{self, Task};
use firn_config::size_text;

/// Bytes of a megabyte, the unit of the paper's rates.
const MB: f64 = 1e6;
/// Candidate that is only computed: the rate that the formula of the paper predicts.
const FORMULA: &str = "formula";
/// Candidate that writes to a mount with the preload library.
const PRELOAD: &str = "preload";
/// Size of a chunk, the unit that moves to the spill file.
const CHUNK_BYTES: u64 = 4 << 20;
/// Number of slots of the arena if all data is spilled: for the slot that the writer fills, and those that are being
/// moved to the spill file.
const SLOTS_MIN: u64 = 4;
/// Maximum time for moving data to the spill file.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// Table 3 of the paper, for 512 MB per process: the spilled percentage, and the expected and the measured rate in
/// MB/s.
const TABLE: [(f64, f64, f64); 7] = [
    (0.0, 15074.17, 15074.17),
    (3.125, 10349.12, 10586.61),
    (6.25, 7879.33, 8134.46),
    (12.5, 5333.61, 5312.26),
    (25.0, 3240.00, 3110.58),
    (50.0, 1815.06, 2163.93),
    (100.0, 965.67, 965.67),
];

/// Writes a file of which a part has no room in memory and goes to the spill file.
///
/// The spill file lies on the file system of --dir. Beside each figure stands what the paper expects:
/// size / (spilled / rate of the device + rest / rate of memory), with both rates of the same run: direct
/// writes of 4M to a file beside the spill file, and the same file all in memory. Goal: no less.
#[derive(Clone, Debug, clap::Args)]
pub struct SpillArgs {
    #[command(flatten)]
    common: Common,
    /// Bytes of the file (default: 512M, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Shares of the file that are spilled, of those in the paper's table (default: all; quick 0, 50, 100).
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',')]
    percent: Vec<f64>,
}

/// Rates without spilling, in bytes per second.
struct Native {
    device: f64,
    memory: f64,
}

impl SpillArgs {
    fn size(&self) -> u64 {
        self.size
            .unwrap_or(self.common.choose(512 << 20, 64 << 20))
            .next_multiple_of(CHUNK_BYTES)
    }

    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut report = Report::new("spill");
        report.note(format!(
            "one process, a file of {} in writes of 1M; the spill file is on {}",
            size_text(self.size()),
            machine::file_system_of(work.path())
        ));
        report.note(
            "until close returned and the part to be spilled was on the device (direct writes)",
        );
        report.note(
            "CRUISE: what the paper expected and measured, on another machine and an SSD of 2013",
        );
        if self.common.baseline_only {
            let device = (0..self.common.repeats())
                .map(|_| self.device_sample(&work))
                .collect::<Result<_, _>>()?;
            report.add("direct writes of 4M", vec![("device".into(), device)]);
            return Ok(report);
        }
        let shares: Vec<_> = TABLE
            .iter()
            .filter(|row| {
                if self.percent.is_empty() {
                    !self.common.quick || row.0 % 50.0 == 0.0
                } else {
                    self.percent.contains(&row.0)
                }
            })
            .collect();
        let memory = self.mount(&firn, &work, 0.0)?;
        let bar = progress(
            (shares.len() * self.common.repeats() as usize) as u64,
            "spill",
        );
        let mut devices = Vec::new();
        for &&(percent, expected, measured) in &shares {
            let mount = match percent {
                0.0 => None,
                _ => Some(self.mount(&firn, &work, percent)?),
            };
            let mut formula = Vec::new();
            let mut samples = Vec::new();
            for _ in 0..self.common.repeats() {
                let native = self.native(&firn, &work, &memory)?;
                devices.push(native.device / MB);
                let rate = match &mount {
                    Some(mount) => self.measure(&firn, mount, percent)?,
                    // The same thing a second time: how much two runs of it differ.
                    None => self.measure(&firn, &memory, percent)?,
                };
                let row = |rate: f64, paper: f64| {
                    vec![("throughput", "MB/s", rate / MB), ("CRUISE", "MB/s", paper)]
                };
                formula.push(row(native.expect(percent), expected));
                samples.push(row(rate, measured));
                bar.inc(1);
            }
            let point = Point {
                plot: "a file of which a part is spilled".into(),
                axis: "percent spilled",
                x: percent.to_string(),
                order: percent,
            };
            let candidates = vec![(FORMULA.to_owned(), formula), (PRELOAD.to_owned(), samples)];
            report.add_points(format!("{percent} % spilled"), vec![point], candidates);
        }
        bar.finish_and_clear();
        report.note(format!(
            "direct writes to the device: {:.0} MB/s",
            median(&devices)
        ));
        // Without spilling there is nothing to expect: two runs of one thing.
        let spilling = report
            .cases
            .iter()
            .filter(|case| !case.name.starts_with("0 %"));
        let ratios: Vec<f64> = spilling
            .filter_map(|case| case.ratio(PRELOAD, FORMULA, "throughput"))
            .collect();
        report.judge(
            format!("{PRELOAD} to {FORMULA}"),
            Limit::Least(1.0),
            &ratios,
        );
        Ok(report)
    }

    fn native(&self, firn: &Firn, work: &WorkDir, memory: &Mount<'_>) -> anyhow::Result<Native> {
        Ok(Native {
            device: self.device(work)?,
            memory: self.measure(firn, memory, 0.0)?,
        })
    }

    /// Measures the rate of direct writes to a file beside the spill file, in bytes per second.
    fn device(&self, work: &WorkDir) -> anyhow::Result<f64> {
        let path = work.path().join("direct");
        let task = Task::Direct {
            path: path.clone(),
            count: self.size() / CHUNK_BYTES,
            bytes: CHUNK_BYTES,
        };
        let outcomes = worker::run_all(&[task]);
        std::fs::remove_file(path)?;
        Ok(self.size() as f64 / worker::elapsed_s(&outcomes?))
    }

    fn device_sample(&self, work: &WorkDir) -> anyhow::Result<Sample> {
        Ok(vec![("throughput", "MB/s", self.device(work)? / MB)])
    }

    /// Mounts Firn so that `percent` of the file has no room in the arena (the memory of the mount), and must move to
    /// the spill file on the disk.
    fn mount<'a>(&self, firn: &'a Firn, work: &WorkDir, percent: f64) -> anyhow::Result<Mount<'a>> {
        let name = |what: &str| format!("{what}-{percent}");
        let backing = work.subdir(&name("backing"))?;
        let point = work.subdir(&name("firn"))?;
        let chunks = self.size() / CHUNK_BYTES;
        let chunks_in_memory = (chunks as f64 * (100.0 - percent) / 100.0).round() as u64;
        let options = "drain=demand,close=held,fsync=held,chunk-size=4M";
        let spill = work.subdir(&name("spill"))?;
        // Only whole chunks move, even if little of them is used, because the first slabs (parts of a chunk) that a
        // file gets are small. So the spill file needs more room than the file has bytes.
        let spill_bytes =
            (self.size() + self.size() / 8).next_multiple_of(CHUNK_BYTES) + 4 * CHUNK_BYTES;
        let spill_options = format!("spill={},spill-size={spill_bytes}", spill.display());
        let options = match percent {
            // Nothing is spilled: the arena has room for all chunks.
            0.0 => format!("{options},arena-size={}", (chunks + 4) * CHUNK_BYTES),
            // Everything is spilled: the arena has the fewest chunks that are possible.
            100.0 => {
                format!(
                    "{options},{spill_options},arena-size={},spill-upper=0,spill-lower=0",
                    SLOTS_MIN * CHUNK_BYTES
                )
            }
            // Chunks move until 98 percent of the slots are in use. So these 98 percent are the part that stays in
            // memory.
            _ => format!(
                "{options},{spill_options},arena-size={},spill-upper=99,spill-lower=98",
                (chunks_in_memory * 100).div_ceil(98) * CHUNK_BYTES
            ),
        };
        let mount = firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        Ok(mount)
    }

    /// Writes the file and waits until `percent` of it is in the spill file. Returns the rate in bytes per second.
    fn measure(&self, firn: &Firn, mount: &Mount<'_>, percent: f64) -> anyhow::Result<f64> {
        let path = mount.path().join("rank0");
        let task = Task::Write {
            path: path.clone(),
            runs: vec![(self.size() >> 20, 1 << 20)],
            sync: false,
            over: false,
        };
        let moved_before = spilled_bytes(mount, percent)?;
        let outcomes = worker::run_with(Some(&firn.preload()?), &[task])?;
        let chunks_to_spill = (self.size() / CHUNK_BYTES) as f64 * percent / 100.0;
        wait_for_spill(
            mount,
            percent,
            moved_before + chunks_to_spill as u64 * CHUNK_BYTES,
        )?;
        // Without a spill file, the measured time ends with the writes.
        let end_ns = match percent {
            0.0 => outcomes[0].end_ns,
            _ => cpu::now_ns(),
        };
        remove(mount, &path)?;
        Ok(self.size() as f64 / ((end_ns - outcomes[0].begin_ns) as f64 * 1e-9))
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            size: None,
            percent: Vec::new(),
        }
    }
}

impl Native {
    /// Returns the rate that the formula of section 7.2.3 of the paper expects.
    fn expect(&self, percent: f64) -> f64 {
        let share = percent / 100.0;
        1.0 / (share / self.device + (1.0 - share) / self.memory)
    }
}

/// Returns the bytes that the mount has moved to its spill file so far.
fn spilled_bytes(mount: &Mount<'_>, percent: f64) -> anyhow::Result<u64> {
    if percent == 0.0 {
        Ok(0)
    } else {
        mount.number("moved_bytes")
    }
}

/// Waits until the mount has moved `wanted` bytes to its spill file. Fails after [`WAIT_MAX`].
fn wait_for_spill(mount: &Mount<'_>, percent: f64, wanted: u64) -> anyhow::Result<()> {
    let begin = Instant::now();
    while spilled_bytes(mount, percent)? < wanted {
        if begin.elapsed() > WAIT_MAX {
            bail!("gave up waiting for the spill file");
        }
    }
    Ok(())
}

/// Removes a file, and waits until it has left the arena.
fn remove(mount: &Mount<'_>, path: &Path) -> anyhow::Result<()> {
    std::fs::remove_file(path)?;
    mount.wait_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_gives_the_figures_of_the_paper() {
        let native = Native {
            device: TABLE[6].1,
            memory: TABLE[0].1,
        };
        for (percent, expected, _) in TABLE {
            let found = native.expect(percent);
            assert!(
                (found / expected - 1.0).abs() < 0.01,
                "{percent}: {found}, {expected}"
            );
        }
    }
}
