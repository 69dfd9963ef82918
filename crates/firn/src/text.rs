//! Quantities and names for people.

use std::path::Path;

pub use firn_format::amount::bytes_text as bytes;
use firn_format::quote::quoted;
use firn_protocol::figures::Unit;

/// `1.5 MiB/s`.
pub fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", bytes(bytes_per_s.max(0.0) as u64))
}

/// `40 ms`, `2.1 s`, `3 min 20 s`, `5 h 10 min`, `3 d 2 h`.
pub fn seconds(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0 if seconds < 0.9995 => format!("{:.0} ms", seconds * 1e3),
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86400, whole % 86400 / 3600),
    }
}

/// The value of a figure in the unit that its name says.
pub fn figure(name: &str, value: f64) -> String {
    match Unit::of(name) {
        Unit::BytesPerSecond => rate(value),
        Unit::Bytes => bytes(value as u64),
        Unit::Seconds => seconds(value),
        Unit::Count => value.to_string(),
    }
}

/// `1 file`, `2 files`.
pub fn count(number: u64, noun: &str) -> String {
    if number == 1 {
        format!("1 {noun}")
    } else {
        format!("{number} {noun}s")
    }
}

/// A name that cannot break a line or steer a terminal, and is shown like no other.
pub fn name(path: &str) -> String {
    quoted(path.as_bytes())
}

/// The same for a path.
pub fn path(path: &Path) -> String {
    quoted(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units_at_most() {
        let shown = [0.04, 2.1, 200.0, 18_600.0, 266_400.0].map(seconds);
        assert_eq!(
            shown,
            ["40 ms", "2.1 s", "3 min 20 s", "5 h 10 min", "3 d 2 h"]
        );
    }

    #[test]
    fn a_name_cannot_break_its_line() {
        assert_eq!(name("a\nb\x1b[31m"), r"a\nb\x1b[31m");
    }
}
