//! The program `firn-slowfs`: mounts a directory as slowly as a network file system would serve it, until it is
//! unmounted. The module `firn_testfs::slow` has the model of that file system.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use firn_testfs::slow::{Speed, serve};

const USAGE: &str = "usage: firn-slowfs SOURCE MOUNT_POINT [ROUND_TRIP_US MIB_PER_S]";

/// Parses the arguments and serves the directory. Without a speed in the arguments, the speed is that of an NFS
/// service.
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let parsed_args = match args[..] {
        [source, mount_point] => Some((source, mount_point, Speed::NFS)),
        [source, mount_point, round_trip_us, mib_per_s] => {
            let speed = parse_speed(round_trip_us, mib_per_s);
            speed.map(|speed| (source, mount_point, speed))
        }
        _ => None,
    };
    let Some((source, mount_point, speed)) = parsed_args else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match serve(Path::new(source), Path::new(mount_point), speed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("firn-slowfs: cannot serve {source} at {mount_point}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Parses a round-trip time in microseconds and a rate in MiB/s. Returns `None` if one is no number, or the rate is 0.
fn parse_speed(round_trip_us: &str, mib_per_s: &str) -> Option<Speed> {
    let mib_per_s: u64 = mib_per_s.parse().ok().filter(|rate| *rate > 0)?;
    Some(Speed {
        round_trip: Duration::from_micros(round_trip_us.parse().ok()?),
        bytes_per_s: mib_per_s.checked_mul(1 << 20)?,
    })
}
