//! `firn bench commit`: measures the cost of Firn's transactions. The changes of a transaction take effect together at
//! its commit.
//!
//! The *candidates* are the ways to make the same changes durable. The native ones write to the file system itself, and
//! sync at the end. The others write through a mount of Firn, in a transaction.

use std::path::{Path, PathBuf};

use crate::backing::{self, Kind, Prepared, Slowness};
use crate::cpu;
use crate::durable;
use crate::firn::{Firn, Mount};
use crate::options::{Common, parse_size, progress};
use crate::report::{Limit, Report, Sample};
use crate::serve::{Mounted, Server};
use crate::worker::{self, Operation, Task};
use firn_config::size_text;

mod records;
mod rules;

/// Candidate without Firn. It writes each changed file as a whole, as cp(1) does.
const NATIVE: &str = "native";
/// Candidate without Firn. It writes only the changed part of each file.
const IN_PLACE: &str = "native, in place";
/// Candidate that changes files in place through a FUSE server that only passes requests on.
const PASSTHROUGH: &str = "plain passthrough, in place";
/// Candidate with transactions on a mount of Firn.
const FIRN: &str = "firn";
/// Candidate like [`FIRN`] that commits with `firn commit --async`.
const ASYNC: &str = "firn, async";
/// Candidate like [`FIRN`] whose writers load the preload library.
const PRELOAD: &str = "firn + preload";
/// Candidate on a mount without commit rules.
const NO_RULES: &str = "firn, no rules";
/// Candidate on a mount with all built-in commit rules and two more.
const RULES: &str = "firn, 30 rules";
/// Number of new large files.
const FILES: u64 = 8;
/// Bytes of one write to a large file.
const WRITE_BYTES: u64 = 1 << 20;

/// Writes in transactions, and natively with an fsync at the end.
///
/// The times end when the data is durable: when `firn commit` has returned, or natively the sync. The time
/// of `firn begin` is not included.
///
/// Part new: new files, in writes of 1 MiB. Natively with fsync of all files and their directory. Goal: at
/// most 1.15 times as long as natively.
///
/// Part small: a quarter of each of many files of 4 KiB is rewritten. Natively each file is written as a
/// whole, as cp does, with syncfs at the end. A FUSE file system that only passes requests on shows the
/// share of FUSE. Goals: at most 3 times as long as natively; the commit alone at most 1.5 times.
///
/// Part records: figure 6 of the CprFS paper, one file in records of 4 and 8 KiB. Goals: reads and random
/// access at least 0.95 of the native rate; on a network file system, the sequential write at least 1.3.
///
/// Part rules: a mount with 30 commit rules is compared with one without. Goals: at least 0.97 as many new
/// files a second to which no rule applies; at most 1.05 times as long for a checkpoint of 1.5 GiB that a
/// rule commits, compared with a sync without rules.
#[derive(Clone, Debug, clap::Args)]
pub struct CommitArgs {
    #[command(flatten)]
    common: Common,
    /// Parts to run (default: all on the file system of --dir, records on others).
    #[arg(long, value_enum, value_name = "PART,…", value_delimiter = ',')]
    parts: Vec<Part>,
    /// What the changes end up in. Slow backings are made for the run and removed after it.
    #[arg(long, value_enum, default_value = "local")]
    backing: Kind,
    /// Bytes of the new files together (default: 1G, quick 64M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Small files (default: 10000, quick 1000).
    #[arg(long, value_name = "COUNT")]
    count: Option<u64>,
    /// Bytes of the file of records (default: 256M, quick 16M).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    file_size: Option<u64>,
    /// More options of Firn's mounts, such as arena-size=1G,io-threads=8.
    #[arg(long, value_name = "KEY=VALUE,…")]
    mount_options: Option<String>,
    /// Time added to each network round trip of sshfs, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 500)]
    round_trip_us: u64,
    /// Writes per second of the slow disk.
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    writes_per_s: u64,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// New large files.
    New,
    /// Small files that exist.
    Small,
    /// Records of one file.
    Records,
    /// Commit rules.
    Rules,
}

/// The samples of each candidate, in one case.
type CaseSamples = Vec<(String, Vec<Sample>)>;

