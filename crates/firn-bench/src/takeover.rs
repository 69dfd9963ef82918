//! `firn bench takeover`: measures how long programs wait when firnd is killed and another firnd takes the mount over,
//! and how much the live table costs while nothing fails. The live table is the file that tells the next firnd what the
//! kernel knows.

mod pause;
mod rates;

use crate::firn::Firn;
use crate::options::Common;
use crate::report::{Limit, Report};

use pause::Load;

/// Pauses of a writer while firnd is killed, and rates with the live table.
///
/// A writer of 4 KiB measures its longest wait while another firnd goes on with the mount. The baseline is a restart
/// without a takeover: `firn mount` over the same arena, after which programs have to open their files again. Rates
/// with `takeover=auto` are compared with those with `takeover=no`.
#[derive(Clone, Debug, clap::Args)]
pub struct TakeoverArgs {
    #[command(flatten)]
    common: Common,
    /// Kills with 100 open files and 256 MiB pending (default: 100, quick 2).
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    kills: Option<u32>,
}

impl TakeoverArgs {
    /// Runs the benchmark and returns its figures. Fails if a candidate cannot be set up or measured.
    pub fn run(&self) -> anyhow::Result<Report> {
        let work = self.common.work_dir()?;
        let firn = Firn::find(self.common.firn.as_deref())?;
        let mut report = Report::new("takeover");
        report.note(
            "pause: the longest write of 4 KiB while firnd is killed, one process, arena on tmpfs",
        );
        let usual = Load {
            handles: 100,
            directories: 100,
            pending_bytes: self.common.choose(256 << 20, 16 << 20),
        };
        let kills = self.kills.unwrap_or(self.common.choose(100, 2));
        if !self.common.baseline_only {
            let pauses = usual.measure(&firn, &work, "usual", kills, &mut report)?;
            report.judge(
                "pause, median [s]",
                Limit::Most(0.3),
                &[pauses.percentile(50)],
            );
            report.judge("pause, p99 [s]", Limit::Most(1.0), &[pauses.percentile(99)]);
            let keeper_mib = pauses.keeper_bytes as f64 / f64::from(1 << 20);
            report.judge(
                "memory of the keeper [MiB]",
                Limit::Most(2.0),
                &[keeper_mib],
            );
            let large = Load {
                handles: self.common.choose(10_000, 500),
                directories: self.common.choose(100_000, 500),
                pending_bytes: self.common.choose(1 << 30, 32 << 20),
            };
            let pauses =
                large.measure(&firn, &work, "large", self.common.repeats(), &mut report)?;
            report.judge(
                "pause under the large load, longest [s]",
                Limit::Most(3.0),
                &[pauses.percentile(100)],
            );
        }
        rates::measure(&self.common, &firn, &work, &mut report)?;
        Ok(report)
    }

    /// Returns the options that every benchmark has.
    pub fn common(&self) -> &Common {
        &self.common
    }

    /// Returns the arguments with which `firn bench all` runs this benchmark.
    pub fn with(common: Common) -> Self {
        Self {
            common,
            kills: None,
        }
    }
}
