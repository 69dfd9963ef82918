//! Command line: a flat loop over the arguments, no crate needed.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Text of `--help`.
pub const USAGE: &str = "\
usage: firn-example-heat --dir DIR [options]

  --dir DIR       where the checkpoints go
  --steps COUNT   steps in all (240)
  --every COUNT   steps between checkpoints (40)
  --ranks COUNT   processes (4)
  --size CELLS    cells along an edge of the cube (128)
  --fsync         fsync each checkpoint before it counts as complete
  --restart       go on from the newest complete checkpoint in DIR
  --report        after the result, print what the checkpoints cost
  --verify        only check the complete checkpoints in DIR
";

/// More ranks than this on one host are a typing error.
const RANKS_MAX: u32 = 256;
/// 2048³ cells in two fields are 128 GiB.
const SIZE_MAX: u32 = 2048;

/// What this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Starts the workers, completes checkpoints, prints the result.
    Launch,
    /// One rank; started by the launcher only.
    Worker(Place),
    /// Checks checkpoints, computes nothing.
    Verify,
}

/// What the launcher tells a worker about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Counts from 0.
    pub rank: u32,
    /// Abstract name of the launcher's socket.
    pub socket: String,
    /// The checkpoint to begin from.
    pub from_step: Option<u64>,
}

/// Everything the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Directory of the checkpoints.
    pub dir: PathBuf,
    /// Steps in all.
    pub steps: u64,
    /// Steps between checkpoints, at least 1.
    pub every: u64,
    /// Processes, 1 to `size`.
    pub ranks: u32,
    /// Cells along an edge, at least 4.
    pub size: u32,
    /// Sync each checkpoint.
    pub fsync: bool,
    /// Begin from the newest complete checkpoint.
    pub restart: bool,
    /// Print costs.
    pub report: bool,
    /// What this process is.
    pub mode: Mode,
}

impl Options {
    /// `None` means that help was asked for.
    pub fn from_args(args: impl Iterator<Item = OsString>) -> Result<Option<Options>, String> {
        let mut options = Options {
            dir: PathBuf::new(),
            steps: 240,
            every: 40,
            ranks: 4,
            size: 128,
            fsync: false,
            restart: false,
            report: false,
            mode: Mode::Launch,
        };
        let mut place = Place::default();
        let mut args = args;
        while let Some(flag) = args.next() {
            let name = flag.to_str().unwrap_or("");
            let mut value = || args.next().ok_or(format!("{name} needs a value"));
            match name {
                "--help" | "-h" => return Ok(None),
                "--dir" => options.dir = value()?.into(),
                "--steps" => options.steps = number(name, &value()?)?,
                "--every" => options.every = number(name, &value()?)?,
                "--ranks" => options.ranks = number(name, &value()?)?,
                "--size" => options.size = number(name, &value()?)?,
                "--fsync" => options.fsync = true,
                "--restart" => options.restart = true,
                "--report" => options.report = true,
                "--verify" => options.mode = Mode::Verify,
                "--worker-rank" => {
                    place.rank = number(name, &value()?)?;
                    options.mode = Mode::Worker(place.clone());
                }
                "--worker-socket" => place.socket = value()?.to_string_lossy().into_owned(),
                "--worker-from" => place.from_step = Some(number(name, &value()?)?),
                _ => return Err(format!("unknown option {}", flag.display())),
            }
        }
        options.check().map(Some)
    }

    fn check(self) -> Result<Options, String> {
        if self.dir.as_os_str().is_empty() {
            return Err("say with --dir where the checkpoints go".into());
        }
        if self.every == 0 {
            return Err("--every must be at least 1".into());
        }
        if !(4..=SIZE_MAX).contains(&self.size) {
            return Err(format!("--size must be 4 to {SIZE_MAX}"));
        }
        if !(1..=RANKS_MAX.min(self.size)).contains(&self.ranks) {
            return Err(format!("--ranks must be 1 to {}", RANKS_MAX.min(self.size)));
        }
        Ok(self)
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &OsStr) -> Result<T, String> {
    text.to_str()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| format!("{name}: {} is not a whole number", text.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Option<Options>, String> {
        Options::from_args(words.iter().map(OsString::from))
    }

    #[test]
    fn the_place_of_a_worker_is_taken_whole() {
        let words = [
            "--dir",
            "d",
            "--worker-socket",
            "s",
            "--worker-from",
            "40",
            "--worker-rank",
            "2",
        ];
        let mode = parse(&words).unwrap().unwrap().mode;
        assert_eq!(
            mode,
            Mode::Worker(Place {
                rank: 2,
                socket: "s".into(),
                from_step: Some(40)
            })
        );
    }

    #[test]
    fn wrong_values_are_refused_with_their_option() {
        assert!(
            parse(&["--dir", "d", "--steps", "many"])
                .unwrap_err()
                .contains("--steps")
        );
        assert!(
            parse(&["--dir", "d", "--ranks", "9", "--size", "8"])
                .unwrap_err()
                .contains("--ranks")
        );
        assert!(parse(&["--steps", "1"]).unwrap_err().contains("--dir"));
    }
}
