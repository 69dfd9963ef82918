//! Numbers of bytes, as people are told them.

const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/// `0 B`, `1023 B`, `1.5 KiB`, `12.0 MiB`.
pub fn bytes_text(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    for next in units {
        // What would be printed as 1024.0 is 1.0 of the next unit.
        if value < 1023.95 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_at_most_four_digits() {
        let shown = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 12 << 30].map(bytes_text);
        assert_eq!(
            shown,
            [
                "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "12.0 GiB"
            ]
        );
    }
}