impl CommitArgs {
    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let slowness = Slowness {
            round_trip_us: self.round_trip_us,
            writes_per_s: self.writes_per_s,
        };
        let prepared = backing::prepare(self.backing, slowness, &work)?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let candidates = self.candidates(&prepared, work.path(), &firn)?;
        let mut report = Report::new("commit");
        report.note(prepared.note.clone());
        report.note(
            "closed: until the last close returned; durable: until fsync or `firn commit` returned",
        );
        report.note("commit: of that, `firn commit` alone; async: `firn commit --async`, which returns once it is decided");
        report.note("CPU: writers and firnd; not counted: kernel writeback, sshfs, sshd");
        for part in self.parts() {
            match part {
                Part::New => self.new_files(&candidates, &mut report)?,
                Part::Small => self.small_files(&prepared.dir, &candidates, &mut report)?,
                Part::Records => records::run(self, &candidates, &mut report)?,
                // This part compares only mounts of Firn.
                Part::Rules if self.common.baseline_only => {}
                Part::Rules => {
                    rules::run(self, &firn, work.path(), &prepared.dir, &mut report)?;
                }
            }
        }
        Ok(report)
    }

    /// Returns the additional mount options with a comma before them. Returns an empty text if there are none.
    fn extra_options(&self) -> String {
        let more = self.mount_options.as_ref();
        more.map_or(String::new(), |more| format!(",{more}"))
    }

    /// Returns the parts of the benchmark to run.
    fn parts(&self) -> Vec<Part> {
        match (self.parts.is_empty(), self.backing) {
            (false, _) => self.parts.clone(),
            (true, Kind::Local) => {
                vec![Part::New, Part::Small, Part::Records, Part::Rules]
            }
            (true, _) => vec![Part::Records],
        }
    }

    /// Sets up the candidates, the ways to make changes that are compared: two without Firn, and three on mounts of
    /// Firn. Each mount has a directory in the prepared backing. Without Firn (`baseline_only`) only the first two are
    /// returned.
    fn candidates<'a>(
        &self,
        prepared: &Prepared,
        work: &Path,
        firn: &'a Firn,
    ) -> anyhow::Result<Vec<CommitCandidate<'a>>> {
        let native = prepared.dir.join("native");
        std::fs::create_dir_all(&native)?;
        let plain = |name| CommitCandidate {
            name,
            backing_dir: native.clone(),
            dir: native.clone(),
            mount: None,
            preload: None,
        };
        let mut all = vec![plain(NATIVE), plain(IN_PLACE)];
        if self.common.baseline_only {
            return Ok(all);
        }
        let extra_options = self.extra_options();
        let targets = [
            (FIRN, "mount", None),
            (ASYNC, "async", None),
            (PRELOAD, "preload", Some(firn.preload()?)),
        ];
        for (name, subdir, preload) in targets {
            let backing_dir = prepared.dir.join(subdir);
            let mount = firn.mount(
                &backing_dir,
                &work.join(format!("at-{subdir}")),
                &format!("drain=commit{extra_options}"),
            )?;
            mount.wait_populated()?;
            let dir = mount.path().to_owned();
            all.push(CommitCandidate {
                name,
                backing_dir,
                dir,
                mount: Some(mount),
                preload,
            });
        }
        Ok(all)
    }

    /// Measures the candidates in turns, once in each repeat. `measure_candidate` measures one candidate and returns
    /// one sample for each case. Returns the samples of all candidates, grouped by case.
    fn measure(
        &self,
        candidates: &[&CommitCandidate],
        title: &str,
        mut measure_candidate: impl FnMut(&CommitCandidate) -> anyhow::Result<Vec<Sample>>,
    ) -> anyhow::Result<Vec<CaseSamples>> {
        let bar = progress(
            u64::from(self.common.repeats()) * candidates.len() as u64,
            "commit",
        );
        // The samples by case, then by candidate.
        let mut cases: Vec<CaseSamples> = Vec::new();
        for _ in 0..self.common.repeats() {
            for (index, candidate) in candidates.iter().enumerate() {
                bar.set_message(format!("{title}, {}", candidate.name));
                for (case, sample) in measure_candidate(candidate)?.into_iter().enumerate() {
                    // The first measurement shows how many cases there are.
                    if cases.len() <= case {
                        let names = candidates
                            .iter()
                            .map(|candidate| (candidate.name.to_owned(), Vec::new()));
                        cases.push(names.collect());
                    }
                    cases[case][index].1.push(sample);
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(cases)
    }

    /// Measures how long it takes to write new large files and make them durable. Adds the case and its goals to the
    /// report.
    fn new_files(&self, candidates: &[CommitCandidate], report: &mut Report) -> anyhow::Result<()> {
        let size = self.size.unwrap_or(self.common.choose(1 << 30, 64 << 20));
        let each = (size / FILES).next_multiple_of(WRITE_BYTES);
        let name = format!("{FILES} new files, {} together", size_text(each * FILES));
        // A new file has no part that could be changed in place.
        let compared: Vec<&CommitCandidate> = candidates
            .iter()
            .filter(|candidate| candidate.name != IN_PLACE)
            .collect();
        let samples = self.measure(&compared, &name, |candidate| {
            let dir = candidate.dir.join("step");
            std::fs::create_dir(&dir)?;
            let paths: Vec<PathBuf> = (0..FILES)
                .map(|rank| dir.join(format!("rank{rank}")))
                .collect();
            let runs = vec![(each / WRITE_BYTES, WRITE_BYTES)];
            let task = |path: &PathBuf| Task::Write {
                path: path.clone(),
                runs: runs.clone(),
                sync: false,
                over: false,
            };
            let tasks: Vec<Task> = paths.iter().map(task).collect();
            let cost = candidate.write(&tasks, || {
                durable::sync_files(paths.iter().map(PathBuf::as_path), &dir)
            })?;
            std::fs::remove_dir_all(&dir)?;
            Ok(vec![cost.sample()])
        })?;
        add_cases(report, [name], samples);
        judge(report, FILES_GOAL, FILES_TIME_MAX);
        Ok(())
    }

    /// Measures how long it takes to change a quarter of each of many small files, and to make the changes durable.
    /// Adds the case and its goals to the report.
    fn small_files(
        &self,
        backing_dir: &Path,
        candidates: &[CommitCandidate],
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let count = self.count.unwrap_or(self.common.choose(10_000, 1_000));
        let name = format!("{count} files of 4K that exist, a quarter of each rewritten");
        let names_task = |dir: PathBuf, operation| Task::Names {
            dir,
            count,
            operation,
        };
        let mut created_dirs = Vec::new();
        let passthrough = Passthrough::start(backing_dir)?;
        let (on_firn, native): (Vec<_>, Vec<_>) = candidates
            .iter()
            .partition(|candidate| candidate.mount.is_some());
        let all = [native, vec![&passthrough.candidate], on_firn].concat();
        let samples = self.measure(&all, &name, |candidate| {
            let dir = candidate.dir.join("small");
            if !created_dirs.contains(&dir) {
                std::fs::create_dir(&dir)?;
                worker::run_all(&[names_task(dir.clone(), Operation::Create)])?;
                created_dirs.push(dir.clone());
            }
            // The native candidate stands for cp(1), which writes a file as a whole. All others write a part in place.
            let operation = if candidate.name == NATIVE {
                Operation::Create
            } else {
                Operation::Patch
            };
            let cost = candidate.write(&[names_task(dir.clone(), operation)], || {
                durable::sync_all(&candidate.backing_dir)
            })?;
            Ok(vec![cost.sample()])
        })?;
        for dir in created_dirs {
            std::fs::remove_dir_all(dir)?;
        }
        add_cases(report, [name], samples);
        judge(report, SMALL_GOAL, SMALL_TIME_MAX);
        judge_commit(report, COMMIT_TIME_MAX);
        Ok(())
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            parts: Vec::new(),
            backing: Kind::Local,
            size: None,
            count: None,
            file_size: None,
            mount_options: None,
            round_trip_us: 500,
            writes_per_s: 1000,
        }
    }
}

/// Goals of the ratio to the native time.
const FILES_TIME_MAX: Limit = Limit::Most(1.15);
const SMALL_TIME_MAX: Limit = Limit::Most(3.0);
const COMMIT_TIME_MAX: Limit = Limit::Most(1.5);
/// Names of the goals in the report.
const FILES_GOAL: &str = "new files, time until durable";
const SMALL_GOAL: &str = "small files, time until durable";

/// Adds a case to the report for each of `names`, with the samples of `measure`.
fn add_cases(
    report: &mut Report,
    names: impl IntoIterator<Item = String>,
    samples: Vec<CaseSamples>,
) {
    for (name, samples) in names.into_iter().zip(samples) {
        report.add(name, samples);
    }
}

/// Adds a goal for the last case: the ratio of each candidate of Firn to the native one.
fn judge(report: &mut Report, what: &str, limit: Limit) {
    for candidate in [FIRN, PRELOAD] {
        let ratio = report
            .cases
            .last()
            .and_then(|case| case.ratio(candidate, NATIVE, "durable"));
        report.judge(
            format!("{what}, {candidate} to {NATIVE}"),
            limit,
            ratio.as_slice(),
        );
    }
}

/// Adds a goal for the last case: the time of `firn commit` alone, compared with the whole native change.
fn judge_commit(report: &mut Report, limit: Limit) {
    for candidate in [FIRN, ASYNC, PRELOAD] {
        let of_last = |candidate: &str, metric| {
            report
                .cases
                .last()
                .and_then(|case| case.median(candidate, metric))
        };
        let ratio = of_last(candidate, "commit")
            .zip(of_last(NATIVE, "durable"))
            .map(|(ours, native)| ours / native);
        let name = format!("small files, the commit of {candidate} alone to all of {NATIVE}");
        report.judge(name, limit, ratio.as_slice());
    }
}

/// One way to change files.
struct CommitCandidate<'a> {
    name: &'static str,
    /// The directory of the candidate in the backing.
    backing_dir: PathBuf,
    /// The directory to which the processes write: the mount point, or `backing_dir` itself.
    dir: PathBuf,
    /// The mount with transactions. `None` for a candidate without Firn.
    mount: Option<Mount<'a>>,
    /// The preload library, if the processes load it.
    preload: Option<PathBuf>,
}

