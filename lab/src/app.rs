//! `firn-lab app`: a real application with checkpoints, natively and in transactions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};

use firn_bench::firn::{Firn, Mount};
use firn_bench::options::{Common, progress};
use firn_bench::report::{Limit, Report, Sample};

const NATIVE: &str = "native";
const SYNCED: &str = "native, synced";
const FIRN: &str = "firn";
const PROGRAM: &str = "lmp";
/// Steps between two checkpoints, and between two frames of the trajectory.
const CHECKPOINT_STEPS: u32 = 200;
const FRAME_STEPS: u32 = 20;

/// Runs LAMMPS with periodic checkpoints, natively and in transactions.
///
/// A Lennard-Jones melt of one process writes its trajectory and its log, and every 200 steps a checkpoint
/// (restart file). Natively nothing more happens at a checkpoint; synced: the files are made durable then, as a
/// checkpoint should be; firn: `firn commit --begin`. Goal: the whole run takes at most 1.02 times as long as
/// natively. Needs LAMMPS (`apt install lammps`).
#[derive(Clone, Debug, clap::Args)]
pub struct AppArgs {
    #[command(flatten)]
    common: Common,
    /// Steps of the simulation (default: 2000, quick 400).
    #[arg(long, value_name = "COUNT")]
    steps: Option<u32>,
    /// Cells of the lattice in each direction, 4 atoms each (default: 20, quick 10).
    #[arg(long, value_name = "COUNT")]
    cells: Option<u32>,
}

struct Candidate<'a> {
    name: &'static str,
    dir: PathBuf,
    mount: Option<Mount<'a>>,
}

impl AppArgs {
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Report> {
        let version = Command::new(PROGRAM)
            .arg("-help")
            .stdin(Stdio::null())
            .output();
        let version = version.with_context(|| {
            format!("cannot run {PROGRAM}: install LAMMPS (apt install lammps)")
        })?;
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let version = version
            .lines()
            .find(|line| line.contains("Massively Parallel"))
            .unwrap_or("LAMMPS");
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut candidates = Vec::new();
        for name in [NATIVE, SYNCED] {
            candidates.push(Candidate {
                name,
                dir: work.subdir(&name.replace(", ", "-"))?,
                mount: None,
            });
        }
        if !self.common.baseline_only {
            let backing = work.subdir("backing")?;
            let point = work.subdir("firn")?;
            let mount = firn.mount(&backing, &point, "drain=commit,arena-size=256M")?;
            mount.begin()?;
            candidates.push(Candidate {
                name: FIRN,
                dir: point,
                mount: Some(mount),
            });
        }
        let steps = self.steps();
        let cells = self.cells();
        let mut report = Report::new("app");
        report.note(version.trim_end_matches([':', ' ']).to_owned());
        report.note(format!(
            "{} atoms, {steps} steps, a frame each {FRAME_STEPS}, a checkpoint each {CHECKPOINT_STEPS}; one process",
            4 * cells * cells * cells
        ));
        let bar = progress(
            u64::from(self.common.repeats()) * candidates.len() as u64,
            "app",
        );
        let mut samples = vec![Vec::new(); candidates.len()];
        for _ in 0..self.common.repeats() {
            for (candidate, samples) in candidates.iter().zip(&mut samples) {
                samples.push(candidate.measure(steps, cells)?);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let names = candidates.iter().map(|candidate| candidate.name.to_owned());
        report.add("the whole run", names.zip(samples).collect());
        let case = &report.cases[0];
        let ratio: Vec<f64> = case.ratio(FIRN, NATIVE, "time").into_iter().collect();
        report.judge("firn to native", Limit::Most(1.02), &ratio);
        for candidate in &candidates {
            candidate.mount.as_ref().map_or(Ok(()), Mount::commit)?;
        }
        Ok(report)
    }

    fn steps(&self) -> u32 {
        self.steps.unwrap_or(self.common.choose(2000, 400))
    }

    fn cells(&self) -> u32 {
        self.cells.unwrap_or(self.common.choose(20, 10))
    }
}

impl Candidate<'_> {
    fn measure(&self, steps: u32, cells: u32) -> anyhow::Result<Sample> {
        for entry in std::fs::read_dir(&self.dir)? {
            std::fs::remove_file(entry?.path())?;
        }
        if let Some(mount) = &self.mount {
            mount.commit()?;
            mount.begin()?;
        }
        let at_checkpoint = match &self.mount {
            Some(mount) => mount.shell("commit", "--begin"),
            None if self.name == SYNCED => "sync trajectory log.melt restart.melt.*".into(),
            None => "true".into(),
        };
        let input = self.dir.join("in.melt");
        std::fs::write(&input, script(steps, cells, &at_checkpoint))?;
        let begun = Instant::now();
        let output = Command::new(PROGRAM)
            .args(["-in", "in.melt", "-log", "log.melt", "-screen", "none"])
            .current_dir(&self.dir)
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .output()?;
        let time_s = begun.elapsed().as_secs_f64();
        if !output.status.success() {
            bail!(
                "{PROGRAM} failed: {}",
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        let bytes = written(&self.dir)?;
        if bytes < 1 << 10 {
            bail!("{PROGRAM} wrote nothing to {}", self.dir.display());
        }
        Ok(vec![
            ("time", "s", time_s),
            ("written", "MiB", bytes as f64 / f64::from(1 << 20)),
        ])
    }
}

fn written(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}

fn script(steps: u32, cells: u32, at_checkpoint: &str) -> String {
    format!(
        "units lj\natom_style atomic\nlattice fcc 0.8442\n\
         region box block 0 {cells} 0 {cells} 0 {cells}\ncreate_box 1 box\ncreate_atoms 1 box\nmass 1 1.0\n\
         velocity all create 3.0 87287 loop geom\npair_style lj/cut 2.5\npair_coeff 1 1 1.0 1.0 2.5\n\
         neighbor 0.3 bin\nneigh_modify every 20 delay 0 check no\nfix 1 all nve\nthermo 10\n\
         dump 1 all custom {FRAME_STEPS} trajectory id type x y z vx vy vz\n\
         run {steps} every {CHECKPOINT_STEPS} \"write_restart restart.melt.*\" \"shell {at_checkpoint}\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_written_before_it_is_committed() {
        let text = script(400, 10, "firn commit /work --begin");
        let run = text.lines().last().expect("a line");
        assert_eq!(
            run,
            "run 400 every 200 \"write_restart restart.melt.*\" \"shell firn commit /work --begin\""
        );
    }
}
