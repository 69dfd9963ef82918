//! `firn bench meta`: what names cost.

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

/// What is timed, and whether its names are made behind the mount beforehand, so that the kernel
/// cannot know them from their creation.
const PHASES: [(&str, Operation, Names); 5] = [
    ("create, write 4K, close", Operation::Create, Names::None),
    ("unlink", Operation::Unlink, Names::FromCreate),
    ("stat", Operation::Stat, Names::Behind),
    ("readdir", Operation::List, Names::Behind),
    ("link", Operation::Link, Names::Behind),
];

#[derive(Clone, Copy, PartialEq)]
enum Names {
    None,
    FromCreate,
    Behind,
}

impl MetaArgs {
    /// Runs it.
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
        for ((title, ..), samples) in PHASES.iter().zip(samples) {
            let names = candidates.iter().map(|candidate| candidate.name.to_owned());
            report.add(*title, names.zip(samples).collect());
        }
        Ok(report)
    }

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
                through: work.subdir("plain")?,
                target: WriteTarget::Plain,
            },
            MetaCandidate {
                name: "native",
                backing: native.clone(),
                through: native,
                target: WriteTarget::Native,
            },
        ];
        if !self.common.baseline_only {
            all.push(MetaCandidate {
                name: "firn",
                backing: work.subdir("firn.b")?,
                through: work.subdir("firn")?,
                target: WriteTarget::Firn(firn),
            });
        }
        Ok(all)
    }

    /// Options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// As `firn bench all` runs it.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            count: None,
        }
    }
}

/// Keeps the mount of a candidate alive.
#[allow(dead_code, reason = "held for its drop")]
enum Held<'a> {
    Plain(Mounted),
    Firn(Mount<'a>),
}

enum WriteTarget<'a> {
    Native,
    Plain,
    Firn(&'a Firn),
}

struct MetaCandidate<'a> {
    name: &'static str,
    backing: PathBuf,
    through: PathBuf,
    target: WriteTarget<'a>,
}

impl<'a> MetaCandidate<'a> {
    /// Returns a mount for each measurement: the kernel keeps the files of the last one in mind, and the plain
    /// passthrough a descriptor for each.
    fn mount(&self) -> anyhow::Result<Option<Held<'a>>> {
        Ok(match self.target {
            WriteTarget::Native => None,
            WriteTarget::Plain => {
                let server = Server::Plain {
                    source: self.backing.clone(),
                };
                Some(Held::Plain(Mounted::start(&server, &self.through)?))
            }
            WriteTarget::Firn(firn) => Some(Held::Firn(firn.mount(
                &self.backing,
                &self.through,
                "close=drain",
            )?)),
        })
    }

    fn measure(
        &self,
        round: u32,
        (_, operation, names): (&str, Operation, Names),
        count: u64,
    ) -> anyhow::Result<Sample> {
        // unlink empties the directory that create filled; the others have one of their own.
        let name = match names {
            Names::Behind => format!("{operation:?}-{round}"),
            Names::None | Names::FromCreate => format!("Create-{round}"),
        };
        let _mount = self.mount()?;
        let behind = self.backing.join(&name);
        let through = self.through.join(&name);
        match names {
            Names::None => std::fs::create_dir(&through)?,
            Names::FromCreate => {}
            Names::Behind => {
                std::fs::create_dir(&behind)?;
                for index in 0..count {
                    std::fs::File::create(behind.join(worker::name_of(index)))?;
                }
            }
        }
        let outcomes = worker::run_all(&[Task::Names {
            dir: through,
            count,
            operation,
        }])?;
        if names != Names::None {
            std::fs::remove_dir_all(&behind)?;
        }
        Ok(vec![(
            "time a file",
            "µs",
            worker::elapsed_s(&outcomes) * 1e6 / count as f64,
        )])
    }
}
