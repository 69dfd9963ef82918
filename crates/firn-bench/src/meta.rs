//! `firn bench meta`: measures the cost of metadata operations, such as create, stat and unlink.

use std::path::PathBuf;

use crate::firn::{Firn, Mount};
use crate::options::{Common, WorkDir, progress};
use crate::report::{Report, Sample};
use crate::serve::{Mounted, Server};
use crate::worker::{self, Operation, Task};

/// Creates, finds, lists, links and removes files.
///
/// The baseline is a plain FUSE passthrough file system written with the same crate, with the same
/// lifetimes of entries and attributes; the native directory stands beside it. Goal: at most 3 times
/// the plain passthrough's time.
#[derive(Clone, Debug, clap::Args)]
pub struct MetaArgs {
    #[command(flatten)]
    common: Common,
    /// Files (default: 10000, quick 1000).
    #[arg(long, value_name = "COUNT")]
    count: Option<u64>,
}

/// A measured operation.
#[derive(Clone, Copy)]
struct Phase {
    /// Name of the case in the report.
    title: &'static str,
    operation: Operation,
    /// The names for which the operation is done.
    names: Names,
}

/// Makes one line of [`PHASES`].
const fn phase(title: &'static str, operation: Operation, names: Names) -> Phase {
    Phase {
        title,
        operation,
        names,
    }
}

/// The operations in the order in which they are measured.
const PHASES: [Phase; 5] = [
    phase("create, write 4K, close", Operation::Create, Names::New),
    phase("unlink", Operation::Unlink, Names::FromCreate),
    phase("stat", Operation::Stat, Names::InBacking),
    phase("readdir", Operation::List, Names::InBacking),
    phase("link", Operation::Link, Names::InBacking),
];

/// The names for which an operation is done.
#[derive(Clone, Copy, PartialEq)]
enum Names {
    /// The operation creates them.
    New,
    /// The names that the phase `create` made.
    FromCreate,
    /// New names, made in the backing before the operation, so that the kernel does not know them.
    InBacking,
}

impl MetaArgs {
    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let candidates = self.candidates(&work, &firn)?;
        let count = self.count.unwrap_or(self.common.choose(10_000, 1_000));
        let mut report = Report::new("meta");
        let file_system = crate::machine::file_system_of(work.path());
        report.note(format!(
            "one process, {count} files in one directory on {file_system}"
        ));
        report.note(
            "stat, readdir and link: names made behind the mount, so that no cache knows them",
        );
        let mut samples = vec![vec![Vec::new(); candidates.len()]; PHASES.len()];
        let steps = self.common.repeats() as usize * candidates.len() * PHASES.len();
        let bar = progress(steps as u64, "meta");
        for round in 0..self.common.repeats() {
            for (index, candidate) in candidates.iter().enumerate() {
                for (phase, samples) in PHASES.iter().zip(&mut samples) {
                    samples[index].push(candidate.measure(round, *phase, count)?);
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        for (phase, samples) in PHASES.iter().zip(samples) {
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add(phase.title, names.zip(samples).collect());
        }
        Ok(report)
    }

    /// Makes the directories of the candidates: a FUSE server that only passes requests on (the baseline), the native
    /// file system, and Firn. The file systems are mounted for each measurement.
    fn candidates<'a>(
        &self,
        work: &WorkDir,
        firn: &'a Firn,
    ) -> anyhow::Result<Vec<MetaCandidate<'a>>> {
        let native = work.subdir("native")?;
        let mut all = vec![
            MetaCandidate {
                name: "plain passthrough",
                backing: work.subdir("plain.b")?,
                mount_point: work.subdir("plain")?,
                file_system: FileSystem::Plain,
            },
            MetaCandidate {
                name: "native",
                backing: native.clone(),
                mount_point: native,
                file_system: FileSystem::Native,
            },
        ];
        if !self.common.baseline_only {
            all.push(MetaCandidate {
                name: "firn",
                backing: work.subdir("firn.b")?,
                mount_point: work.subdir("firn")?,
                file_system: FileSystem::Firn(firn),
            });
        }
        Ok(all)
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            count: None,
        }
    }
}

/// Keeps the mount of a candidate alive.
#[allow(dead_code, reason = "held for its drop")]
enum MountGuard<'a> {
    Plain(Mounted),
    Firn(Mount<'a>),
}

/// The measured file system, and how it is mounted.
enum FileSystem<'a> {
    Native,
    Plain,
    Firn(&'a Firn),
}

/// One file system whose operations are measured.
struct MetaCandidate<'a> {
    name: &'static str,
    /// The directory in which the files are.
    backing: PathBuf,
    /// The mount point, or the backing if nothing is mounted.
    mount_point: PathBuf,
    file_system: FileSystem<'a>,
}

impl<'a> MetaCandidate<'a> {
    /// Mounts the file system for one measurement. Returns `None` for the native directory.
    ///
    /// Each measurement needs a new mount, because the kernel remembers the files of the previous one, and the plain
    /// passthrough file system has a descriptor for each of them.
    fn mount(&self) -> anyhow::Result<Option<MountGuard<'a>>> {
        Ok(match self.file_system {
            FileSystem::Native => None,
            FileSystem::Plain => {
                let server = Server::Plain {
                    source: self.backing.clone(),
                };
                Some(MountGuard::Plain(Mounted::start(
                    &server,
                    &self.mount_point,
                )?))
            }
            FileSystem::Firn(firn) => Some(MountGuard::Firn(firn.mount(
                &self.backing,
                &self.mount_point,
                "close=drain",
            )?)),
        })
    }

    /// Measures one phase with `count` names. `round` is the number of the repeat.
    fn measure(&self, round: u32, phase: Phase, count: u64) -> anyhow::Result<Sample> {
        // A directory is named after the operation and the round. `unlink` removes the files in the directory of
        // `create`.
        let name = match phase.names {
            Names::InBacking => format!("{:?}-{round}", phase.operation),
            Names::New | Names::FromCreate => format!("Create-{round}"),
        };
        let _mount = self.mount()?;
        let dir_in_backing = self.backing.join(&name);
        let dir = self.mount_point.join(&name);
        match phase.names {
            Names::New => std::fs::create_dir(&dir)?,
            Names::FromCreate => {}
            Names::InBacking => {
                std::fs::create_dir(&dir_in_backing)?;
                for index in 0..count {
                    std::fs::File::create(dir_in_backing.join(worker::name_of(index)))?;
                }
            }
        }
        let outcomes = worker::run_all(&[Task::Names {
            dir,
            count,
            operation: phase.operation,
        }])?;
        // `unlink` still needs the directory of `create`.
        if phase.names != Names::New {
            std::fs::remove_dir_all(&dir_in_backing)?;
        }
        Ok(vec![(
            "time a file",
            "µs",
            worker::elapsed_s(&outcomes) * 1e6 / count as f64,
        )])
    }
}
