//! `firn-lab conflict`: how long hosts take to find out whether they can commit together.

use std::time::Instant;

use firn_transact::conflict::{AccessList, ListedFile, ListedProcess, RangeSet, find_conflicts};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use firn_bench::options::{Common, progress};
use firn_bench::report::{Limit, Point, Report, Sample};

const PAIRS: &str = "each pair";
const FIRN: &str = "firn";
/// Of figure 7.
const FILE_BYTES: u64 = 2 << 30;
const ACCESSES: u64 = 10_000;
const OVERLAPS: [u64; 4] = [0, 5, 10, 20];

/// Tests whether what processes of several hosts read and wrote conflicts.
///
/// Figure 7 of the CprFS paper: processes, each on a host of its own, access a file of 2 GiB at random,
/// 10,000 times each, half of them writes, each in a part of its own that reaches over into those of its
/// neighbours by some percent. Firn's time includes the reading of all lists as they are stored. The
/// baseline compares each pair of processes, as the paper does, range by range in order. Then 10^5 and 10^6 ranges
/// of 8 hosts that do not conflict; goals: 10^6 within one second, and not more than 12 times as long as
/// 10^5.
#[derive(Clone, Debug, clap::Args)]
pub struct ConflictArgs {
    #[command(flatten)]
    common: Common,
    /// Numbers of processes to try.
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', default_value = "2,4,8,16,32", value_parser = clap::value_parser!(u32).range(2..=1024))]
    processes: Vec<u32>,
    /// Bytes of one access.
    #[arg(long, value_name = "SIZE", value_parser = firn_bench::options::parse_size, default_value = "4K")]
    access_size: u64,
}

