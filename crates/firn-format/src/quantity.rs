//! Formats sizes, rates, durations and counts for messages, in the same form everywhere.

const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUTE_S: u64 = 60;
const HOUR_S: u64 = 60 * MINUTE_S;
const DAY_S: u64 = 24 * HOUR_S;

/// Formats a size: `0 B`, `1023 B`, `1.5 KiB`, `12.0 MiB`.
pub fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit_index = 0;
    // A value that would be printed as 1024.0 is printed as 1.0 of the next unit.
    while value >= 1023.95 && unit_index + 1 < UNITS.len() {
        value /= 1024.0;
        unit_index += 1;
    }
    format!("{value:.1} {}", UNITS[unit_index])
}

/// Formats a rate: `1.5 MiB/s`.
pub fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", bytes(bytes_per_s.max(0.0) as u64))
}

/// Formats a duration: `40 ms`, `2.1 s`, `3 min 20 s`, `5 h 10 min`, `3 d 2 h`.
pub fn seconds(seconds: f64) -> String {
    let whole_s = seconds as u64;
    match whole_s {
        // A value that would be printed as 1000 ms is printed as 1.0 s.
        0 if seconds < 0.9995 => format!("{:.0} ms", seconds * 1e3),
        0..MINUTE_S => format!("{seconds:.1} s"),
        MINUTE_S..HOUR_S => format!("{} min {} s", whole_s / MINUTE_S, whole_s % MINUTE_S),
        HOUR_S..DAY_S => format!("{} h {} min", whole_s / HOUR_S, whole_s % HOUR_S / MINUTE_S),
        _ => format!("{} d {} h", whole_s / DAY_S, whole_s % DAY_S / HOUR_S),
    }
}

/// Formats a count with its noun: `1 file`, `2 files`.
pub fn count(number: u64, noun: &str) -> String {
    if number == 1 {
        format!("1 {noun}")
    } else {
        format!("{number} {noun}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_at_most_four_digits() {
        let shown = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 12 << 30].map(bytes);
        assert_eq!(
            shown,
            [
                "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "12.0 GiB"
            ]
        );
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let shown = [0.04, 2.1, 200.0, 18_600.0, 266_400.0].map(seconds);
        assert_eq!(
            shown,
            ["40 ms", "2.1 s", "3 min 20 s", "5 h 10 min", "3 d 2 h"]
        );
    }
}
