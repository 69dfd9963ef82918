//! `firn-lab all`: every figure, one after the other.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use crate::figures::{FIGURES, Figure};
use crate::{Experiment, product, svg};

/// Makes every figure, and writes each as a report (JSON) and a picture (SVG).
///
/// A figure that this machine cannot make (without root, or where a program is missing) is named at the end, and
/// the exit status is 1. On a quiet machine all of it takes hours; --quick takes minutes, and its figures mean nothing.
#[derive(Clone, Debug, clap::Args)]
pub struct AllArgs {
    /// Where reports and pictures go (default: `figures` where cargo builds).
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only figures whose names begin with this.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// How often each candidate is measured.
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Less data, two repeats, fewer cases.
    #[arg(long)]
    quick: bool,
    /// Directory to work in; its file system is measured.
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// The firn program to mount with (default: that of this repository).
    #[arg(long, value_name = "PROGRAM")]
    firn: Option<PathBuf>,
}

impl AllArgs {
    /// The firn program that is named.
    pub fn firn(&self) -> Option<&PathBuf> {
        self.firn.as_ref()
    }

    /// Makes them.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let out = self.out.clone();
        let out = out.unwrap_or_else(|| product::target_dir().join("figures"));
        std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
        let mut missing = Vec::new();
        let wanted = FIGURES
            .iter()
            .filter(|figure| figure.name.starts_with(&self.only));
        for figure in wanted {
            println!("\n{} ({})", figure.name, figure.paper);
            if let Err(error) = self.make(figure, &out) {
                eprintln!("firn: {}: {error:#}", figure.name);
                missing.push(figure.name);
            }
        }
        println!("\nreports and pictures are in {}", out.display());
        if missing.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        println!("not made: {}", missing.join(", "));
        Ok(ExitCode::FAILURE)
    }

    fn make(&self, figure: &Figure, out: &std::path::Path) -> anyhow::Result<()> {
        let report = Experiment::parse(self.arguments(figure))?.run()?;
        report.print();
        report.write_json(&out.join(format!("{}.json", figure.name)))?;
        svg::write(&report, &out.join(format!("{}.svg", figure.name)))
    }

    fn arguments(&self, figure: &Figure) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["firn-lab".into()];
        args.extend(figure.experiment.iter().map(OsString::from));
        args.extend(["--repeats".into(), self.repeats.to_string().into()]);
        args.extend(["--dir".into(), self.dir.clone().into_os_string()]);
        if self.quick {
            args.push("--quick".into());
        }
        if let Some(firn) = &self.firn {
            args.extend(["--firn".into(), firn.clone().into_os_string()]);
        }
        args
    }
}