impl ConflictArgs {
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let mut report = Report::new("conflict");
        report.note(format!(
            "accesses of {} bytes, {ACCESSES} each process, half of them writes",
            self.access_size
        ));
        report.note("one thread; lists in the page cache");
        let processes: Vec<u32> = self
            .processes
            .iter()
            .copied()
            .filter(|count| !self.common.quick || *count <= 4)
            .collect();
        let bar = progress((processes.len() * OVERLAPS.len()) as u64, "conflict");
        for overlap in OVERLAPS {
            for &count in &processes {
                let lists = self.random(count.into(), overlap);
                let name = format!("{count} processes, overlap {overlap} %");
                let plot = format!("overlap {overlap} %");
                let point = Point {
                    plot,
                    axis: "processes",
                    x: count.to_string(),
                    order: count.into(),
                };
                self.measure(&mut report, name, vec![point], &lists);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let most = self.common.choose(1_000_000, 100_000);
        for ranges in [most / 10, most] {
            self.measure(
                &mut report,
                format!("{ranges} ranges of 8 hosts"),
                Vec::new(),
                &stripes(8, ranges),
            );
        }
        let time = |back: usize| {
            report
                .cases
                .iter()
                .rev()
                .nth(back)
                .and_then(|case| case.median(FIRN, "test"))
                .unwrap_or(0.0)
        };
        let fewer = time(1);
        let all = time(0);
        report.judge(
            format!("{most} ranges of 8 hosts [ms]"),
            Limit::Most(1000.0),
            &[all],
        );
        report.judge(
            "ten times the ranges take, times as long".to_owned(),
            Limit::Most(12.0),
            &[all / fewer],
        );
        Ok(report)
    }

    fn measure(&self, report: &mut Report, name: String, points: Vec<Point>, lists: &[AccessList]) {
        let stored: Vec<Vec<u8>> = lists.iter().map(AccessList::encode).collect();
        let ranges = lists.iter().map(AccessList::range_count).sum::<usize>() as f64;
        let bytes = stored.iter().map(Vec::len).sum::<usize>() as f64;
        let sample = |time_ms: f64, conflicts: u64, bytes: f64| -> Sample {
            vec![
                ("test", "ms", time_ms),
                ("ranges", "", ranges),
                ("conflicts", "", conflicts as f64),
                ("lists", "MiB", bytes / f64::from(1 << 20)),
            ]
        };
        let mut pairs = Vec::new();
        let mut firn = Vec::new();
        for _ in 0..self.common.repeats() {
            let begun = Instant::now();
            let found = each_pair(lists);
            pairs.push(sample(begun.elapsed().as_secs_f64() * 1e3, found, bytes));
            let begun = Instant::now();
            let read: Vec<_> = stored
                .iter()
                .map(|bytes| AccessList::decode(bytes).expect("just made"))
                .collect();
            let found = find_conflicts(&read).total;
            firn.push(sample(begun.elapsed().as_secs_f64() * 1e3, found, bytes));
        }
        report.add_points(
            name,
            points,
            vec![(PAIRS.into(), pairs), (FIRN.into(), firn)],
        );
    }

    fn random(&self, count: u64, overlap_percent: u64) -> Vec<AccessList> {
        let part = FILE_BYTES / count;
        let over = part * overlap_percent / 100;
        let one = |index: u64| {
            let mut rng = StdRng::seed_from_u64(index);
            let mut read = RangeSet::default();
            let mut written = RangeSet::default();
            let start = (index * part).saturating_sub(over);
            let end = ((index + 1) * part + over).min(FILE_BYTES) - self.access_size;
            for _ in 0..ACCESSES {
                let at = rng.random_range(start..=end) / self.access_size * self.access_size;
                let range = at.max(start)..at.max(start) + self.access_size;
                if rng.random() {
                    read.insert(range)
                } else {
                    written.insert(range)
                }
            }
            list(index, &read, &written)
        };
        (0..count).map(one).collect()
    }
}

fn list(host: u64, read: &RangeSet, written: &RangeSet) -> AccessList {
    let processes = vec![ListedProcess::new(host as u32 + 1, read, written)];
    let files = vec![ListedFile {
        ino: 1,
        path: b"file".to_vec(),
        processes,
    }];
    AccessList {
        host: format!("n{host}"),
        files,
        ..AccessList::default()
    }
}

/// Ranges with gaps, in turns of all hosts.
fn stripes(hosts: u64, ranges: u64) -> Vec<AccessList> {
    let one = |host: u64| {
        let mut written = RangeSet::default();
        for at in 0..ranges / hosts {
            let start = (at * hosts + host) * 4096;
            written.insert(start..start + 1000);
        }
        list(host, &RangeSet::default(), &written)
    };
    (0..hosts).map(one).collect()
}

/// The paper's way: the lists of each two processes side by side.
fn each_pair(lists: &[AccessList]) -> u64 {
    let process = |list: &AccessList| {
        let process = &list.files[0].processes[0];
        let with = |writes: bool| move |(start, end)| (start, end, writes);
        let mut items: Vec<(u64, u64, bool)> = process
            .read()
            .map(with(false))
            .chain(process.written().map(with(true)))
            .collect();
        items.sort_unstable();
        items
    };
    let all: Vec<_> = lists.iter().map(process).collect();
    let mut found = 0;
    for (at, one) in all.iter().enumerate() {
        for other in &all[at + 1..] {
            let mut from = 0;
            for &(start, end, writes) in one {
                // Nothing before `from` reaches this far: within a list, reads and writes overlap a little only.
                while other.get(from).is_some_and(|item| item.1 <= start) {
                    from += 1;
                }
                let near = other[from..].iter().take_while(|item| item.0 < end);
                found += near
                    .filter(|item| item.1 > start && (writes || item.2))
                    .count() as u64;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_do_not_conflict_and_parts_that_reach_over_do() {
        assert_eq!(find_conflicts(&stripes(4, 1000)).total, 0);
        assert_eq!(each_pair(&stripes(4, 1000)), 0);
        let dir = std::env::temp_dir();
        let dir = dir.to_str().expect("text");
        let line = ["firn-lab", "conflict", "--dir", dir].map(Into::into);
        let Ok(crate::Experiment::Conflict(args)) = crate::Experiment::parse(line.to_vec()) else {
            panic!("another experiment");
        };
        assert_eq!(find_conflicts(&args.random(3, 0)).total, 0);
        assert!(find_conflicts(&args.random(3, 10)).total > 100);
        assert!(each_pair(&args.random(3, 10)) > 100);
    }
}