/// A mounted FUSE file system that passes every request on, and the candidate that writes through it.
struct Passthrough {
    candidate: CommitCandidate<'static>,
    _mounted: Mounted,
}

impl Passthrough {
    /// Mounts a FUSE file system that passes every request on to a directory. Creates that directory and the mount
    /// point below `dir`.
    fn start(dir: &Path) -> anyhow::Result<Self> {
        let backing_dir = dir.join("passthrough.b");
        let mount_point = dir.join("passthrough");
        std::fs::create_dir_all(&backing_dir)?;
        std::fs::create_dir_all(&mount_point)?;
        let server = Server::Plain {
            source: backing_dir.clone(),
        };
        let _mounted = Mounted::start(&server, &mount_point)?;
        let candidate = CommitCandidate {
            name: PASSTHROUGH,
            backing_dir,
            dir: mount_point,
            mount: None,
            preload: None,
        };
        Ok(Self {
            candidate,
            _mounted,
        })
    }
}

/// The cost of a change, in seconds.
struct ChangeCost {
    /// Time until all files were closed.
    closed_s: f64,
    /// Time until the change was durable.
    durable_s: f64,
    /// The part of `durable_s` that `firn commit` or fsync(2) took.
    commit_s: f64,
    /// Processor time of the workers and of firnd.
    cpu_s: f64,
}

