//! `firn top`: shows mounts and checkpoints, or the hosts of a job, on one screen.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};

use super::wait::parse_timeout_ms;
use crate::failure::{DONE, Failure};
use crate::output::{self, Paint};
use crate::top::sampler::TopRequest;
use crate::top::terminal::{render_once, show_screen};
use crate::verb::Verb;

/// Minimum of `--every` in milliseconds. firnd averages its rates over seconds, so a shorter interval shows nothing
/// new.
const EVERY_MIN_MS: u64 = 200;

pub const VERB: Verb = Verb {
    name: "top",
    about: "Watch mounts and checkpoints, or the hosts of a job, on one screen",
    long: "A screen that is redrawn each second: this host's mounts, rates, checkpoints with bars of their held, \
           drained and durable bytes, lanes, and what programs wait for; with --job the hosts that share a backing (see \
           `firn hosts`). The mount or host in the worst trouble is first. Keys: q quits, arrows choose, tab switches \
           to the checkpoints, p pauses, j switches between the host and the job, ? shows help. NO_COLOR turns colours \
           off.",
    examples: &[
        ("firn top", "the mounts of this host"),
        (
            "firn top /ckpt/run42",
            "with the checkpoints of a directory below a mount",
        ),
        (
            "firn top --job /scratch/run42",
            "the hosts that share a backing, which need not be mounted here",
        ),
        ("firn top --once --size 100x30", "one screen as text"),
    ],
    exits: &[
        (
            0,
            "ended by the user, or by a signal that asks the process to end",
        ),
        (1, "the terminal cannot be used"),
        (2, "there is no terminal, and no --once"),
        (10, "--once: PATH is not on a firn mount"),
    ],
    args: TopArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct TopArgs {
    /// The directory whose checkpoints are shown, on a mount; with --job the backing, or a mount point.
    #[arg(value_hint = ValueHint::DirPath)]
    path: Option<PathBuf>,
    /// Show the hosts of a job, and their sums.
    #[arg(short, long)]
    job: bool,
    /// Time between two samples; for a job at least two seconds, the interval at which hosts renew their leases.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_every)]
    every: u64,
    /// Print one screen as text, and end.
    #[arg(long)]
    once: bool,
    /// With --once: columns and lines of the screen.
    #[arg(long, value_name = "COLUMNSxLINES", default_value = "80x24", requires = "once", value_parser = parse_size)]
    size: (u16, u16),
}

/// Parses the interval between two samples. Returns milliseconds.
fn parse_every(text: &str) -> Result<u64, String> {
    let interval_ms = parse_timeout_ms(text)?;
    if interval_ms < EVERY_MIN_MS {
        return Err(format!("{EVERY_MIN_MS}ms is the shortest"));
    }
    Ok(interval_ms)
}

/// Parses the size of a screen, such as `80x24`. Returns its columns and its lines.
fn parse_size(text: &str) -> Result<(u16, u16), String> {
    let size = text
        .split_once('x')
        .and_then(|(columns, lines)| Some((columns.parse().ok()?, lines.parse().ok()?)));
    match size {
        Some((columns @ 20..=500, lines @ 5..=500)) => Ok((columns, lines)),
        _ => Err("columns and lines, like 80x24: 20x5 to 500x500".to_owned()),
    }
}

/// Shows the screen until the user ends it. With `--once` prints it as text.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = TopArgs::from_arg_matches(matches)?;
    let request = TopRequest {
        interval: Duration::from_millis(args.every),
        // With --job, the path is that of the job.
        directory: if args.job { None } else { args.path.clone() },
        job_path: args.path,
    };
    if args.once {
        let text = render_once(request, args.job, args.size)?;
        return output::print(&text).map(|()| DONE);
    }
    show_screen(request, args.job, Paint::stdout().is_coloured())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_bounded() {
        assert_eq!(parse_size("80x24"), Ok((80, 24)));
        for wrong in ["80", "x", "1x1", "99999x24", "80 x 24", "-1x5"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_every("2s"), Ok(2000));
        assert!(parse_every("10ms").is_err());
    }
}