impl ChangeCost {
    /// Returns the cost as the sample of a candidate.
    fn sample(&self) -> Sample {
        vec![
            ("closed", "s", self.closed_s),
            ("durable", "s", self.durable_s),
            ("commit", "s", self.commit_s),
            ("CPU", "s", self.cpu_s),
        ]
    }
}

impl CommitCandidate<'_> {
    /// Runs tasks and makes what they wrote durable. On a mount of Firn the tasks run in a transaction, which is then
    /// committed. Natively `sync` makes the files durable.
    fn write(
        &self,
        tasks: &[Task],
        sync: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<ChangeCost> {
        // Dirty pages of earlier measurements are written before the time is taken.
        durable::sync_all(&self.backing_dir)?;
        // Three times: the writers begin, the last one has closed its files, and everything is durable.
        let server_cpu_s = || self.mount.as_ref().map_or(0.0, Mount::cpu_s);
        let before = server_cpu_s();
        self.mount.as_ref().map_or(Ok(()), Mount::begin)?;
        let outcomes = worker::run_with(self.preload.as_deref(), tasks)?;
        // Not called for a native candidate, which has no mount.
        let commit = if self.name == ASYNC {
            Mount::commit_behind
        } else {
            Mount::commit
        };
        let closed_ns = cpu::now_ns();
        self.mount.as_ref().map_or_else(sync, commit)?;
        let durable_ns = cpu::now_ns();
        // The asynchronous commit is applied later; the next measurement must not pay for it.
        if self.name == ASYNC {
            self.mount.as_ref().map_or(Ok(()), Mount::wait_applied)?;
        }
        let begin_ns = outcomes
            .iter()
            .map(|outcome| outcome.begin_ns)
            .min()
            .unwrap_or(0);
        Ok(ChangeCost {
            closed_s: worker::elapsed_s(&outcomes),
            durable_s: (durable_ns - begin_ns) as f64 * 1e-9,
            commit_s: (durable_ns - closed_ns) as f64 * 1e-9,
            cpu_s: outcomes.iter().map(|outcome| outcome.cpu_s).sum::<f64>() + server_cpu_s()
                - before,
        })
    }

    /// Runs a task that changes nothing, and returns the seconds that it took. On a mount of Firn it runs in a
    /// transaction.
    fn read(&self, task: Task) -> anyhow::Result<f64> {
        self.mount.as_ref().map_or(Ok(()), Mount::begin)?;
        let outcomes = worker::run_with(self.preload.as_deref(), &[task])?;
        self.mount.as_ref().map_or(Ok(()), Mount::commit)?;
        Ok(worker::elapsed_s(&outcomes))
    }
}
